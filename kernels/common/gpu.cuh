// What every gpu.cu is built from. The files are ordinary CUDA C++ without a torch header; for ROCm and for
// the emulation they pass through hipify first. Branches between the platforms stand in this folder's .cuh
// files and nowhere else: PELTON_EMULATION (plain C++ on the CPU), __HIP_PLATFORM_AMD__ (ROCm), else CUDA.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if !defined(PELTON_EMULATION) && !defined(__HIP_PLATFORM_AMD__)
#define PELTON_CUDA 1
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include "dtype.h"

namespace pelton::gpu {

// Lanes that work together: a warp of NVIDIA's, half of a wave of 64 on AMD's.
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

template <class T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

// Blocks of a grid for `count` of them. Kernels go on by the size of the grid when there are more.
inline unsigned grid_size(int64_t count) { return unsigned(std::min<int64_t>(count, 0x7fffffff)); }

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(f16 x) {
#ifdef PELTON_CUDA
  return __half2float(__ushort_as_half(x.bits));
#else
  _Float16 h;
  memcpy(&h, &x.bits, 2);
  return float(h);
#endif
}
__device__ __forceinline__ float to_float(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

// Rounds to nearest, ties to even; NaN stays NaN.
template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ f16 from_float<f16>(float x) {
#ifdef PELTON_CUDA
  return {__half_as_ushort(__float2half_rn(x))};
#else
  const _Float16 h = _Float16(x);
  f16 result;
  memcpy(&result.bits, &h, 2);
  return result;
#endif
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
#ifdef PELTON_CUDA
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
#else
  uint32_t u;
  memcpy(&u, &x, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {uint16_t((u >> 16) | 0x40u)};
  return {uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
#endif
}

// Two half-precision values in a register, `low` in the low half: what matrix instructions take.
template <class T>
__device__ __forceinline__ uint32_t pack2(float low, float high) {
#ifdef PELTON_CUDA
  if constexpr (sizeof(T) == 2) {
    uint32_t bits;
    if constexpr (T::is_bf16) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
      memcpy(&bits, &pair, 4);
    } else {
      const __half2 pair = __floats2half2_rn(low, high);
      memcpy(&bits, &pair, 4);
    }
    return bits;
  }
#endif
  return uint32_t(from_float<T>(low).bits) | uint32_t(from_float<T>(high).bits) << 16;
}

// N elements that are read or written by one access (16 bytes at most).
template <class T, int N>
struct alignas(sizeof(T) * N) Vector {
  static_assert(sizeof(T) * N <= 16);
  T data[N];

  __device__ __forceinline__ T& operator[](int i) { return data[i]; }
  __device__ __forceinline__ const T& operator[](int i) const { return data[i]; }
};

template <class T>
constexpr int kVectorWidth = 16 / int(sizeof(T));

template <class T, int N = kVectorWidth<T>>
__device__ __forceinline__ Vector<T, N> load_vector(const T* from) {
  return *reinterpret_cast<const Vector<T, N>*>(from);
}
template <class T, int N>
__device__ __forceinline__ void store_vector(T* to, const Vector<T, N>& v) {
  *reinterpret_cast<Vector<T, N>*>(to) = v;
}

// The widest access in bytes, 16 at most, that fits all of these addresses, strides and sizes in bytes.
inline int access_bytes(std::initializer_list<int64_t> numbers) {
  uint64_t bits = 16;
  for (const int64_t number : numbers) bits |= uint64_t(number);
  return int(bits & (~bits + 1));
}
inline int64_t address(const void* p) { return int64_t(reinterpret_cast<uintptr_t>(p)); }

// Calls f with a value of the type that moves `bytes` (1, 2, 4, 8 or 16) by one access, for copies.
template <class F>
inline void dispatch_access(int bytes, F&& f) {
  switch (bytes) {
    case 16:
      return f(Vector<uint32_t, 4>{});
    case 8:
      return f(Vector<uint32_t, 2>{});
    case 4:
      return f(uint32_t{});
    case 2:
      return f(uint16_t{});
    default:
      return f(uint8_t{});
  }
}

// Threads over the items of many rows: blocks of x items by y rows, a grid of rows (x) by items (y). Kernels
// go on by the size of the grid, which no count exceeds.
struct RowGrid {
  dim3 grid, block;

  RowGrid(int64_t rows, int64_t items, int items_per_thread, int threads = 256) {
    const int64_t wanted = ceil_div<int64_t>(items, items_per_thread);
    int x = 1;
    while (x < threads && x < wanted) x *= 2;
    block = dim3(unsigned(x), unsigned(threads / x));
    grid = dim3(grid_size(ceil_div<int64_t>(rows, threads / x)),
                unsigned(std::min<int64_t>(ceil_div<int64_t>(wanted, x), 65535)));
  }
};

// Whether 16-byte accesses may be used: a base pointer, or a stride in bytes.
inline bool is_aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }
inline bool is_aligned16(int64_t bytes) { return bytes % 16 == 0; }

template <class T>
__device__ __forceinline__ T shuffle(T v, int lane) {
  return __shfl_sync(kAllLanes, v, lane, kWarp);
}
template <class T>
__device__ __forceinline__ T shuffle_xor(T v, int mask) {
  return __shfl_xor_sync(kAllLanes, v, mask, kWarp);
}

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= 3.40282347e38f; }

// Sum or maximum over groups of Width lanes, the same result in each of them.
template <int Width = kWarp>
__device__ __forceinline__ float warp_sum(float v) {
  for (int mask = Width / 2; mask > 0; mask /= 2) v += shuffle_xor(v, mask);
  return v;
}
template <int Width = kWarp>
__device__ __forceinline__ float warp_max(float v) {
  for (int mask = Width / 2; mask > 0; mask /= 2) v = fmaxf(v, shuffle_xor(v, mask));
  return v;
}

// Whether any lane of the warp has a true value.
__device__ __forceinline__ bool warp_any(bool value) { return warp_max(value ? 1.f : 0.f) > 0; }

// Sum over a block of Threads threads, the same result in each of them. All threads must call it.
template <int Threads>
__device__ __forceinline__ float block_sum(float v) {
  static_assert(Threads % kWarp == 0);
  constexpr int kWarps = Threads / kWarp;
  v = warp_sum(v);
  if constexpr (kWarps == 1) return v;
  __shared__ float partial[kWarps];
  __syncthreads();  // a sum before this one may still be read
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = v;
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < kWarps; ++i) sum += partial[i];
  return sum;
}

// The block's dynamic shared memory, aligned to 1024 bytes.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
#ifdef PELTON_EMULATION
  return reinterpret_cast<T*>(emulation::dynamic_shared());
#else
  extern __shared__ __align__(1024) unsigned char pelton_dynamic_shared[];
  return reinterpret_cast<T*>(pelton_dynamic_shared);
#endif
}

// What the current device is. Asked of the driver once a device.
struct DeviceProperties {
  int multiprocessors, shared_memory_per_block, compute_capability;  // capability: 90 for 9.0
};
const DeviceProperties& device_properties();

// Lets a kernel use `bytes` of dynamic shared memory, which needs asking beyond 48 KiB.
template <class Kernel>
inline int allow_shared_memory(Kernel* kernel, int bytes) {
  if (bytes <= 48 * 1024) return 0;
  return int(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

// After a launch: 0, or the error that the operator turns into its message.
inline int launch_result() { return int(cudaGetLastError()); }

}  // namespace pelton::gpu
