// HIP on a CPU, for tests: what hipified kernels need of it. A kernel's threads are fibers of one thread of
// the process, blocks run one after another, and every access to memory is checked (see memory.cpp). What a
// kernel does wrong becomes the error that hipGetLastError returns, with the text that hipGetErrorString
// gives.
#pragma once
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

// --- the language ---

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// A block's static shared memory: blocks run one after another, so one instance does. The runtime finds all
// of it as the library's thread-local memory, and fills it with poison for each block.
#define __shared__ static thread_local

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

#define threadIdx (::pelton::emulation::thread_index())
#define blockIdx (::pelton::emulation::block_index())
#define blockDim (::pelton::emulation::block_size())
#define gridDim (::pelton::emulation::grid_size())
#define warpSize (::pelton::emulation::wave_size())

// hipify writes hipLaunchKernelGGL(( kernel<T, 4>), dim3(grid), dim3(block), shared, stream, arguments...).
#define hipLaunchKernelGGL(kernel, ...) ::pelton::emulation::launch(#kernel, kernel, __VA_ARGS__)

#define __syncthreads() (void)::pelton::emulation::sync_threads("__syncthreads", __FILE__, __LINE__, 0)
#define __syncthreads_or(p) \
  (::pelton::emulation::sync_threads("__syncthreads_or", __FILE__, __LINE__, (p) != 0) > 0)
#define __syncthreads_count(p) \
  (::pelton::emulation::sync_threads("__syncthreads_count", __FILE__, __LINE__, (p) != 0))
#define __syncthreads_and(p) \
  (::pelton::emulation::sync_threads("__syncthreads_and", __FILE__, __LINE__, (p) == 0) == 0)

// --- the runtime ---

enum hipError_t {
  hipSuccess = 0,
  hipErrorInvalidValue = 1,
  hipErrorInvalidConfiguration = 9,
  hipErrorLaunchFailure = 719,
};
enum hipFuncAttribute {
  hipFuncAttributeMaxDynamicSharedMemorySize,
  hipFuncAttributePreferredSharedMemoryCarveout
};
enum hipDeviceAttribute_t {
  hipDeviceAttributeMultiprocessorCount,
  hipDeviceAttributeMaxSharedMemoryPerBlock,
  hipDeviceAttributeComputeCapabilityMajor,
  hipDeviceAttributeComputeCapabilityMinor,
  hipDeviceAttributeWarpSize,
};
enum hipMemcpyKind {
  hipMemcpyHostToHost,
  hipMemcpyHostToDevice,
  hipMemcpyDeviceToHost,
  hipMemcpyDeviceToDevice,
  hipMemcpyDefault
};
enum hipMemoryType {
  hipMemoryTypeUnregistered,
  hipMemoryTypeHost,
  hipMemoryTypeDevice,
  hipMemoryTypeManaged
};
struct hipPointerAttribute_t {
  hipMemoryType type;
  void *devicePointer, *hostPointer;
};
using hipStream_t = struct PeltonEmulatedStream*;

hipError_t hipGetLastError();
hipError_t hipPeekAtLastError();
const char* hipGetErrorString(hipError_t error);
const char* hipGetErrorName(hipError_t error);
hipError_t hipFuncSetAttribute(const void* kernel, hipFuncAttribute attribute, int value);
hipError_t hipGetDevice(int* device);
hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int device);
hipError_t hipMemcpyAsync(void* to, const void* from, size_t bytes, hipMemcpyKind kind, hipStream_t stream);
hipError_t hipPointerGetAttributes(hipPointerAttribute_t* attributes, const void* pointer);
hipError_t hipMemsetAsync(void* to, int value, size_t bytes, hipStream_t stream);

namespace pelton::emulation {

// --- threads ---

struct Index {
  unsigned x, y, z;
};

// Of the thread that asks. A function's frame belongs to one thread, so the compiler may ask once a function.
[[gnu::const]] Index thread_index() noexcept;
[[gnu::const]] Index block_index() noexcept;
[[gnu::const]] Index block_size() noexcept;
[[gnu::const]] Index grid_size() noexcept;
[[gnu::const]] int wave_size() noexcept;

// What PELTON_EMULATION_WAVE asks for, 32 or 64: launchers choose AMD's instructions of such a wave. 0 when
// it is not set: NVIDIA's.
int wanted_wave();

// Waits for all threads of the block; returns the sum of `value` over them.
int sync_threads(const char* name, const char* file, int line, int value);

// Lets other threads go on: in loops that wait for them.
void yield();

// The block's dynamic shared memory.
void* dynamic_shared();

// Makes the running kernel fail with this text.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// --- operations of a warp ---

// What the lanes of a warp bring to an operation and take from it.
struct Lanes {
  uint64_t present;
  alignas(16) unsigned char in[64][96], out[64][64];

