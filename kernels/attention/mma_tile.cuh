// Tiles of keys and values in shared memory as the matrix instructions read them.
#pragma once
#include "../common/mma.cuh"
#include "scores.cuh"

namespace pelton::gpu {

// Rows of D elements (a multiple of 64) in pieces of 16 bytes, which are swizzled so that the eight rows that
// one access of load_matrix_x4 reads lie in different banks.
template <class T, int D>
__device__ __forceinline__ T* piece_of(T* tile, int row, int piece) {
  return tile + row * D + (piece ^ (row & 7)) * 8;
}

// Where this lane's row of a matrix lies. `tile` has rows of D elements; operand_at gives the address for the
// 16 elements of the head that begin at 16 step, of the rows 16 block and after.
template <int D>
struct LaneRow {
  SharedAddress first;

  __device__ LaneRow(SharedAddress tile, int row, int piece)
      : first(tile + row * D * 2 + (piece ^ (row & 7)) * 16) {}
  __device__ __forceinline__ SharedAddress at(int step, int block = 0) const {
    return (first ^ (step * 32)) + block * (16 * D * 2);
  }
};

// For A operands of 16 positions x 16 elements of the head, from a tile of rows of positions
// (load_matrix_x4<false>).
template <int D>
__device__ __forceinline__ LaneRow<D> lane_of_rows(SharedAddress tile) {
  const int lane = threadIdx.x % kWarp;
  return {tile, lane % 16, lane / 16};
}

// For A operands of 16 elements of the head x 16 positions, from the same kind of tile
// (load_matrix_x4<true>).
template <int D>
__device__ __forceinline__ LaneRow<D> lane_of_columns(SharedAddress tile) {
  const int lane = threadIdx.x % kWarp;
  return {tile, lane % 8 + lane / 16 * 8, lane / 8 % 2};
}

// A operand of 16 positions x 16 elements of the head, from a tile of rows of positions.
template <int D, class T>
__device__ __forceinline__ void load_rows(uint32_t (&a)[4], T* tile, int first_row, int step) {
  const int lane = threadIdx.x % kWarp;
  load_matrix_x4<false>(a, piece_of<T, D>(tile, first_row + lane % 16, 2 * step + lane / 16));
}

// B operands of two neighbouring blocks of 8 positions x 16 elements of the head.
template <int D, class T>
__device__ __forceinline__ void load_rows_b(uint32_t (&b)[2][2], T* tile, int first_row, int step) {
  const int lane = threadIdx.x % kWarp;
  uint32_t r[4];
  load_matrix_x4<false>(r,
                        piece_of<T, D>(tile, first_row + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
  for (int i = 0; i < 4; ++i) b[i / 2][i % 2] = r[i];
}

// B operands of two neighbouring blocks of 8 elements of the head x 16 positions.
template <int D, class T>
__device__ __forceinline__ void load_columns_b(uint32_t (&b)[2][2], T* tile, int first_row, int step) {
  const int lane = threadIdx.x % kWarp;
  uint32_t r[4];
  load_matrix_x4<true>(r, piece_of<T, D>(tile, first_row + lane % 16, 2 * step + lane / 16));
  for (int i = 0; i < 4; ++i) b[i / 2][i % 2] = r[i];
}

}  // namespace pelton::gpu
