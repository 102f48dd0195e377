// What Hopper (sm_90a) adds, as thin functions over PTX: barriers that count bytes, bulk tensor copies (TMA),
// matrix products of a warpgroup from shared memory (wgmma) and registers that warpgroups hand to each other.
// Names and rules: PTX ISA, "Asynchronous warpgroup level matrix instructions", "mbarrier",
// "cp.async.bulk.tensor".
#pragma once
#ifndef PELTON_EMULATION
#include <cuda.h>
#endif

#include "mma.cuh"

namespace pelton::gpu {

constexpr int kWarpgroup = 128;

#ifdef PELTON_EMULATION
// The same by definition: kernels/emulation/hopper.h. What follows below says what each of them does.
using Barrier = emulation::AsyncBarrier;
using CUtensorMap = emulation::TensorMap;
using emulation::copy_bulk, emulation::fence_shared_stores, emulation::named_arrive, emulation::named_sync,
    emulation::product_commit;

inline void fence_barrier_init() {}
inline void product_fence() {}
inline void prefetch_line(const void*) {}
inline void prefetch_map(const CUtensorMap&) {}
template <int Count>
void release_registers() {}
template <int Count>
void take_registers() {}
template <class R>
void pin(R&) {}

template <class... Coordinates>
void copy_box(void* to, const CUtensorMap& map, Barrier& barrier, Coordinates... at) {
  const int all[] = {at...};
  emulation::copy_box(to, map, barrier, all);
}
template <int Rank>
int encode_map(CUtensorMap& map, bool, const void* data, const uint64_t (&sizes)[Rank],
               const uint64_t (&strides)[Rank - 1], const uint32_t (&box)[Rank]) {
  return emulation::make_map(map, data, Rank, sizes, strides, box) ? 0 : int(cudaErrorInvalidValue);
}

inline uint32_t tile_descriptor(const void* tile, int next_columns = 16) {
  return emulation::tile_descriptor(tile, next_columns);
}
inline uint32_t descriptor_at(uint32_t tile, int bytes) { return tile + (bytes >> 4); }
template <int Pending>
void product_wait() {
  emulation::product_wait(Pending);
}
template <class T, int D>
void product_shared(float (&d)[D], uint32_t a, uint32_t b, bool add) {
  emulation::product_shared<T::is_bf16>(d, 2 * D, a, b, add);
}
template <class T, bool kRowsOfN, int D>
void product_registers(float (&d)[D], const uint32_t* a, uint32_t b, bool add) {
  emulation::product_registers<T::is_bf16>(d, 2 * D, a, b, kRowsOfN, add);
}
#else

// ---------------------------------------------------------------- barriers

// A barrier in shared memory. A phase ends when `arrivals` arrivals and all expected bytes have come; who
// waits for the n-th phase (n from 0) waits for parity n % 2.
struct alignas(8) Barrier {
  uint64_t state;

  __device__ __forceinline__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(arrivals)
                 : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
  }
  __device__ __forceinline__ void arrive_and_expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
                 "r"(bytes)
                 : "memory");
  }
  __device__ __forceinline__ bool passed(int parity) {
    uint32_t done;
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(this)), "r"(parity)
        : "memory");
    return done != 0;
  }
  __device__ __forceinline__ void wait(int parity) {
    while (!passed(parity)) {
    }
  }
};

// After the barriers' initialisation, before __syncthreads: the copy engine sees them.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

// After ordinary stores to shared memory that wgmma or the copy engine read next, before the barrier between.
__device__ __forceinline__ void fence_shared_stores() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The block's named barriers 1 to 15 (0 is __syncthreads): `threads` threads sync or arrive.
__device__ __forceinline__ void named_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---------------------------------------------------------------- registers

// Called by all warps of a warpgroup; what the block holds in all must stay within what it was launched with.
template <int Count>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

// ---------------------------------------------------------------- bulk tensor copies

// Asks for a line of global memory in the L2 cache.
__device__ __forceinline__ void prefetch_line(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies the map's box at these coordinates (innermost first) to shared memory; what lies outside of the
// tensor becomes zero. The box's bytes count on the barrier.
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap& map, Barrier& barrier, int x, int y,
                                         int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap& map, Barrier& barrier, int x, int y,
                                         int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// Copies `bytes` contiguous bytes, a multiple of 16, from and to addresses that are aligned to 16 bytes.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, int bytes, Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(&barrier))
      : "memory");
}