  template <class T>
  T input(int lane, size_t offset = 0) const {
    T value;
    memcpy(&value, in[lane] + offset, sizeof value);
    return value;
  }
  template <class T>
  void output(int lane, const T& value, size_t offset = 0) {
    memcpy(out[lane] + offset, &value, sizeof value);
  }
};

struct WarpCall {
  const char* name;
  uint64_t mask;  // lanes that must take part
  int width;      // of the group: 32, or that of a wave
  size_t in_bytes, out_bytes;
  void (*finish)(Lanes&);  // makes `out` of `in` when all are there; null: `out` is what `source` brought
  int source;
  bool orders_memory = false;  // whether lanes see afterwards what the others wrote before
  bool needs_all = false;      // whether lanes that have returned are missed
};

// Waits until all lanes of the mask that still run are in the same operation.
void meet(const WarpCall& call, const void* in, void* out);

// The caller's number within its group of `width` lanes.
[[gnu::const]] int lane_of(int width) noexcept;

// Lanes that have not returned.
uint64_t live_lanes(int width);

template <class T>
T shuffle(const char* name, uint64_t mask, int width, T value, int source) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 16);
  T result;
  meet({name, mask, width, sizeof(T), sizeof(T), nullptr, source}, &value, &result);
  return result;
}

// The lane that each kind of shuffle reads, in a warp whose segments of `width` lanes are apart.
inline int source_index(int lane, int from, int width) {
  return (lane & ~(width - 1)) + (from & (width - 1));
}
inline int source_up(int lane, int delta, int width) {
  return lane - delta < (lane & ~(width - 1)) ? lane : lane - delta;
}
inline int source_down(int lane, int delta, int width) {
  return lane + delta > (lane | (width - 1)) ? lane : lane + delta;
}
inline int source_xor(int lane, int mask, int width) {
  return (lane ^ mask) > (lane | (width - 1)) ? lane : lane ^ mask;
}

// A mask of 32 bits names lanes of a warp of 32, one of 64 bits those of a wave.
template <class Mask>
int width_of() {
  return sizeof(Mask) == 8 ? wave_size() : 32;
}
template <class Mask>
uint64_t bits_of(Mask mask) {
  return sizeof(Mask) == 8 ? uint64_t(mask) : uint64_t(uint32_t(mask));
}

// The bits of the lanes whose predicate holds.
uint64_t vote(const char* name, uint64_t mask, int width, bool predicate);

template <class T, class F>
void reduce_lanes(Lanes& lanes, F f) {
  bool first = true;
  T total{};
  for (int i = 0; i < 64; ++i) {
    if (!(lanes.present >> i & 1)) continue;
    total = first ? lanes.input<T>(i) : f(total, lanes.input<T>(i));
    first = false;
  }
  for (int i = 0; i < 64; ++i) lanes.output(i, total);
}
template <class T, class F>
T reduce(const char* name, uint32_t mask, T value, F) {
  T result;
  meet({name, mask, 32, sizeof(T), sizeof(T), [](Lanes& lanes) { reduce_lanes<T>(lanes, F{}); }, 0}, &value,
       &result);
  return result;
}

// --- memory ---

// Says that an atomic operation is about to happen; other threads may go on before it.
void before_atomic(void* address, size_t bytes);
void fence();

template <class T, class F>
__attribute__((no_sanitize("thread"), noinline)) T atomic_update(T* address, F f) {
  before_atomic(address, sizeof(T));
  const T old = *address;
  *address = f(old);
  return old;
}

void copy_async16(void* shared, const void* global, bool valid);
void copy_async_commit();
void copy_async_wait(int pending);

// --- launch ---

struct Launch {
  const char* name;
  const void* kernel;
  dim3 grid, block;
  size_t shared;
  void (*call)(void* closure);  // runs the kernel for one thread
  void* closure;
  size_t closure_bytes;
};

void run(const Launch& launch);

template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared,
            hipStream_t, Arguments&&... arguments) {
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<std::decay_t<Parameters>...> values;
  } call{kernel, {std::forward<Arguments>(arguments)...}};
  const auto run_thread = [](void* c) {
    std::apply(static_cast<Call*>(c)->kernel, static_cast<Call*>(c)->values);
  };
  run({name, reinterpret_cast<const void*>(kernel), grid, block, shared, run_thread, &call, sizeof call});
}

}  // namespace pelton::emulation

#include "hopper.h"
#include "intrinsics.h"
#include "matrix.h"
