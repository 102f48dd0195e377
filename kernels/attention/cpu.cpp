// Attention of new tokens over a paged KV cache: decode and chunked prefill, with an online softmax in fp32.
// Items (a tile of queries of one kv head) lie on a line of work cut into equal parts, through contexts too.
// Method: Dao, "FlashAttention-2", 2023; the cut is "Stream-K", Osama et al., 2023; paging is vLLM's.
#include <algorithm>
#include <cmath>
#include <limits>

#include "../common/scratch.h"
#include "../common/tile.h"
#include "attention.h"

namespace pelton::cpu {
namespace {

constexpr bool kWide = Vec::width == 16;
constexpr int64_t kTileQueries = 128;            // queries (token and head) of an item
constexpr int64_t kChunk = 128;                  // positions of the context at a time
constexpr int64_t kFewQueries = kWide ? 16 : 8;  // up to here an item of one token goes row by row
constexpr int64_t kPanel = 2 * Vec::width;
constexpr int64_t kMaxHeadSize = 256;
constexpr int kHeadStride = kMaxHeadSize + 16;  // of K, V and output rows; not a power of two
constexpr int kChunkStride = kChunk + 16;
constexpr int64_t kScoreFloats = std::max(kChunk * kPanel, kFewQueries* kChunkStride);
constexpr int kFewRows = kWide ? 6 : 3;   // that fill the registers with four positions each
constexpr int64_t kChunkWork = 2;         // of a chunk besides its queries, in queries
constexpr int64_t kPartsPerThread = 4;    // so that a thread that is held up does less
constexpr int64_t kPartWork = 256 << 10;  // multiplications that are worth a part
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.44269504f;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// One thread's working memory. Tiles of many queries lie in panels of up to kPanel queries, as weights do in
// linear: what belongs to queries [first, first + width) of the tile is at first * rows, [rows][width].
struct Buffers {
  alignas(64) float query[kMaxHeadSize * kTileQueries];  // panels of [head_size], or [queries][kHeadStride]
  alignas(64) float key[kChunk * kHeadStride];           // widened
  alignas(64) float value[kChunk * kHeadStride];         // widened
  alignas(64) float score[kScoreFloats];                 // one panel of positions, or [queries][kChunkStride]
  alignas(64) float output[kMaxHeadSize * kTileQueries];  // panels of [head_size]
  alignas(64) float rows[kTileQueries * kHeadStride];     // output, [queries][kHeadStride]
  alignas(64) float position[kTileQueries];               // of each query, from the item's first one on
  alignas(64) float maximum[kTileQueries];                // of scores so far, in powers of two
  alignas(64) float total[kTileQueries];                  // of weights so far
  alignas(64) float rescale[kTileQueries];                // of what was summed up before this chunk
};
static_assert(kFewQueries * kHeadStride <= kMaxHeadSize * kTileQueries && kTileQueries % kPanel == 0);

Buffers& buffers() {
  thread_local Scratch scratch;
  return *reinterpret_cast<Buffers*>(scratch.floats(sizeof(Buffers) / sizeof(float)));
}

struct Item {
  int64_t sequence;  // of the batch
  int64_t kv_head;
  int64_t first_token,
      first_query;  // of the batch; of the sequence, query = token * group + head in the group
  int64_t num_queries;
  int64_t position;    // of the first query
  int64_t begin, end;  // positions that its queries see
  int64_t first_chunk, chunks;

