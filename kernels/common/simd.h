// One fp32 vector type for the profile's instruction set (AVX-512 or AVX2).
// Loads widen fp16 and bf16 to fp32, stores round to nearest even.
// Everything sits in a namespace named after the instruction set, so that two
// libraries built for different levels can never share an inline function.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "dtype.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define PELTON_SIMD avx512
#define PELTON_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define PELTON_SIMD avx2
#else
#error "kernels need at least x86-64-v3 (AVX2, FMA, F16C): set target.arch of the build profile"
#endif

namespace pelton::inline PELTON_SIMD {

#if defined(PELTON_AVX512)

struct Vec {
  static constexpr int width = 16;
  __m512 v;

  static Vec zero() { return {_mm512_setzero_ps()}; }
  static Vec set1(float x) { return {_mm512_set1_ps(x)}; }
  friend Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
  friend Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
  friend Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
  friend Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
};

inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Like maxps: the second operand is returned when either is NaN.
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline float sum(Vec a) { return _mm512_reduce_add_ps(a.v); }
inline float max(Vec a) { return _mm512_reduce_max_ps(a.v); }
inline Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
// Where the sign bit of x is set a, elsewhere b.
inline Vec select_negative(Vec x, Vec a, Vec b) {
  return {_mm512_mask_mov_ps(b.v, _mm512_movepi32_mask(_mm512_castps_si512(x.v)), a.v)};
}
// (1, 0, 3, 2, ...): each element's partner in a pair.
inline Vec swap_pairs(Vec a) { return {_mm512_permute_ps(a.v, 0xB1)}; }

inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec load(const f16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
inline Vec load(const bf16* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline void store(f16* p, Vec a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline void store(bf16* p, Vec a) {
  const __m512i i = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(i, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(i, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  // Rounding a NaN could carry it into infinity: keep it, made quiet.
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(i, _mm512_set1_epi32(0x400000));
  const __m512i bits = _mm512_mask_mov_epi32(rounded, nan, quiet);
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
}

// a * 2^n for a whole number n, -126 <= n <= 127.
inline Vec scale_by_power_of_two(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }
inline Vec round(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }

#else

struct Vec {
  static constexpr int width = 8;
  __m256 v;

  static Vec zero() { return {_mm256_setzero_ps()}; }
  static Vec set1(float x) { return {_mm256_set1_ps(x)}; }
  friend Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
  friend Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
  friend Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
  friend Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
};

inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
// Like maxps: the second operand is returned when either is NaN.
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline float sum(Vec a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float max(Vec a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline Vec abs(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.f), a.v)}; }
// Where the sign bit of x is set a, elsewhere b.
inline Vec select_negative(Vec x, Vec a, Vec b) { return {_mm256_blendv_ps(b.v, a.v, x.v)}; }
// (1, 0, 3, 2, ...): each element's partner in a pair.
inline Vec swap_pairs(Vec a) { return {_mm256_permute_ps(a.v, 0xB1)}; }

inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Vec load(const f16* p) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))}; }
inline Vec load(const bf16* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
inline void store(f16* p, Vec a) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline void store(bf16* p, Vec a) {
  const __m256i i = _mm256_castps_si256(a.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(i, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(i, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  // Rounding a NaN could carry it into infinity: keep it, made quiet.
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  const __m256i quiet = _mm256_or_si256(i, _mm256_set1_epi32(0x400000));
  const __m256i bits = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0x08);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}

// a * 2^n for a whole number n, -126 <= n <= 127.
inline Vec scale_by_power_of_two(Vec a, Vec n) {
  const __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23);
  return {_mm256_mul_ps(a.v, _mm256_castsi256_ps(e))};
}
inline Vec round(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }

#endif

// The last, incomplete vector of a row: n of Vec::width elements, the rest read as zero.
template <class T>
inline Vec load_partial(const T* p, int n) {
  T buffer[Vec::width] = {};
  std::memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}
template <class T>
inline void store_partial(T* p, Vec a, int n) {
  T buffer[Vec::width];
  store(buffer, a);
  std::memcpy(p, buffer, n * sizeof(T));
}

// Scalar conversions that agree with the vector ones bit for bit.
template <class T>
inline float to_float(T x) {
  float buffer[Vec::width];
  store(buffer, load_partial(&x, 1));
  return buffer[0];
}
inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}
template <class T>
inline T from_float(float x) {
  T r;
  store_partial(&r, Vec::set1(x), 1);
  return r;
}

// Calls f(first, count, full) over [0, n) in steps of one vector; `full` is false only
// for the last, incomplete step, and count is then the number of elements that remain.
template <class F>
inline void for_each_vector(int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + Vec::width <= n; i += Vec::width) f(i, Vec::width, std::true_type{});
  if (i < n) f(i, int(n - i), std::false_type{});
}
template <class T, class Full>
inline Vec load_step(const T* p, int n, Full) {
  if constexpr (Full::value) return load(p);
  return load_partial(p, n);
}
template <class T, class Full>
inline void store_step(T* p, Vec a, int n, Full) {
  if constexpr (Full::value) return store(p, a);
  store_partial(p, a, n);
}

// e^x to about 1 ulp: Cody-Waite reduction by ln 2 and the minimax polynomial of
// Cephes' expf. Below -87.3 the result is 0 (no denormals), above 88.7 infinity; NaN stays NaN.
inline Vec exp(Vec x) {
  const Vec low = Vec::set1(-87.33654f), high = Vec::set1(88.72283f);
  const Vec clamped = min(high, max(low, x));  // operand order keeps NaN
  const Vec n = round(clamped * Vec::set1(1.44269504f));
  Vec r = fma(n, Vec::set1(-0.693359375f), clamped);
  r = fma(n, Vec::set1(2.12194440e-4f), r);
  Vec p = Vec::set1(1.9875691500e-4f);
  p = fma(p, r, Vec::set1(1.3981999507e-3f));
  p = fma(p, r, Vec::set1(8.3334519073e-3f));
  p = fma(p, r, Vec::set1(4.1665795894e-2f));
  p = fma(p, r, Vec::set1(1.6666665459e-1f));
  p = fma(p, r, Vec::set1(5.0000001201e-1f));
  p = fma(p, r * r, r + Vec::set1(1.f));
#if defined(PELTON_AVX512)
  Vec y = scale_by_power_of_two(p, n);
  y.v = _mm512_maskz_mov_ps(_knot_mask16(_mm512_cmp_ps_mask(x.v, low.v, _CMP_LT_OQ)), y.v);
  y.v = _mm512_mask_mov_ps(y.v, _mm512_cmp_ps_mask(x.v, high.v, _CMP_GT_OQ), _mm512_set1_ps(INFINITY));
#else
  // Just below the overflow n is 128, one more than an exponent holds: the rest is a factor of 1 or 2.
  const Vec held = min(Vec::set1(127.f), n);
  Vec y = scale_by_power_of_two(p, held);
  y = fma(y, n - held, y);
  y.v = _mm256_andnot_ps(_mm256_cmp_ps(x.v, low.v, _CMP_LT_OQ), y.v);
  y.v = _mm256_blendv_ps(y.v, _mm256_set1_ps(INFINITY), _mm256_cmp_ps(x.v, high.v, _CMP_GT_OQ));
#endif
  return y;
}

}  // namespace pelton::inline PELTON_SIMD
