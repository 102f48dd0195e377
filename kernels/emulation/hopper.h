// What sm_90 adds, by its definition in the PTX ISA: barriers that count bytes ("mbarrier"), named barriers
// ("barrier"), bulk copies ("cp.async.bulk") and products of a warpgroup ("wgmma"). kernels/common/hopper.cuh
// has the same as instructions. Included by emulation.h.
//
// Copies and products are as late as they may be: a copy lands when nobody else can go on (in the order
// `forward` at once), a product reads shared memory and writes its sums when it is waited for. What is used
// before is poison, and accesses that no barrier orders are races.
#pragma once

namespace pelton::emulation {

// A barrier in shared memory.
struct alignas(8) AsyncBarrier {
  uint64_t state;

  void init(int arrivals);
  void arrive();
  void arrive_and_expect(int bytes);
  void wait(int parity);
};

// Orders ordinary stores to shared memory before what wgmma reads.
void fence_shared_stores();

// The block's named barriers 1 to 15.
void named_sync(int barrier, int threads);
void named_arrive(int barrier, int threads);

// A tensor of 16-bit elements in boxes whose rows are 128 bytes, swizzled by 128 bytes. Innermost dimension
// first; strides in bytes.
struct TensorMap {
  static constexpr int kMostDimensions = 5;
  const unsigned char* data = nullptr;
  int rank = 0;
  uint64_t sizes[kMostDimensions] = {}, strides[kMostDimensions] = {};
  uint32_t box[kMostDimensions] = {};
};
// False for what the driver refuses.
bool make_map(TensorMap& map, const void* data, int rank, const uint64_t* sizes, const uint64_t* strides,
              const uint32_t* box);
void copy_box(void* to, const TensorMap& map, AsyncBarrier& barrier, const int* at);
void copy_bulk(void* to, const void* from, int bytes, AsyncBarrier& barrier);

// Where a tile is, as an offset in the window of shared memory: the lower half of wgmma's descriptor.
uint32_t tile_descriptor(const void* tile, int next_columns);

// wgmma.mma_async.m64nNk16: D[64 x N] = or += A[64 x 16] * B[16 x N], N / 2 sums a lane; kernels/common/
// hopper.cuh says who holds what. Each warp of the warpgroup makes 16 rows.
template <bool IsBf16>
void product_registers(float* d, int n, const uint32_t* a, uint32_t b, bool rows_of_n, bool add);
template <bool IsBf16>
void product_shared(float* d, int n, uint32_t a, uint32_t b, bool add);
void product_commit();
void product_wait(int pending);

}  // namespace pelton::emulation