  int64_t chunk_work() const { return num_queries + kChunkWork; }
};

int64_t group_size(const AttentionArgs& a) { return a.num_heads / a.num_kv_heads; }
int64_t num_tiles_of(const AttentionArgs& a, const AttentionSequence& s) {
  return ceil_div(s.num_tokens * group_size(a), kTileQueries);
}

Item item_of(const AttentionArgs& a, const AttentionSequence& s, int64_t kv_head, int64_t tile) {
  const int64_t group = group_size(a), queries = s.num_tokens * group, tiles = num_tiles_of(a, s);
  const int64_t first = tile * queries / tiles, last = (tile + 1) * queries / tiles;
  const int64_t start = s.length - s.num_tokens;
  const int64_t position = start + first / group, end = start + (last - 1) / group + 1;
  const int64_t begin = a.sliding_window > 0 ? std::max<int64_t>(0, position - a.sliding_window + 1) : 0;
  return {s.index,  kv_head, s.first_token, first,          last - first,
          position, begin,   end,           begin / kChunk, ceil_div(end, kChunk) - begin / kChunk};
}

// Keys and values of consecutive positions within one block.
template <class T>
struct Segment {
  const T* key;
  const T* value;
  int64_t offset, count;  // from the first position of the chunk
};
template <class T>
struct Segments {
  Segment<T> list[kChunk];
  int64_t size = 0;
  const Segment<T>* begin() const { return list; }
  const Segment<T>* end() const { return list + size; }
};

// Where positions [begin, begin + n) of an item lie; false when the block table says nonsense.
template <class T>
bool find_segments(const AttentionArgs& a, AttentionPlan& plan, const Item& item, int64_t begin, int64_t n,
                   Segments<T>& segments) {
  segments.size = 0;
  for (int64_t done = 0; done < n;) {
    const int64_t entry = (begin + done) / a.block_size, offset = (begin + done) % a.block_size;
    const int64_t block = a.block_tables[item.sequence * a.block_table_stride + entry];
    if (block < 0 || block >= a.num_blocks) {
      plan.bad_entry = item.sequence * a.max_blocks + entry;
      return false;
    }
    const int64_t count = std::min(a.block_size - offset, n - done);
    const int64_t at = ((block * a.num_kv_heads + item.kv_head) * a.block_size + offset) * a.head_size;
    segments.list[segments.size++] = {static_cast<const T*>(a.key_cache) + at,
                                      static_cast<const T*>(a.value_cache) + at, done, count};
    done += count;
  }
  return true;
}

#if defined(PELTON_AVX512)
Vec select_less_equal(Vec a, Vec b, Vec yes, Vec no) {
  return {_mm512_mask_mov_ps(no.v, _mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ), yes.v)};
}
void store_sums(float* to, Vec a, Vec b, Vec c, Vec d) {
  const auto halves = [](Vec x) {
    return _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  };
  const __m256 ab = _mm256_hadd_ps(halves(a), halves(b)), cd = _mm256_hadd_ps(halves(c), halves(d));
  const __m256 sums = _mm256_hadd_ps(ab, cd);
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}
#else
Vec select_less_equal(Vec a, Vec b, Vec yes, Vec no) {
  return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_LE_OQ))};
}
void store_sums(float* to, Vec a, Vec b, Vec c, Vec d) {
  const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(a.v, b.v), _mm256_hadd_ps(c.v, d.v));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}
#endif

// 2^x for x <= 0 by Cephes' polynomial; 0 below 2^-126, because denormals are slow; NaN stays NaN.
Vec exp2_of_nonpositive(Vec x) {
  const Vec low = Vec::set1(kWide ? -126.f : -127.f);
  const Vec clamped = max(low, x), n = round(clamped), r = clamped - n;
  Vec p = Vec::set1(1.535336188319500e-4f);
  p = fma(p, r, Vec::set1(1.339887440266574e-3f));
  p = fma(p, r, Vec::set1(9.618437357674640e-3f));
  p = fma(p, r, Vec::set1(5.550332471162809e-2f));
  p = fma(p, r, Vec::set1(2.402264791363012e-1f));
  p = fma(p, r, Vec::set1(6.931472028550421e-1f));
  p = fma(p, r, Vec::set1(1.f));
  const Vec y = scale_by_power_of_two(p, n);
#if defined(PELTON_AVX512)
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, low.v, _CMP_NLT_UQ), y.v)};
#else
  return y;  // an exponent of -127 is written as 0, which makes the factor 0
#endif
}

