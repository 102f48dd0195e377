// From the packed words of layout.h to A fragments (q - zero) of m16n8k16, exact in fp16 and bf16: small
// integers are put into the mantissa of a power of two, which is subtracted together with the zero. Method:
// Kim et al., "Who Says Elephants Can't Run: Bringing Large Scale MoE Models into Cloud Scale Production",
// 2022.
#pragma once
#include "../../common/gpu.cuh"
#include "../../common/mma.cuh"
#include "layout.h"

namespace pelton::gpu::marlin {

using namespace pelton::marlin;

// Two rows' zeros (a lane's rows group and group + 8 of a slab), in the form that `dequantize` takes.
struct SlabZeros {
  uint32_t low, high;
};

// Byte `index` of a word, in both halves of one whose other bytes are `prefix`.
__device__ __forceinline__ uint32_t spread_byte(uint32_t bytes, int index, uint32_t prefix) {
  return __byte_perm(bytes, prefix, index == 0 ? 0x4040u : 0x4141u);
}

// From the zeros of a lane's two rows of a slab, the low bytes of `pair`.
template <class T, int Bits>
__device__ __forceinline__ SlabZeros slab_zeros(uint32_t pair) {
  if constexpr (Bits == 8 && T::is_bf16) {  // as floats, 2^23 + zero
    return {__byte_perm(pair, 0x4b000000u, 0x7650u), __byte_perm(pair, 0x4b000000u, 0x7651u)};
  } else if constexpr (T::is_bf16) {  // -(128 + zero)
    return {spread_byte(pair, 0, 0xc3c3c3c3u), spread_byte(pair, 1, 0xc3c3c3c3u)};
  } else if constexpr (Bits == 8) {  // -(1024 + zero)
    return {spread_byte(pair, 0, 0xe4e4e4e4u), spread_byte(pair, 1, 0xe4e4e4e4u)};
  } else {  // -(1024 + zero) for even registers, -(64 + zero) for odd ones
    return {spread_byte(pair, 0, 0xe4e4e4e4u), spread_byte(pair << 4, 1, 0xd4d4d4d4u)};
  }
}

// The A fragment of 16 inputs: step `step` (0 to 3) of a lane's part of a slab, which is Bits / 4 times 4
// words.
template <class T, int Bits>
__device__ __forceinline__ void dequantize(uint32_t (&a)[4], const Vector<uint32_t, 4> (&words)[Bits / 4],
                                           int step, SlabZeros zeros) {
  if constexpr (Bits == 4) {
    const uint32_t w = words[0][step];
    if constexpr (T::is_bf16) {
      constexpr uint32_t kMask = 0x000f000fu, k128 = 0x43004300u;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = add2<T>(and_or(w >> (4 * i), kMask, k128), i % 2 == 0 ? zeros.low : zeros.high);
      }
    } else {
      constexpr uint32_t kEven = 0x000f000fu, kOdd = 0x00f000f0u, k1024 = 0x64006400u;
      constexpr uint32_t kSixteenth = 0x2c002c00u;
      const uint32_t upper = w >> 8;
      a[0] = add2<T>(and_or(w, kEven, k1024), zeros.low);
      a[1] = multiply_add2<T>(and_or(w, kOdd, k1024), kSixteenth, zeros.high);
      a[2] = add2<T>(and_or(upper, kEven, k1024), zeros.low);
      a[3] = multiply_add2<T>(and_or(upper, kOdd, k1024), kSixteenth, zeros.high);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t w = words[step / 2][step % 2 * 2 + i / 2], zero = i % 2 == 0 ? zeros.low : zeros.high;
      if constexpr (T::is_bf16) {
        const uint32_t at = uint32_t(i % 2 * 2);
        const float z = __uint_as_float(zero);
        a[i] = pack2<T>(__uint_as_float(__byte_perm(w, 0x4b000000u, 0x7650u | at)) - z,
                        __uint_as_float(__byte_perm(w, 0x4b000000u, 0x7650u | (at + 1))) - z);
      } else {
        a[i] = add2<T>(__byte_perm(w, 0x64646464u, i % 2 == 0 ? 0x4140u : 0x4342u), zero);
      }
    }
  }
}

// Fragments of the weights as they are are cheaper: value q is q 2^-24 in fp16, whose smallest numbers these
// are, or 128 + q in bf16; factor and offset turn a sum of products into that of q - zero. For 8 bits bf16
// has too few.
template <class T, int Bits>
constexpr bool kRaw = !(T::is_bf16 && Bits == 8);

struct RawForm {
  float low_factor, high_factor;  // of rows group and group + 8
  float offset;                   // that the zero grows by
};
template <class T, int Bits>
__host__ __device__ constexpr RawForm raw_form() {
  if (T::is_bf16) return {1, 1, Bits == 4 ? 128.f : 0.f};
  return {16777216, Bits == 4 ? 1048576.f : 16777216.f, 0};
}

template <class T, int Bits>
__device__ __forceinline__ void unpack(uint32_t (&a)[4], const Vector<uint32_t, 4> (&words)[Bits / 4],
                                       int step) {
  static_assert(kRaw<T, Bits>);
  if constexpr (Bits == 8) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = __byte_perm(words[step / 2][step % 2 * 2 + i / 2], 0, i % 2 == 0 ? 0x4140u : 0x4342u);
    }
  } else if constexpr (T::is_bf16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = and_or(words[0][step] >> (4 * i), 0x000f000fu, 0x43004300u);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = (words[0][step] >> (i / 2 * 8)) & (i % 2 == 0 ? 0x000f000fu : 0x00f000f0u);
    }
  }
}

}  // namespace pelton::gpu::marlin
