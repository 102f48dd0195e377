// Kernels with what sm_90 adds: right ones, and ones with one planted bug each.
#pragma once
#include "../../kernels/common/hopper.cuh"

namespace pelton::gpu {
namespace {

enum class Bulk {
  right,
  no_wait,
  no_release,
  no_syncwarp,
  too_few_bytes,
  too_many_arrivals,
  not_initialised
};

// Warp 0 copies 64 numbers into shared memory, twice; two warps bring them to `out`.
template <Bulk kBulk>
__global__ void copied_in_bulk(const float* in, float* out, int n) {
  __shared__ __align__(16) float values[64];
  __shared__ Barrier full, empty;
  const int t = int(threadIdx.x) - 32;
  if (threadIdx.x == 0) {
    if (kBulk != Bulk::not_initialised) full.init(1);
    empty.init(2);
    fence_barrier_init();
  }
  __syncthreads();
  for (int round = 0; round < 2; ++round) {
    if (t == -32) {
      if (kBulk != Bulk::no_release) empty.wait(round ^ 1);
      full.arrive_and_expect(kBulk == Bulk::too_few_bytes ? 512 : 256);
      if (kBulk == Bulk::too_many_arrivals) full.arrive();
      copy_bulk(values, in + 64 * round, 256, full);
    } else if (t >= 0) {
      if (kBulk != Bulk::no_wait) full.wait(round);
      out[64 * round + t] = values[t];
      if (kBulk != Bulk::no_syncwarp) __syncwarp();
      if (t % 32 == 0) empty.arrive();
    }
  }
}

// Boxes of 4 rows and 64 columns of 16 bits, of a tensor of 5 rows and 72 columns: out[box][row][column].
__global__ void boxes(const __grid_constant__ CUtensorMap map, float* out) {
  __shared__ Barrier full;
  auto* const tile = dynamic_shared<unsigned char>();
  if (threadIdx.x == 0) {
    full.init(1);
    fence_barrier_init();
    for (int box = 0; box < 4; ++box) copy_box(tile + 512 * box, map, full, box % 2 * 64 - 8, box / 2 * 3, 0);
    full.arrive_and_expect(4 * 512);
  }
  __syncthreads();
  full.wait(0);
  for (int i = threadIdx.x; i < 1024; i += blockDim.x) {
    const int at = 2 * i ^ (2 * i >> 7 & 7) << 4;  // as it is swizzled
    out[i] = float(*reinterpret_cast<uint16_t*>(tile + at));
  }
}

// Two warps exchange what they have.
template <bool kRight>
__global__ void named_barriers(const float* in, float* out, int n) {
  __shared__ float values[64];
  const int t = threadIdx.x;
  if (t < 64) {
    values[t] = in[t];
    named_sync(kRight || t >= 32 ? 2 : 3, 96);
    out[t] = values[63 - t];
  } else {
    named_arrive(2, 96);
  }
}

enum class Group { right, no_fence, no_wait, no_commit };

// in: A [64, 64] and B [64, 64], a column of B after the other; out: A * B.
template <class T, bool kRegisters, bool kRowsOfN, Group kGroup>
__global__ void warpgroup_product(const float* in, float* out, int n) {
  constexpr int kTileBytes = 64 * 128;
  auto* const a = dynamic_shared<unsigned char>();
  auto* const b = a + kTileBytes;
  const int t = threadIdx.x, lane = t % 32, group = lane / 4, pair = lane % 4;
  const auto store = [&](unsigned char* tile, int row, int column, float x) {
    const int at = row * 128 + column * 2;
    *reinterpret_cast<uint16_t*>(tile + (at ^ (at >> 7 & 7) << 4)) = from_float<T>(x).bits;
  };
  for (int i = t; i < 64 * 64; i += kWarpgroup) {
    const int row = i / 64, k = i % 64;
    store(a, row, k, in[i]);
    store(b, kRowsOfN ? k : row, kRowsOfN ? row : k, in[64 * 64 + i]);
  }
  if (kGroup != Group::no_fence) fence_shared_stores();
  named_sync(1, kWarpgroup);
  float d[32];
  product_fence();
  for (int step = 0; step < 4; ++step) {
    const uint32_t tile = descriptor_at(tile_descriptor(b, kTileBytes), step * (kRowsOfN ? 2048 : 32));
    if constexpr (kRegisters) {
      uint32_t fragment[4];
      for (int i = 0; i < 4; ++i) {
        const float* const from =
            in + (t / 32 * 16 + group + i % 2 * 8) * 64 + 16 * step + 2 * pair + i / 2 * 8;
        fragment[i] = pack2<T>(from[0], from[1]);
      }
      product_registers<T, kRowsOfN>(d, fragment, tile, step > 0);
    } else {
      product_shared<T>(d, descriptor_at(tile_descriptor(a), step * 32), tile, step > 0);
    }
  }
  if (kGroup != Group::no_commit) product_commit();
  if (kGroup != Group::no_wait) product_wait<0>();
  for (int i = 0; i < 32; ++i) {
    const int row = t / 32 * 16 + group + i / 2 % 2 * 8, column = i / 4 * 8 + 2 * pair + i % 2;
    out[row * 64 + column] = d[i];
  }
}

}  // namespace
}  // namespace pelton::gpu