// Scores are kept in powers of two, so that a weight is one exp2. Without a cap the query carries the
// factor; with one, cap * tanh(score / cap) is worked out from the plain score.
float query_factor(const AttentionArgs& a) { return a.soft_cap > 0 ? a.scale : a.scale * kLog2e; }
Vec cap_score(Vec score, float cap) {
  // tanh(x) = sign(x) (1 - e) / (1 + e) with e = exp(-2 |x|)
  const Vec x = score * Vec::set1(1.f / cap);
  const Vec magnitude = max(Vec::zero() - x, x);
  const Vec e = exp2_of_nonpositive(magnitude * Vec::set1(-2.f * kLog2e));
  const Vec one = Vec::set1(1.f), t = (one - e) / (one + e);
  return select_less_equal(Vec::zero(), x, t, Vec::zero() - t) * Vec::set1(cap * kLog2e);
}

// Calls f(first, width) for each panel of a tile; the last one may be a single vector wide.
template <class F>
void for_each_panel(int64_t width, F&& f) {
  for (int64_t first = 0; first < width; first += kPanel) f(first, std::min(kPanel, width - first));
}

// The item's queries in fp32, times query_factor, to [queries][kHeadStride].
void load_query_rows(const AttentionArgs& a, const Item& item, float* rows) {
  const int64_t group = group_size(a);
  const Vec factor = Vec::set1(query_factor(a));
  dispatch(a.dtype, [&](auto t) {
    for (int64_t i = 0; i < item.num_queries; ++i) {
      const int64_t query = item.first_query + i;
      const auto* from = static_cast<const decltype(t)*>(a.query) +
                         (item.first_token + query / group) * a.query_token_stride +
                         (item.kv_head * group + query % group) * a.query_head_stride;
      for_each_vector(a.head_size, [&](int64_t d, int n, auto full) {
        store(rows + i * kHeadStride + d, load_step(from + d, n, full) * factor);
      });
    }
  });
}

// ---------------------------------------------------------------- tiles of many queries
// Queries lie along the vectors: scores [positions][queries] = K Q^T and output [head_size][queries] = V^T P
// are products with plain rows of K and V on the left, and the softmax needs no sum across a vector.

// to [columns][to_stride] = from [rows][from_stride], both rounded up to blocks of eight.
void transpose(const float* from, int64_t from_stride, int64_t rows, int64_t columns, float* to,
               int64_t to_stride) {
  for (int64_t r = 0; r < rows; r += 8) {
    for (int64_t c = 0; c < columns; c += 8) {
      __m256 x[8], y[8];
      for (int i = 0; i < 8; ++i) x[i] = _mm256_loadu_ps(from + (r + i) * from_stride + c);
      for (int i = 0; i < 8; i += 2) {
        y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
        y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
      }
      for (int i = 0; i < 8; i += 4) {
        x[i] = _mm256_shuffle_ps(y[i], y[i + 2], 0x44);
        x[i + 1] = _mm256_shuffle_ps(y[i], y[i + 2], 0xee);
        x[i + 2] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0x44);
        x[i + 3] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0xee);
      }
      for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(to + (c + i) * to_stride + r, _mm256_permute2f128_ps(x[i], x[i + 4], 0x20));
        _mm256_storeu_ps(to + (c + i + 4) * to_stride + r, _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
      }
    }
  }
}

void load_queries_across(const AttentionArgs& a, const Item& item, int64_t width, Buffers& b) {
  const int64_t group = group_size(a);
  load_query_rows(a, item, b.rows);
  for (int64_t i = 0; i < width; ++i) {
    // The last query fills the vector up.
    const int64_t query = std::min(i, item.num_queries - 1);
    if (i > query) std::copy_n(b.rows + query * kHeadStride, a.head_size, b.rows + i * kHeadStride);
    b.position[i] = float((item.first_query + query) / group - item.first_query / group);
  }
  for_each_panel(width, [&](int64_t first, int64_t n) {
    transpose(b.rows + first * kHeadStride, kHeadStride, n, a.head_size, b.query + first * a.head_size, n);
  });
}

