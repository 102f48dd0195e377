// Vectors of bytes and their dot products in groups of four, for the profile's instruction set.
#pragma once
#include "../../common/simd.h"

namespace pelton::inline PELTON_SIMD {

#if defined(PELTON_AVX512)

struct Bytes {
  __m512i v;
  friend Bytes operator&(Bytes a, Bytes b) { return {_mm512_and_si512(a.v, b.v)}; }
};
inline Bytes load_bytes(const void* p) { return {_mm512_loadu_si512(p)}; }
inline void store_bytes(void* p, Bytes a) { _mm512_storeu_si512(p, a.v); }
inline Bytes repeat_byte(int x) { return {_mm512_set1_epi8(char(x))}; }
inline Bytes repeat_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
template <int N>
inline Bytes shift_right_ints(Bytes a) {
  return {_mm512_srli_epi32(a.v, N)};
}
inline Bytes add_ints(Bytes a, Bytes b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Bytes add_shorts(Bytes a, Bytes b) { return {_mm512_add_epi16(a.v, b.v)}; }
inline Bytes multiply_pairs(Bytes a, Bytes b) { return {_mm512_maddubs_epi16(a.v, b.v)}; }
inline Bytes multiply_short_pairs(Bytes a, int x) {
  return {_mm512_madd_epi16(a.v, _mm512_set1_epi16(short(x)))};
}
inline Vec ints_to_floats(Bytes a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline Bytes floats_to_ints(Vec a) { return {_mm512_cvtps_epi32(a.v)}; }
inline Vec load_unsigned(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
// Ints from -128 to 127 to bytes.
inline void store_ints_as_bytes(int8_t* p, Bytes a) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v));
}
inline int32_t sum_ints(Bytes a) { return _mm512_reduce_add_epi32(a.v); }
inline int32_t max_ints(Bytes a) { return _mm512_reduce_max_epi32(a.v); }
inline Bytes max_ints(Bytes a, Bytes b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline Bytes float_bits(Vec a) { return {_mm512_castps_si512(a.v)}; }

// sum += w * x in groups of four bytes, w unsigned, x signed: AVX512-VNNI. By name, because the compiler does
// not know it at this level; the caller has asked the CPU.
inline void dot_vnni(Bytes& sum, Bytes w, Bytes x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(w.v), "v"(x.v));
}
inline bool cpu_has_vnni() { return __builtin_cpu_supports("avx512vnni") != 0; }

#else

struct Bytes {
  __m256i v;
  friend Bytes operator&(Bytes a, Bytes b) { return {_mm256_and_si256(a.v, b.v)}; }
};
inline Bytes load_bytes(const void* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
inline void store_bytes(void* p, Bytes a) { _mm256_storeu_si256((__m256i*)p, a.v); }
inline Bytes repeat_byte(int x) { return {_mm256_set1_epi8(char(x))}; }
inline Bytes repeat_int(int32_t x) { return {_mm256_set1_epi32(x)}; }
template <int N>
inline Bytes shift_right_ints(Bytes a) {
  return {_mm256_srli_epi32(a.v, N)};
}
inline Bytes add_ints(Bytes a, Bytes b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline Bytes add_shorts(Bytes a, Bytes b) { return {_mm256_add_epi16(a.v, b.v)}; }
inline Bytes multiply_pairs(Bytes a, Bytes b) { return {_mm256_maddubs_epi16(a.v, b.v)}; }
inline Bytes multiply_short_pairs(Bytes a, int x) {
  return {_mm256_madd_epi16(a.v, _mm256_set1_epi16(short(x)))};
}
inline Vec ints_to_floats(Bytes a) { return {_mm256_cvtepi32_ps(a.v)}; }
inline Bytes floats_to_ints(Vec a) { return {_mm256_cvtps_epi32(a.v)}; }
inline Vec load_unsigned(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)))};
}
// Ints from -128 to 127 to bytes.
inline void store_ints_as_bytes(int8_t* p, Bytes a) {
  const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(shorts, shorts));
}
inline int32_t sum_ints(Bytes a) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}
inline int32_t max_ints(Bytes a) {
  __m128i s = _mm_max_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
  s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}
inline Bytes max_ints(Bytes a, Bytes b) { return {_mm256_max_epi32(a.v, b.v)}; }
inline Bytes float_bits(Vec a) { return {_mm256_castps_si256(a.v)}; }

