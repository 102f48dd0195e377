// Where rows lie in memory, without torch.
#pragma once
#include <cstdint>

// Device code asks for offsets too.
#if defined(__CUDACC__) || defined(__HIPCC__)
#define PELTON_HOST_DEVICE __host__ __device__
#else
#define PELTON_HOST_DEVICE
#endif

namespace pelton {

// Groups of rows: rows of a group are `stride` elements apart, groups `group_stride`.
struct RowLayout {
  int64_t per_group, stride, group_stride;

  PELTON_HOST_DEVICE int64_t offset(int64_t row) const {
    return row / per_group * group_stride + row % per_group * stride;
  }
};

}  // namespace pelton
