// Matrix instructions of AMD's GPUs: MFMA of CDNA 2 and 3 on a wave of 64, WMMA of RDNA 3 on a wave of 32.
// All are D[16 x 16] += A[16 x 16] * B[16 x 16] with D in fp32; the lanes of A hold rows, those of B columns,
// so that both are loaded alike. The emulation runs them by their definition (AMD's ISA documents).
#pragma once
#include "gpu.cuh"

#if defined(__HIP_PLATFORM_AMD__) || defined(PELTON_EMULATION)
namespace pelton::gpu {

// Where there are no such instructions; the names that kernels need to be compiled.
struct NoMatrix {
  static constexpr bool kExists = false;
  static constexpr int kWave = 32, kSlots = 1, kPairs = 8, kSums = 8;

  static __device__ __forceinline__ int slot(int) { return 0; }
  static __device__ __forceinline__ int row(int, int) { return 0; }
  template <class T>
  static __device__ __forceinline__ void multiply(float (&)[kSums], const uint32_t (&)[kPairs],
                                                  const uint32_t (&)[kPairs]) {}
};

#if defined(PELTON_EMULATION) || defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__)
// v_mfma_f32_16x16x16_f16 and _bf16_1k. A lane has four of the 16 elements along the sum, of row or column
// lane % 16: 4 slot(lane) and after, two in a register; of D the rows row(lane, 0..3) of column lane % 16.
struct Mfma {
  static constexpr bool kExists = true;
  static constexpr int kWave = 64, kSlots = 4, kPairs = 2, kSums = 4;

  static __device__ __forceinline__ int slot(int lane) { return lane / 16; }
  static __device__ __forceinline__ int row(int lane, int i) { return 4 * (lane / 16) + i; }

  template <class T>
  static __device__ __forceinline__ void multiply(float (&d)[kSums], const uint32_t (&a)[kPairs],
                                                  const uint32_t (&b)[kPairs]) {
#ifdef PELTON_EMULATION
    uint16_t left[4], right[4];
    memcpy(left, a, sizeof left);
    memcpy(right, b, sizeof right);
    emulation::mfma<16, T::is_bf16>(d, left, right);
#else
    using Sums = float __attribute__((ext_vector_type(4)));
    using Elements = std::conditional_t<T::is_bf16, short, _Float16> __attribute__((ext_vector_type(4)));
    Sums sums;
    Elements left, right;
    __builtin_memcpy(&sums, d, sizeof sums);
    __builtin_memcpy(&left, a, sizeof left);
    __builtin_memcpy(&right, b, sizeof right);
    if constexpr (T::is_bf16) {
      sums = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(left, right, sums, 0, 0, 0);
    } else {
      sums = __builtin_amdgcn_mfma_f32_16x16x16f16(left, right, sums, 0, 0, 0);
    }
    __builtin_memcpy(d, &sums, sizeof sums);
#endif
  }
};
#endif

#if defined(PELTON_EMULATION) || defined(__GFX11__)
// v_wmma_f32_16x16x16_f16 and _bf16. A lane has all 16 elements along the sum, of row or column lane % 16,
// two in a register; both halves of the wave bring the same. Of D it has the rows row(lane, 0..7) of column
// lane % 16.
struct Wmma {
  static constexpr bool kExists = true;
  static constexpr int kWave = 32, kSlots = 1, kPairs = 8, kSums = 8;

  static __device__ __forceinline__ int slot(int) { return 0; }
  static __device__ __forceinline__ int row(int lane, int i) { return 2 * i + lane / 16; }

  template <class T>
  static __device__ __forceinline__ void multiply(float (&d)[kSums], const uint32_t (&a)[kPairs],
                                                  const uint32_t (&b)[kPairs]) {
#ifdef PELTON_EMULATION
    uint16_t left[16], right[16];
    memcpy(left, a, sizeof left);
    memcpy(right, b, sizeof right);
    emulation::wmma<T::is_bf16>(d, left, right);
#else
    using Sums = float __attribute__((ext_vector_type(8)));
    using Elements = std::conditional_t<T::is_bf16, short, _Float16> __attribute__((ext_vector_type(16)));
    Sums sums;
    Elements left, right;
    __builtin_memcpy(&sums, d, sizeof sums);
    __builtin_memcpy(&left, a, sizeof left);
    __builtin_memcpy(&right, b, sizeof right);
    if constexpr (T::is_bf16) {
      sums = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(left, right, sums);
    } else {
      sums = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(left, right, sums);
    }
    __builtin_memcpy(d, &sums, sizeof sums);
#endif
  }
};
#endif

// The instructions of the arch that is compiled for. The host cannot know which, so a kernel that is made of
// them has the same launch on all, and an own way where there are none.
#ifndef PELTON_EMULATION
#if defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__)
struct NativeMatrix : Mfma {};
#elif defined(__GFX11__)
struct NativeMatrix : Wmma {};
#else
struct NativeMatrix : NoMatrix {};
#endif
#endif

// Starts f with the instructions to use. In the emulation those of the wave that PELTON_EMULATION_WAVE asks
// for; false when it asks for none: the emulation is of NVIDIA's warps then.
template <class F>
inline bool with_amd_matrix([[maybe_unused]] F&& f) {
#ifdef PELTON_EMULATION
  const int wave = emulation::wanted_wave();
  if (wave == 64) f(Mfma{});
  if (wave == 32) f(Wmma{});
  return wave != 0;
#else
  f(NativeMatrix{});
  return true;
#endif
}

}  // namespace pelton::gpu
#endif