// Widens one chunk; true when a value is infinite or NaN.
template <class T>
bool widen_chunk(const Segments<T>& segments, int64_t head_size, Buffers& b) {
  Vec zeros = Vec::zero();
  for (const Segment<T>& s : segments) {
    for (int64_t i = 0; i < s.count; ++i) {
      float* key = b.key + (s.offset + i) * kHeadStride;
      float* value = b.value + (s.offset + i) * kHeadStride;
      for_each_vector(head_size, [&](int64_t d, int n, auto full) {
        store_step(key + d, load_step(s.key + i * head_size + d, n, full), n, full);
        const Vec v = load_step(s.value + i * head_size + d, n, full);
        store_step(value + d, v, n, full);
        zeros = fma(v, Vec::zero(), zeros);
      });
    }
  }
  return !(sum(zeros) == 0.f);
}

// c [rows][width] (+)= left * right [k][width], for one panel.
template <class A>
void multiply_panel(const float* left, int64_t rows, const float* right, float* c, int64_t width, int64_t k,
                    bool accumulate) {
  for_each_tile(rows, [&](int64_t, int64_t first, int count) {
    const float* from = left + first * A::row;
    float* to = c + first * width;
    if (width == kPanel) {
      multiply_rows<2, A, From::cache>(count, from, right, kPanel, to, kPanel, k, accumulate);
    } else {
      multiply_rows<1, A, From::cache>(count, from, right, Vec::width, to, Vec::width, k, accumulate);
    }
  });
}

// A chunk as an item sees it. Positions relative to the item's first query.
struct Visibility {
  float first;   // position of the chunk's first key
  float window;  // how many positions a query sees
  bool partial;  // some query does not see some key
};

// Scores of one chunk to weights, for a panel of C vectors of queries; keeps maximum, total and rescale.
template <int C>
void weigh_panel(const Visibility& sight, float cap, int64_t n, int64_t column, Buffers& b) {
  constexpr int64_t width = C * Vec::width;
  const Vec lowest = Vec::set1(-kInfinity);
  Vec old[C], highest[C], total[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) highest[c] = old[c] = load(b.maximum + column + c * Vec::width);
  for (int64_t j = 0; j < n; ++j) {
    const Vec key = Vec::set1(sight.first + float(j));
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      float* at = b.score + j * width + c * Vec::width;
      Vec s = load(at);
      if (cap > 0) s = cap_score(s, cap);
      if (sight.partial) {
        const Vec query = load(b.position + column + c * Vec::width);
        s = select_less_equal(key, query, s, lowest);
        s = select_less_equal(query - key, Vec::set1(sight.window - 1), s, lowest);
      }
      if (cap > 0 || sight.partial) store(at, s);
      highest[c] = max(s, highest[c]);
    }
  }
  Vec reference[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) {
    store(b.maximum + column + c * Vec::width, highest[c]);
    // Nothing visible yet: any finite reference gives weights of 0.
    reference[c] = select_less_equal(highest[c], lowest, Vec::zero(), highest[c]);
    total[c] = Vec::zero();
  }
  for (int64_t j = 0; j < n; ++j) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      float* at = b.score + j * width + c * Vec::width;
      const Vec weight = exp2_of_nonpositive(load(at) - reference[c]);
      store(at, weight);
      total[c] = total[c] + weight;
    }
  }
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) {
    const int64_t at = column + c * Vec::width;
    const Vec rescale = exp2_of_nonpositive(old[c] - reference[c]);
    store(b.rescale + at, rescale);
    store(b.total + at, fma(load(b.total + at), rescale, total[c]));
  }
}

void rescale_panel(int64_t head_size, int64_t first, int64_t width, Buffers& b) {
  const float* rescale = b.rescale + first;
  if (std::all_of(rescale, rescale + width, [](float x) { return x == 1.f; })) return;
  for (int64_t d = 0; d < head_size; ++d) {
    for (int64_t i = 0; i < width; i += Vec::width) {
      float* at = b.output + first * head_size + d * width + i;
      store(at, load(at) * load(rescale + i));
    }
  }
}

// output += V^T P where a weight of 0 means "not visible": such a value may be infinite or NaN.
void add_visible_values(int64_t head_size, int64_t n, int64_t width, const Buffers& b, float* output) {
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t d = 0; d < head_size; ++d) {
      const Vec value = Vec::set1(b.value[j * kHeadStride + d]);
      for (int64_t i = 0; i < width; i += Vec::width) {
        const Vec weight = load(b.score + j * width + i);
        float* at = output + d * width + i;
        const Vec sum = load(at);
        store(at, select_less_equal(weight, Vec::zero(), sum, fma(value, weight, sum)));
      }
    }
  }
}