// A map over a tensor of 16-bit elements for boxes whose rows are 128 bytes in shared memory, swizzled by 128
// bytes. Sizes, strides (bytes, of the dimensions after the first) and box from the innermost dimension on.
// Host code; the driver's function is found at run time, so that nothing links libcuda. 0, or an error of the
// runtime.
template <int Rank>
inline int encode_map(CUtensorMap& map, bool is_bf16, const void* data, const uint64_t (&sizes)[Rank],
                      const uint64_t (&strides)[Rank - 1], const uint32_t (&box)[Rank]) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(found)
                                                                         : nullptr;
  }();
  if (encode == nullptr) return int(cudaErrorNotSupported);
  cuuint64_t map_sizes[Rank], map_strides[Rank - 1];
  cuuint32_t steps[Rank];
  for (int i = 0; i < Rank; ++i) {
    map_sizes[i] = sizes[i];
    steps[i] = 1;
    if (i > 0) map_strides[i - 1] = strides[i - 1];
  }
  const CUresult error = encode(
      &map, is_bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, Rank,
      const_cast<void*>(data), map_sizes, map_strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return error == CUDA_SUCCESS ? 0 : int(cudaErrorInvalidValue);
}

// ---------------------------------------------------------------- matrix products

// How wgmma finds a tile in shared memory: rows of 128 bytes, 128-byte swizzle, 8 rows an atom of 1024 bytes.
//   rows of K (64 elements of K a row): the next 8 rows are 1024 bytes on, 16 elements of K are 32 bytes on;
//   rows of N (64 elements of N a row): 8 more of K are 1024 bytes on, 64 more of N `next_columns` bytes.
// This is the descriptor's lower half; the upper one is the same for all such tiles.
__device__ __forceinline__ uint32_t tile_descriptor(const void* tile, int next_columns = 16) {
  return uint32_t(next_columns >> 4) << 16 | (shared_address(tile) & 0x3ffff) >> 4;
}
__device__ __forceinline__ uint32_t descriptor_at(uint32_t tile, int bytes) { return tile + (bytes >> 4); }