// The same with AVX-VNNI.
inline void dot_vnni(Bytes& sum, Bytes w, Bytes x) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum.v) : "x"(w.v), "x"(x.v));
}
inline bool cpu_has_vnni() { return __builtin_cpu_supports("avxvnni") != 0; }

#endif

#if defined(PELTON_AVX512)
// A step of a panel (quant_linear.h) as pairs of bfloat16, less the middle of their range: exact. One row of
// 16 pairs for each two of its inputs, `to_row` elements apart.
template <int Bits>
inline void step_to_bf16_pairs(const uint8_t* step, bf16* to, int64_t to_row) {
  const __m512i raw = _mm512_loadu_si512(step);
  if constexpr (Bits == 4) {
    // 0 - 8 ... 15 - 8, the lower and the upper byte of each.
    const __m512i lower = _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, char(0xE0), char(0xC0), char(0xA0), char(0x80), 0x40, 0, char(0x80), 0, char(0x80),
                      0, 0x40, char(0x80), char(0xA0), char(0xC0), char(0xE0)));
    const __m512i upper = _mm512_broadcast_i32x4(_mm_setr_epi8(char(0xC1), char(0xC0), char(0xC0), char(0xC0),
                                                               char(0xC0), char(0xC0), char(0xC0), char(0xBF),
                                                               0, 0x3F, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40));
    const __m512i half = _mm512_set1_epi8(15);
    const __m512i fields[2] = {_mm512_and_si512(raw, half),
                               _mm512_and_si512(_mm512_srli_epi16(raw, 4), half)};
    for (int i = 0; i < 2; ++i) {
      const __m512i low = _mm512_shuffle_epi8(lower, fields[i]), high = _mm512_shuffle_epi8(upper, fields[i]);
      // Two lanes' four values each, then the first and the second pair of four lanes.
      const __m512 a = _mm512_castsi512_ps(_mm512_unpacklo_epi8(low, high));
      const __m512 b = _mm512_castsi512_ps(_mm512_unpackhi_epi8(low, high));
      _mm512_storeu_ps(to + 2 * i * to_row, _mm512_shuffle_ps(a, b, 0x88));
      _mm512_storeu_ps(to + (2 * i + 1) * to_row, _mm512_shuffle_ps(a, b, 0xDD));
    }
  } else {
    const __m512 middle = _mm512_set1_ps(128);
    const __m512i byte = _mm512_set1_epi32(255), upper = _mm512_set1_epi32(int32_t(0xFFFF0000));
    const auto bits = [&](__m512i field) {
      return _mm512_castps_si512(_mm512_sub_ps(_mm512_cvtepi32_ps(_mm512_and_si512(field, byte)), middle));
    };
    for (int i = 0; i < 2; ++i) {
      const __m512i two = i == 0 ? raw : _mm512_srli_epi32(raw, 16);
      const __m512i first = _mm512_srli_epi32(bits(two), 16);
      const __m512i second = _mm512_and_si512(bits(_mm512_srli_epi32(two, 8)), upper);
      _mm512_storeu_si512(to + i * to_row, _mm512_or_si512(first, second));
    }
  }
}
#endif

// A sum of dot products of one block of 32 inputs, which begins at `start`: 32-bit lanes, one for each
// output.
struct VnniSum {
  Bytes sum;
  void begin(Bytes start) { sum = start; }
  void add(Bytes w, Bytes x) { dot_vnni(sum, w, x); }
  Bytes finish(Bytes) const { return sum; }
};
// The same for w < 16 without those instructions: a lane's two 16-bit sums of 16 products stay below 2^15.
struct ShortSum {
  Bytes sum;
  void begin(Bytes) { sum = repeat_int(0); }
  void add(Bytes w, Bytes x) { sum = add_shorts(sum, multiply_pairs(w, x)); }
  Bytes finish(Bytes start) const { return add_ints(multiply_short_pairs(sum, 1), start); }
};
// The same for any w, the upper and the lower half of the bits apart.
struct SplitSum {
  ShortSum low, high;
  void begin(Bytes start) {
    low.begin(start);
    high.begin(start);
  }
  void add(Bytes w, Bytes x) {
    const Bytes half = repeat_byte(15);
    low.add(w & half, x);
    high.add(shift_right_ints<4>(w) & half, x);
  }
  Bytes finish(Bytes start) const { return add_ints(low.finish(start), multiply_short_pairs(high.sum, 16)); }
};

}  // namespace pelton::inline PELTON_SIMD
