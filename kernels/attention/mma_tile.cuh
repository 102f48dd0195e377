// Tiles of keys and values in shared memory as the matrix instructions read them.
#pragma once
#include "../common/mma.cuh"
#include "batch.cuh"

namespace pelton::gpu {

// Rows of D elements (a multiple of 64) in pieces of 16 bytes, which are swizzled so that the eight rows that
// one access of load_matrix_x4 reads lie in different banks.
template <class T, int D>
__device__ __forceinline__ T* piece_of(T* tile, int row, int piece) {
  return tile + row * D + (piece ^ (row & 7)) * 8;
}

// A operand of 16 positions x 16 elements of the head, from a tile of rows of positions.
template <int D, class T>
__device__ __forceinline__ void load_rows(uint32_t (&a)[4], T* tile, int first_row, int step) {
  const int lane = threadIdx.x % kWarp;
  load_matrix_x4<false>(a, piece_of<T, D>(tile, first_row + lane % 16, 2 * step + lane / 16));
}

// A operand of 16 elements of the head x 16 positions, from the same kind of tile.
template <int D, class T>
__device__ __forceinline__ void load_columns(uint32_t (&a)[4], T* tile, int first_row, int step) {
  const int lane = threadIdx.x % kWarp;
  load_matrix_x4<true>(a,
                       piece_of<T, D>(tile, first_row + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
}

// Whether one of the two half-precision values is infinite or NaN.
template <class T>
__device__ __forceinline__ bool any_not_finite(uint32_t pair) {
  constexpr uint32_t kExponent = T::is_bf16 ? 0x7f80u : 0x7c00u;
  return (pair & kExponent) == kExponent || (pair >> 16 & kExponent) == kExponent;
}

// The score in the unit of exp2, from the product of query and key.
struct Scores {
  float scale, cap, cap_inverse;  // cap 0: none

  __device__ explicit Scores(const AttentionArgs& a)
      : scale(a.soft_cap > 0 ? a.scale : a.scale * kLog2e),
        cap(a.soft_cap * kLog2e),
        cap_inverse(a.soft_cap > 0 ? a.scale / a.soft_cap : 0) {}
  __device__ float operator()(float product) const {
    return cap > 0 ? cap * tanhf(product * cap_inverse) : product * scale;
  }
};

}  // namespace pelton::gpu