// Before the first product after registers (accumulators or A) or the group's order changed.
__device__ __forceinline__ void product_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes the group of products issued since the last one.
__device__ __forceinline__ void product_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most Pending groups are unfinished.
template <int Pending>
__device__ __forceinline__ void product_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// The compiler must not move what reads or writes these registers over this point: products run while it goes
// on.
template <int N>
__device__ __forceinline__ void pin(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
template <int N>
__device__ __forceinline__ void pin(uint32_t (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// D[64 x N] = or += A[64 x 16] * B[16 x N] for a warpgroup; T is f16 or bf16, D fp32 in d[N / 2]. Warp w has
// rows 16 w ... of D and A: lane l holds in d[4 i ... 4 i + 3] columns 8 i + 2 (l % 4), + 1 of rows l / 4 and
// l / 4 + 8, and A in four registers as mma_m16n8k16 has it.
//   product_shared: A and B from shared memory, rows of K (B is [N x K])
//   product_registers: A from registers, B from shared memory in rows of N (B is [K x N]), adds to D
template <int N>
struct Product;

#define PELTON_DESCRIPTOR(name, low) ".reg .b64 " name "; mov.b64 " name ", {" low ", 0x40000040};\n"
#define PELTON_PREDICATE(value) ".reg .pred p; setp.ne.b32 p, " value ", 0;\n"
#define PELTON_D8(i)                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define PELTON_D32(i) PELTON_D8(i), PELTON_D8(i + 8), PELTON_D8(i + 16), PELTON_D8(i + 24)
#define PELTON_10(t) "%" t "0,%" t "1,%" t "2,%" t "3,%" t "4,%" t "5,%" t "6,%" t "7,%" t "8,%" t "9"
#define PELTON_30 PELTON_10("") "," PELTON_10("1") "," PELTON_10("2")
#define PELTON_60 PELTON_30 "," PELTON_10("3") "," PELTON_10("4") "," PELTON_10("5")
#define PELTON_90 PELTON_60 "," PELTON_10("6") "," PELTON_10("7") "," PELTON_10("8")

// The instructions of one N: the accumulators as text, the numbers of the operands after them, the
// accumulators.
#define PELTON_PRODUCT_OF(N, TYPE, TEXT, O0, O1, O2, O3, O4, O5, O6, ...)                                    \
  static __device__ __forceinline__ void shared(TYPE, float (&d)[N / 2], uint32_t a, uint32_t b, bool add) { \
    asm volatile("{" PELTON_DESCRIPTOR("a", O0) PELTON_DESCRIPTOR("b", O1)                                   \
                     PELTON_PREDICATE(O2) "wgmma.mma_async.sync.aligned.m64n" #N                             \
                                          "k16.f32." PELTON_TYPE_##TYPE " {" TEXT "}, a, b, p, 1, 1, 0, 0;}" \
                 : __VA_ARGS__                                                                               \
                 : "r"(a), "r"(b), "r"(int(add)));                                                           \
  }                                                                                                          \
  template <int kRowsOfN>                                                                                    \
  static __device__ __forceinline__ void registers(TYPE, float (&d)[N / 2], const uint32_t* a, uint32_t b,   \
                                                   bool add) {                                               \
    asm volatile("{" PELTON_DESCRIPTOR("b", O4) PELTON_PREDICATE(O5) "wgmma.mma_async.sync.aligned.m64n" #N  \
                                                                     "k16.f32." PELTON_TYPE_##TYPE           \
                 " {" TEXT "}, {" O0 ", " O1 ", " O2 ", " O3 "}, b, p, 1, 1, " O6 ";}"                       \
                 : __VA_ARGS__                                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(int(add)), "n"(kRowsOfN));        \
  }
#define PELTON_TYPE_f16 "f16.f16"
#define PELTON_TYPE_bf16 "bf16.bf16"
#define PELTON_PRODUCT(N, ...)              \
  template <>                               \
  struct Product<N> {                       \
    PELTON_PRODUCT_OF(N, f16, __VA_ARGS__)  \
    PELTON_PRODUCT_OF(N, bf16, __VA_ARGS__) \
  };

PELTON_PRODUCT(64, PELTON_30 ",%30,%31", "%32", "%33", "%34", "%35", "%36", "%37", "%38", PELTON_D32(0))
PELTON_PRODUCT(80, PELTON_30 "," PELTON_10("3"), "%40", "%41", "%42", "%43", "%44", "%45", "%46",
               PELTON_D32(0), PELTON_D8(32))
PELTON_PRODUCT(96, PELTON_30 "," PELTON_10("3") ",%40,%41,%42,%43,%44,%45,%46,%47", "%48", "%49", "%50",
               "%51", "%52", "%53", "%54", PELTON_D32(0), PELTON_D8(32), PELTON_D8(40))
PELTON_PRODUCT(128, PELTON_60 ",%60,%61,%62,%63", "%64", "%65", "%66", "%67", "%68", "%69", "%70",
               PELTON_D32(0), PELTON_D32(32))
PELTON_PRODUCT(192, PELTON_90 ",%90,%91,%92,%93,%94,%95", "%96", "%97", "%98", "%99", "%100", "%101", "%102",
               PELTON_D32(0), PELTON_D32(32), PELTON_D32(64))
PELTON_PRODUCT(256,
               PELTON_90 "," PELTON_10("9") "," PELTON_10("10") "," PELTON_10(
                   "11") ",%120,%121,%122,%123,%124,%125,%126,%127",
               "%128", "%129", "%130", "%131", "%132", "%133", "%134", PELTON_D32(0), PELTON_D32(32),
               PELTON_D32(64), PELTON_D32(96))

#undef PELTON_D8
#undef PELTON_D32
#undef PELTON_10
#undef PELTON_30
#undef PELTON_60
#undef PELTON_90
#undef PELTON_PRODUCT
#undef PELTON_PRODUCT_OF
#undef PELTON_TYPE_f16
#undef PELTON_TYPE_bf16
#undef PELTON_DESCRIPTOR
#undef PELTON_PREDICATE

template <class T, int D>
__device__ __forceinline__ void product_shared(float (&d)[D], uint32_t a, uint32_t b, bool add) {
  Product<2 * D>::shared(T{}, d, a, b, add);
}
template <class T, bool kRowsOfN, int D>
__device__ __forceinline__ void product_registers(float (&d)[D], const uint32_t* a, uint32_t b, bool add) {
  Product<2 * D>::template registers<kRowsOfN>(T{}, d, a, b, add);
}

#endif  // PELTON_EMULATION

}  // namespace pelton::gpu
