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
#include <type_traits>

#if !defined(PELTON_EMULATION) && !defined(__HIP_PLATFORM_AMD__)
#define PELTON_CUDA 1
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#if defined(__HIP_PLATFORM_AMD__) && !defined(PELTON_EMULATION)
#include "amd.cuh"
#endif

#include "dtype.h"
#include "rows.h"

namespace pelton::gpu {

// Lanes that work together: a warp of NVIDIA's, half of a wave of 64 on AMD's.
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

template <class T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

// The most blocks that a grid can have, and a grid of `blocks` that no launch accepts when there are more.
constexpr int64_t kMaxBlocks = 0x7fffffff;
inline unsigned grid_size(int64_t blocks) { return blocks <= kMaxBlocks ? unsigned(blocks) : 0; }

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
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16, quiet = u >> 16 | 0x40u;
  return {uint16_t((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded)};
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
// The same 16 bytes, which the caches give up last.
__device__ __forceinline__ Vector<uint32_t, 4> load_vector_kept(const uint32_t* from) {
#if defined(PELTON_CUDA) && defined(__CUDA_ARCH__)
  Vector<uint32_t, 4> v;
  asm volatile(
      "{\n .reg .b64 policy;\n createpolicy.fractional.L2::evict_last.b64 policy, 1.0;\n"
      " ld.global.L1::evict_last.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], policy;\n}"
      : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
      : "l"(from));
  return v;
#else
  return load_vector<uint32_t>(from);
#endif
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

// Division of indexes by a number that is the same for all threads, without the long code of a division of
// 64-bit integers. Exact for indexes below 2^52.
struct Divisor {
  int64_t value;
  double inverse;

  explicit Divisor(int64_t v) : value(v), inverse(1.0 / double(v)) {}

  __device__ __forceinline__ int64_t divide(int64_t index, int64_t& rest) const {
    int64_t quotient = int64_t(double(index) * inverse);  // off by 1 at most
    rest = index - quotient * value;
    if (rest < 0) --quotient, rest += value;
    if (rest >= value) ++quotient, rest -= value;
    return quotient;
  }
};

// RowLayout, for kernels.
struct DeviceRows {
  Divisor per_group;
  int64_t stride, group_stride;

  explicit DeviceRows(const RowLayout& rows)
      : per_group(rows.per_group), stride(rows.stride), group_stride(rows.group_stride) {}

  __device__ __forceinline__ int64_t offset(int64_t row) const {
    if (row < per_group.value) return row * stride;
    int64_t rest;
    const int64_t group = per_group.divide(row, rest);
    return group * group_stride + rest * stride;
  }
};

// N elements that stay packed while they wait in registers: a Vector's 16-bit elements take a register each.
template <class T, int N>
struct Packed {
  static constexpr bool kWords = sizeof(T) * N % 4 == 0;
  using Word = std::conditional_t<kWords, uint32_t, uint16_t>;
  static constexpr int kCount = int(sizeof(T) * N / sizeof(Word));
  Vector<Word, kCount> words;

  static __device__ __forceinline__ Packed load(const T* from) {
    return {load_vector<Word, kCount>(reinterpret_cast<const Word*>(from))};
  }
  __device__ __forceinline__ void store(T* to) const { store_vector(reinterpret_cast<Word*>(to), words); }

  static __device__ __forceinline__ Packed rounded(const float (&values)[N]) {
    Packed result;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (sizeof(T) == 4) {
        memcpy(&result.words[i], &values[i], 4);
      } else if constexpr (kWords) {
        result.words[i] = pack2<T>(values[2 * i], values[2 * i + 1]);
      } else {
        result.words[i] = from_float<T>(values[i]).bits;
      }
    }
    return result;
  }

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (sizeof(T) == 4) {
      float value;
      memcpy(&value, &words[i], 4);
      return value;
    } else if constexpr (kWords) {
      return to_float(T{uint16_t(words[i / 2] >> (16 * (i % 2)))});
    } else {
      return to_float(T{words[i]});
    }
  }

  // The compiler forgets what it computed from the elements, which else stay in registers as floats, too.
  __device__ __forceinline__ void forget() {
#ifdef PELTON_CUDA
    if constexpr (kWords) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(words[i]));
    }
#endif
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

// x / y for y >= 1, to two units in the last place; 0 where y is beyond 2^126. An exact division takes three
// times as long.
__device__ __forceinline__ float divide(float x, float y) {
#ifdef PELTON_CUDA
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(y));
  return x * reciprocal;
#else
  return x / y;
#endif
}

#ifndef PELTON_FAST_MATH
#define PELTON_FAST_MATH 0
#endif

// e^x. Fast: 2^(x log2 e) with the product rounded, relative error up to 2^-21 + |x| 2^-23; otherwise to one
// unit in the last place. The feature fast-math decides.
template <bool Fast = PELTON_FAST_MATH>
__device__ __forceinline__ float exponential(float x) {
  if constexpr (Fast) {
    return __expf(x);
  } else {
    return expf(x);
  }
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

// Where the device sees page-locked memory of the host; null for any other. False after an error.
inline bool pinned_view(const void* host, void** view) {
#if defined(__HIP_PLATFORM_AMD__) && !defined(PELTON_EMULATION)
  return amd::pinned_view(host, view);
#else
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, host) != cudaSuccess) return false;
  *view = attributes.type == cudaMemoryTypeHost ? attributes.devicePointer : nullptr;
  return true;
#endif
}

// After a launch: 0, or the error that the operator turns into its message.
inline int launch_result() { return int(cudaGetLastError()); }

}  // namespace pelton::gpu