template <class T>
bool attend_across(const AttentionArgs& a, AttentionPlan& plan, const Item& item, int64_t first_chunk,
                   int64_t last_chunk, Buffers& b) {
  const int64_t width = round_up(item.num_queries, Vec::width), head_size = a.head_size;
  load_queries_across(a, item, width, b);
  std::fill_n(b.maximum, width, -kInfinity);
  std::fill_n(b.total, width, 0.f);
  std::fill_n(b.output, head_size * width, 0.f);
  const int64_t last_position = item.end - 1;
  Segments<T> segments;
  for (int64_t chunk = first_chunk; chunk < last_chunk; ++chunk) {
    const int64_t begin = std::max(chunk * kChunk, item.begin);
    const int64_t n = std::min((chunk + 1) * kChunk, item.end) - begin;
    if (!find_segments(a, plan, item, begin, n, segments)) return false;
    const bool special_values = widen_chunk(segments, head_size, b);
    const bool behind = a.sliding_window > 0 && begin <= last_position - a.sliding_window;
    const Visibility sight{float(begin - item.position),
                           a.sliding_window > 0 ? float(a.sliding_window) : kInfinity,
                           begin + n - 1 > item.position || behind};
    for_each_panel(width, [&](int64_t first, int64_t queries) {
      float* output = b.output + first * head_size;
      multiply_panel<Strides<kHeadStride, 1>>(b.key, n, b.query + first * head_size, b.score, queries,
                                              head_size, false);
      queries == kPanel ? weigh_panel<2>(sight, a.soft_cap, n, first, b)
                        : weigh_panel<1>(sight, a.soft_cap, n, first, b);
      rescale_panel(head_size, first, queries, b);
      if (special_values && sight.partial) {
        add_visible_values(head_size, n, queries, b, output);
      } else {
        multiply_panel<Strides<1, kHeadStride>>(b.value, head_size, b.score, output, queries, n, true);
      }
    });
  }
  for_each_panel(width, [&](int64_t first, int64_t queries) {
    transpose(b.output + first * head_size, queries, head_size, queries, b.rows + first * kHeadStride,
              kHeadStride);
  });
  return true;
}

// ---------------------------------------------------------------- few queries of one token
// Queries lie in rows and head_size along the vectors; keys and values are read where they are.

// Memory that is wanted soon: the values of the keys at hand, and keys of the next chunk.
struct Coming {
  const void* value;
  const void* key;
  void prefetch(int64_t offset, int64_t bytes) const {
    for (int64_t i = offset; i < offset + bytes; i += 64) {
      _mm_prefetch(static_cast<const char*>(value) + i, _MM_HINT_T1);
      _mm_prefetch(static_cast<const char*>(key) + i, _MM_HINT_T1);
    }
  }
};

