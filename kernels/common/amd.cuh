// What hipify leaves as CUDA names that HIP lacks, or has in another form: the exchanges within a warp.
//
// A warp is 32 lanes here: a wave of RDNA, or one half of a wave of 64 on CDNA. Lanes of the other half may
// have gone another way, which is why nothing here looks at them. HIP 7 has functions of these names that
// insist on masks of 64 bits, hence macros: whichever version's headers are compiled with, these are called.
#pragma once
#include <cstdint>

namespace pelton::gpu::amd {

constexpr int kHalf = 32;

// The warp's bits of a mask of the whole wave.
__device__ __forceinline__ uint32_t of_warp(uint64_t wave) {
#if defined(__GFX9__)
  return uint32_t(wave >> (__lane_id() & kHalf));
#else
  return uint32_t(wave);
#endif
}

template <class T>
__device__ __forceinline__ T shuffle(unsigned, T v, int lane, int width = kHalf) {
  return __shfl(v, lane, width);
}
template <class T>
__device__ __forceinline__ T shuffle_xor(unsigned, T v, int mask, int width = kHalf) {
  return __shfl_xor(v, mask, width);
}
template <class T>
__device__ __forceinline__ T shuffle_up(unsigned, T v, unsigned delta, int width = kHalf) {
  return __shfl_up(v, delta, width);
}
template <class T>
__device__ __forceinline__ T shuffle_down(unsigned, T v, unsigned delta, int width = kHalf) {
  return __shfl_down(v, delta, width);
}
__device__ __forceinline__ uint32_t ballot(unsigned, bool yes) { return of_warp(__ballot(yes)); }
__device__ __forceinline__ bool any(unsigned, bool yes) { return of_warp(__ballot(yes)) != 0; }
__device__ __forceinline__ bool all(unsigned, bool yes) { return of_warp(__ballot(!yes)) == 0; }

// Lanes of a wave run together; what they wrote to memory must still be seen in this order.
__device__ __forceinline__ void sync_warp(unsigned = 0) {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

// The kinds of memory that hipPointerGetAttributes tells have other numbers from HIP 6 on, and a library runs
// with more runtimes than it was compiled for. This says it without them.
inline bool pinned_view(const void* host, void** view) {
  *view = nullptr;
  return hipHostGetDevicePointer(view, const_cast<void*>(host), 0) == hipSuccess;
}

}  // namespace pelton::gpu::amd

// Arguments are in constant memory anyway.
#ifndef __grid_constant__
#define __grid_constant__
#endif

#undef __shfl_sync
#undef __shfl_xor_sync
#undef __shfl_up_sync
#undef __shfl_down_sync
#undef __ballot_sync
#undef __any_sync
#undef __all_sync
#undef __syncwarp
#define __shfl_sync ::pelton::gpu::amd::shuffle
#define __shfl_xor_sync ::pelton::gpu::amd::shuffle_xor
#define __shfl_up_sync ::pelton::gpu::amd::shuffle_up
#define __shfl_down_sync ::pelton::gpu::amd::shuffle_down
#define __ballot_sync ::pelton::gpu::amd::ballot
#define __any_sync ::pelton::gpu::amd::any
#define __all_sync ::pelton::gpu::amd::all
#define __syncwarp ::pelton::gpu::amd::sync_warp
