// The register tile that linear and attention share: a small product C (+)= A * B in fp32.
// MR rows of A times NV vectors of B's columns, all sums in registers while k runs.
// Method: Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008.
#pragma once
#include <algorithm>

#include "simd.h"

namespace pelton::inline PELTON_SIMD {

// Rows that fill the register file together with NV = 2: sums, two vectors of B, one of A.
constexpr int kTileRows = Vec::width == 16 ? 14 : 6;
// FMA units are two and four to five cycles deep: fewer sums than this leave them idle.
constexpr int kTileMinSums = 8;
// A core follows several runs of addresses at once and reads memory faster so than along one.
constexpr int kTileStreams = 4;

// Where a[r][i] is: constants, so that every row is one address plus a displacement.
template <int Row, int Depth>
struct Strides {
  static constexpr int row = Row, depth = Depth;
};
// Where a tile finds B: in memory, which is read along several streams; in the caches; or in the
// caches while it brings other memory closer, `step` bytes for each of its k from `first` on.
enum class From { memory, cache, cache_with_prefetch };
struct Ahead {
  const char* first = nullptr;
  int64_t step = 0;
};

// c[r][j] (+)= sum over i < k of a[r][i] * b[i][j], r < MR, j < NV * Vec::width.
// A says where a[r][i] is; ldb and ldc are row strides.
template <int MR, int NV, class A, From Source, class B>
inline void multiply_tile(const float* a, const B* b, int64_t ldb, float* c, int64_t ldc, int64_t k,
                          bool accumulate, Ahead ahead = {}) {
  // k is cut into segments that advance together, each with sums of its own where sums are few.
  constexpr int kCopies = std::min(kTileStreams, (kTileMinSums + MR * NV - 1) / (MR * NV));
  constexpr int kSegments = Source == From::memory ? kTileStreams : kCopies;
  Vec sums[kCopies][MR][NV];
#pragma GCC unroll 64
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 64
    for (int v = 0; v < NV; ++v) {
      sums[0][r][v] = accumulate ? load(c + r * ldc + v * Vec::width) : Vec::zero();
#pragma GCC unroll 64
      for (int u = 1; u < kCopies; ++u) sums[u][r][v] = Vec::zero();
    }
  }
  const auto step = [&](const float* x, const B* row, int u) __attribute__((always_inline)) {
    Vec column[NV];
#pragma GCC unroll 64
    for (int v = 0; v < NV; ++v) column[v] = load(row + v * Vec::width);
#pragma GCC unroll 64
    for (int r = 0; r < MR; ++r) {
      const Vec xr = Vec::set1(x[r * A::row]);
#pragma GCC unroll 64
      for (int v = 0; v < NV; ++v) sums[u][r][v] = fma(xr, column[v], sums[u][r][v]);
    }
  };
  const int64_t segment = k / kSegments;
  for (int64_t i = 0; i < segment; ++i) {
    if constexpr (Source == From::cache_with_prefetch)
      _mm_prefetch(ahead.first + i * kSegments * ahead.step, _MM_HINT_T1);
#pragma GCC unroll 64
    for (int s = 0; s < kSegments; ++s)
      step(a + (i + s * segment) * A::depth, b + (i + s * segment) * ldb, s % kCopies);
  }
  for (int64_t i = segment * kSegments; i < k; ++i) step(a + i * A::depth, b + i * ldb, 0);
#pragma GCC unroll 64
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 64
    for (int v = 0; v < NV; ++v) {
      Vec total = sums[0][r][v];
#pragma GCC unroll 64
      for (int u = 1; u < kCopies; ++u) total = total + sums[u][r][v];
      store(c + r * ldc + v * Vec::width, total);
    }
  }
}

// multiply_tile with the number of rows known at run time, 1 <= rows <= MR.
template <int NV, class A, From Source, class B, int MR = kTileRows>
inline void multiply_rows(int rows, const float* a, const B* b, int64_t ldb, float* c, int64_t ldc, int64_t k,
                          bool accumulate, Ahead ahead = {}) {
  if constexpr (MR > 1) {
    if (rows < MR) {
      return multiply_rows<NV, A, Source, B, MR - 1>(rows, a, b, ldb, c, ldc, k, accumulate, ahead);
    }
  }
  multiply_tile<MR, NV, A, Source>(a, b, ldb, c, ldc, k, accumulate, ahead);
}

// Cuts `rows` into as few tiles as possible, of sizes that differ by at most one.
inline int64_t num_tiles(int64_t rows) { return (rows + kTileRows - 1) / kTileRows; }
template <class F>
inline void for_each_tile(int64_t rows, F&& f) {
  const int64_t tiles = num_tiles(rows);
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t first = t * rows / tiles, last = (t + 1) * rows / tiles;
    f(t, first, int(last - first));
  }
}

}  // namespace pelton::inline PELTON_SIMD