// score [R][kChunkStride] = q [R][kHeadStride] * k [n][head_size]^T
template <int R, class T>
void score_rows(const float* query, const T* key, int64_t n, int64_t head_size, float* score, Coming coming) {
  int64_t j = 0;
  for (; j + 4 <= n; j += 4) {
    coming.prefetch(j * head_size * sizeof(T), 4 * head_size * sizeof(T));
    Vec sums[R][4];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = sums[r][2] = sums[r][3] = Vec::zero();
    for (int64_t d = 0; d < head_size; d += Vec::width) {
      Vec k[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) k[i] = load(key + (j + i) * head_size + d);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Vec q = load(query + r * kHeadStride + d);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sums[r][i] = fma(q, k[i], sums[r][i]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      store_sums(score + r * kChunkStride + j, sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    }
  }
  for (; j < n; ++j) {
    for (int r = 0; r < R; ++r) {
      Vec total = Vec::zero();
      for (int64_t d = 0; d < head_size; d += Vec::width) {
        total = fma(load(query + r * kHeadStride + d), load(key + j * head_size + d), total);
      }
      score[r * kChunkStride + j] = sum(total);
    }
  }
}
template <class T, int R = kFewRows>
void score_some_rows(int rows, const float* query, const T* key, int64_t n, int64_t head_size, float* score,
                     Coming coming) {
  if constexpr (R > 1) {
    if (rows < R) return score_some_rows<T, R - 1>(rows, query, key, n, head_size, score, coming);
  }
  score_rows<R>(query, key, n, head_size, score, coming);
}

// The softmax of one chunk for one row; rescales what the row has summed up.
void weigh_row(float cap, int64_t n, int64_t head_size, int64_t row, Buffers& b) {
  float* score = b.score + row * kChunkStride;
  const int64_t width = round_up(n, Vec::width);
  std::fill(score + n, score + width, -kInfinity);
  Vec highest = Vec::set1(b.maximum[row]);
  for (int64_t j = 0; j < width; j += Vec::width) {
    Vec s = load(score + j);
    if (cap > 0) {
      s = cap_score(s, cap);
      store(score + j, s);
      if (j + Vec::width > n) {
        std::fill(score + n, score + width, -kInfinity);
        s = load(score + j);
      }
    }
    highest = max(s, highest);
  }
  const float old = b.maximum[row], now = max(highest), reference = now == -kInfinity ? 0.f : now;
  Vec total = Vec::zero();
  for (int64_t j = 0; j < width; j += Vec::width) {
    const Vec weight = exp2_of_nonpositive(load(score + j) - Vec::set1(reference));
    store(score + j, weight);
    total = total + weight;
  }
  const float rescale = std::exp2(old - reference);
  b.maximum[row] = now;
  b.total[row] = b.total[row] * rescale + sum(total);
  if (rescale == 1.f) return;
  for (int64_t d = 0; d < head_size; d += Vec::width) {
    float* at = b.rows + row * kHeadStride + d;
    store(at, load(at) * Vec::set1(rescale));
  }
}

template <class T>
bool attend_rows(const AttentionArgs& a, AttentionPlan& plan, const Item& item, int64_t first_chunk,
                 int64_t last_chunk, Buffers& b) {
  const int64_t rows = item.num_queries, head_size = a.head_size;
  load_query_rows(a, item, b.query);
  std::fill_n(b.maximum, rows, -kInfinity);
  std::fill_n(b.total, rows, 0.f);
  std::fill_n(b.rows, rows * kHeadStride, 0.f);
  using Weights = Strides<kChunkStride, 1>;
  const auto begin_of = [&](int64_t chunk) { return std::max(chunk * kChunk, item.begin); };
  const auto find = [&](int64_t chunk, Segments<T>& to) {
    return find_segments(a, plan, item, begin_of(chunk),
                         std::min((chunk + 1) * kChunk, item.end) - begin_of(chunk), to);
  };
  Segments<T> segments, next;
  if (!find(first_chunk, next)) return false;
  for (int64_t chunk = first_chunk; chunk < last_chunk; ++chunk) {
    segments = next;
    if (chunk + 1 < last_chunk && !find(chunk + 1, next)) return false;
    const int64_t n = std::min((chunk + 1) * kChunk, item.end) - begin_of(chunk);
    for (int64_t i = 0; i < segments.size; ++i) {
      const Segment<T>& s = segments.list[i];
      const Coming coming{s.value, next.list[std::min(i, next.size - 1)].key};
      for (int64_t r = 0; r < rows; r += kFewRows) {
        score_some_rows(int(std::min<int64_t>(kFewRows, rows - r)), b.query + r * kHeadStride, s.key, s.count,
                        head_size, b.score + r * kChunkStride + s.offset, coming);
      }
    }
    for (int64_t r = 0; r < rows; ++r) weigh_row(a.soft_cap, n, head_size, r, b);
    for (const Segment<T>& s : segments) {
      for (int64_t r = 0; r < rows; r += kFewRows) {
        const int count = int(std::min<int64_t>(kFewRows, rows - r));
        const float* weights = b.score + r * kChunkStride + s.offset;
        float* output = b.rows + r * kHeadStride;
        int64_t d = 0;
        for (; d + 2 * Vec::width <= head_size; d += 2 * Vec::width) {
          multiply_rows<2, Weights, From::cache, T, kFewRows>(count, weights, s.value + d, head_size,
                                                              output + d, kHeadStride, s.count, true);
        }
        if (d < head_size) {
          multiply_rows<1, Weights, From::cache, T, kFewRows>(count, weights, s.value + d, head_size,
                                                              output + d, kHeadStride, s.count, true);
        }
      }
    }
  }
  return true;
}

// ---------------------------------------------------------------- items, parts, merging

// Leaves output (not yet divided), maximum and total of the chunks in the buffers.
bool attend(const AttentionArgs& a, AttentionPlan& plan, const Item& item, int64_t first_chunk,
            int64_t last_chunk, Buffers& b) {
  const int64_t group = group_size(a);
  const bool one_token = item.first_query / group == (item.first_query + item.num_queries - 1) / group;
  const bool few = one_token && item.num_queries <= kFewQueries && a.head_size % Vec::width == 0;
  bool done = false;
  dispatch(a.cache_dtype, [&](auto t) {
    using T = decltype(t);
    done = few ? attend_rows<T>(a, plan, item, first_chunk, last_chunk, b)
               : attend_across<T>(a, plan, item, first_chunk, last_chunk, b);
  });
  return done;
}

void write_output(const AttentionArgs& a, const Item& item, const Buffers& b) {
  const int64_t group = group_size(a);
  dispatch(a.dtype, [&](auto t) {
    for (int64_t i = 0; i < item.num_queries; ++i) {
      const int64_t query = item.first_query + i;
      auto* to = static_cast<decltype(t)*>(a.out) + (item.first_token + query / group) * a.out_token_stride +
                 (item.kv_head * group + query % group) * a.out_head_stride;
      const Vec scale = Vec::set1(1.f / b.total[i]);
      for_each_vector(a.head_size, [&](int64_t d, int n, auto full) {
        store_step(to + d, load(b.rows + i * kHeadStride + d) * scale, n, full);
      });
    }
  });
}

// A slot of the workspace: maximum [queries], total [queries], output [queries][head_size].
int64_t slot_size(int64_t num_tokens, int64_t num_heads, int64_t head_size) {
  return std::min(kTileQueries, num_tokens * num_heads) * (head_size + 2);
}
float* slot(const AttentionArgs& a, int64_t part, bool continued) {
  return a.workspace + (2 * part + continued) * slot_size(a.num_tokens, a.num_heads, a.head_size);
}

void save_partial(const AttentionArgs& a, const Item& item, const Buffers& b, float* to) {
  std::copy_n(b.maximum, item.num_queries, to);
  std::copy_n(b.total, item.num_queries, to + item.num_queries);
  to += 2 * item.num_queries;
  for (int64_t i = 0; i < item.num_queries; ++i) {
    std::copy_n(b.rows + i * kHeadStride, a.head_size, to + i * a.head_size);
  }
}

void add_partial(const AttentionArgs& a, const Item& item, const float* from, Buffers& b) {
  const float* output = from + 2 * item.num_queries;
  for (int64_t i = 0; i < item.num_queries; ++i) {
    const float maximum = from[i], total = from[item.num_queries + i];
    const float now = std::max(b.maximum[i], maximum), reference = now == -kInfinity ? 0.f : now;
    const float mine = std::exp2(b.maximum[i] - reference), other = std::exp2(maximum - reference);
    b.maximum[i] = now;
    b.total[i] = b.total[i] * mine + total * other;
    for (int64_t d = 0; d < a.head_size; ++d) {
      float& sum = b.rows[i * kHeadStride + d];
      sum = sum * mine + output[i * a.head_size + d] * other;
    }
  }
}

}  // namespace

int64_t attention_workspace_size(int64_t num_tokens, int64_t num_heads, int64_t head_size, int64_t threads) {
  if (threads <= 1) return 0;
  return 2 * threads * kPartsPerThread * slot_size(num_tokens, num_heads, head_size);
}

void plan_attention(const AttentionArgs& a, int64_t threads, AttentionPlan& plan) {
  plan.sequences.clear();
  plan.bad_entry = -1;
  plan.work = 0;
  for (int64_t s = 0; s < a.num_seqs; ++s) {
    const int64_t first = a.query_start_loc[s], tokens = a.query_start_loc[s + 1] - first;
    if (a.seq_lens[s] == 0 || tokens == 0) continue;
    const AttentionSequence& sequence =
        plan.sequences.emplace_back(AttentionSequence{s, first, tokens, a.seq_lens[s], plan.work});
    for (int64_t tile = 0; tile < num_tiles_of(a, sequence); ++tile) {
      const Item item = item_of(a, sequence, 0, tile);
      plan.work += item.chunks * item.chunk_work() * a.num_kv_heads;
    }
  }
  const int64_t worth = plan.work * 2 * kChunk * a.head_size / kPartWork;
  const int64_t room =
      a.workspace_size / std::max<int64_t>(1, 2 * slot_size(a.num_tokens, a.num_heads, a.head_size));
  plan.parts = threads <= 1 ? 1 : std::max<int64_t>(1, std::min({threads * kPartsPerThread, worth, room}));
  if (plan.parts > threads) plan.parts -= plan.parts % threads;
  plan.cuts.assign(plan.parts, {});
}

void attention(const AttentionArgs& a, AttentionPlan& plan, int64_t part) {
  const int64_t first_work = part * plan.work / plan.parts, last_work = (part + 1) * plan.work / plan.parts;
  Buffers& b = buffers();
  AttentionCut& cut = plan.cuts[part];
  auto sequence =
      std::upper_bound(plan.sequences.begin(), plan.sequences.end(), first_work,
                       [](int64_t work, const AttentionSequence& s) { return work < s.work_start; });
  if (sequence != plan.sequences.begin()) --sequence;
  for (; sequence != plan.sequences.end(); ++sequence) {
    int64_t start = sequence->work_start;
    for (int64_t kv_head = 0; kv_head < a.num_kv_heads; ++kv_head) {
      for (int64_t tile = 0; tile < num_tiles_of(a, *sequence); ++tile) {
        if (start >= last_work) return;
        const Item item = item_of(a, *sequence, kv_head, tile);
        // A chunk belongs to the part in which it starts.
        const int64_t first =
            std::clamp<int64_t>(ceil_div(first_work - start, item.chunk_work()), 0, item.chunks);
        const int64_t last =
            std::clamp<int64_t>(ceil_div(last_work - start, item.chunk_work()), 0, item.chunks);
        start += item.chunks * item.chunk_work();
        if (first >= last) continue;
        if (!attend(a, plan, item, item.first_chunk + first, item.first_chunk + last, b)) return;
        if (last - first == item.chunks) {
          write_output(a, item, b);
        } else if (first > 0) {
          cut.chunks_continued = last - first;
          save_partial(a, item, b, slot(a, part, true));
        } else {
          cut.sequence = sequence - plan.sequences.begin();
          cut.kv_head = kv_head;
          cut.tile = tile;
          cut.chunks = item.chunks;
          cut.chunks_done = last;
          save_partial(a, item, b, slot(a, part, false));
        }
      }
    }
  }
}

void merge_attention(const AttentionArgs& a, const AttentionPlan& plan, int64_t part) {
  const AttentionCut& cut = plan.cuts[part];
  if (cut.sequence < 0) return;
  const Item item = item_of(a, plan.sequences[cut.sequence], cut.kv_head, cut.tile);
  Buffers& b = buffers();
  std::fill_n(b.maximum, item.num_queries, -kInfinity);
  std::fill_n(b.total, item.num_queries, 0.f);
  std::fill_n(b.rows, item.num_queries * kHeadStride, 0.f);
  add_partial(a, item, slot(a, part, false), b);
  int64_t done = cut.chunks_done;
  for (int64_t next = part + 1; done < cut.chunks; ++next) {
    if (plan.cuts[next].chunks_continued == 0) continue;
    add_partial(a, item, slot(a, next, true), b);
    done += plan.cuts[next].chunks_continued;
  }
  write_output(a, item, b);
}

}  // namespace pelton::cpu
