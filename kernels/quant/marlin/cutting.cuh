// A line of tiles between blocks, for the kernels that cut their products so. Method: Osama et al.,
// "Stream-K", 2023.
#pragma once
#include "../../common/gpu.cuh"

namespace pelton::gpu::marlin {

// The line cut into parts, the first of which are one longer when it does not divide.
struct Cutting {
  int each = 0, longer = 0;

  Cutting() = default;
  __host__ __device__ Cutting(unsigned total, unsigned parts)
      : each(int(total / parts)), longer(int(total % parts)) {}
  __device__ int first(int part) const { return part * each + min(part, longer); }
  __device__ int part_of(int tile) const {
    const int in_longer = longer * (each + 1);
    return tile < in_longer ? tile / (each + 1) : longer + (tile - in_longer) / each;
  }
};

}  // namespace pelton::gpu::marlin
