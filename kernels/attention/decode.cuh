// Attention of few queries a sequence over the paged cache, with matrix instructions of sm_80: gpu_decode.cu
// for bf16, gpu_decode_f16.cu for fp16. The tiles of keys and values that all sequences and kv heads need
// stand on one line, which is cut into equal parts, one a block; a block's warps take its tiles in turn, each
// through its own asynchronous pipeline. Scores are K Q^T and outputs V^T P^T, with the rows (queries x heads
// of a group) as the narrow side, so that a group reads its keys once. What is cut leaves partial results in
// the workspace, which a second kernel puts together, always in one order. Method: Dao et al.,
// "Flash-Decoding", 2023; the line of work: Osama et al., "Stream-K", 2023.
#pragma once
#include "../common/dependent.cuh"
#include "../common/gpu.cuh"
#include "../common/mma.cuh"
#include "attention.h"
#include "batch.cuh"
#include "line.cuh"
#include "mma_tile.cuh"

namespace pelton::gpu::decode {

constexpr int kExchangeRows = 4;  // that warps put together at once
constexpr int kMinTiles = 4;      // of a block: with fewer, putting parts together costs more than it brings

// D: room for the head; when Exact, head_size is D. A tile is 16 PositionBlocks positions.
template <class T_, int D_, bool Exact_, int RowBlocks_, int PositionBlocks_, int Warps_>
struct DecodeShape {
  using T = T_;
  static constexpr int D = D_, kRowBlocks = RowBlocks_, kWarps = Warps_;
  static constexpr bool kExact = Exact_;
  static constexpr int kPositionBlocks = PositionBlocks_, kPositions = 16 * kPositionBlocks;
  static constexpr int kThreads = kWarps * kWarp, kRows = 8 * kRowBlocks;
  static constexpr int kTile = kPositions * D;  // elements of a tile of keys, or of values
  static constexpr int kSumStride = D + 4;      // floats: rows in different banks
  // The tiles behind the exchange begin where bits of their addresses may be flipped.
  static constexpr int kStageBytes = kWarps * 2 * kTile * 2,
                       kExchangeBytes = ceil_div(kWarps * kExchangeRows * kSumStride * 4, 1024) * 1024;
  static_assert(kPositions <= kWarp);
  using Item = decode::Item<kPositions, kRows>;

  static __device__ __forceinline__ int head_size(const AttentionArgs& a) {
    return kExact ? D : int(a.head_size);
  }
};

// The copies of one warp: its tiles of the block's part of the line, one after another, kStages ahead of
// their use. The blocks that hold a tile are looked up when the tile before it is copied.
template <class S>
struct Loader {
  using T = typename S::T;
  static constexpr int kPieces = S::D / 8, kRowsAtOnce = kWarp / kPieces;  // pieces: of 16 bytes, a position
  static constexpr int kTileBytes = S::kTile * 2, kRowBytes = S::D * 2;
  static_assert(kPieces <= kWarp);

  const AttentionArgs& a;
  SharedAddress ring;  // of this lane's piece of the first position
  int group;
  AttentionShare share;
  typename S::Item item;
  int stages, line, end;    // line: the next tile, and where this block's part ends
  int page_shift;           // of the cache's block_size; negative when it is no power of two
  bool whole_pages;         // 16 positions always lie in one block of the cache
  int base = 0, stage = 0;  // of the next tile
  int block = -1;           // that holds position base + lane of the next tile

  __device__ __forceinline__ int page_of(int position) const {
    return page_shift >= 0 ? position >> page_shift : position / int(a.block_size);
  }
  __device__ void look_up(int lane) {
    if (line >= end) return;
#pragma unroll 1
    while (line >= item.end) item.advance(a, group, share);
    base = (item.first_tile + line - item.start) * S::kPositions;
    const int position = min(max(base + lane, item.first_position), item.sequence.length - 1);
    block = a.block_tables[item.index * a.block_table_stride + page_of(position)];
    if (uint32_t(block) >= uint32_t(a.num_blocks)) block = -1;
  }

  // Element of the caches where `position` of a block begins, for this lane's piece.
  __device__ __forceinline__ int64_t offset_of(int block_of, int position, int lane) const {
    const int page = int(a.block_size), head_size = S::head_size(a);
    return (int64_t(block_of) * int(a.num_kv_heads) + item.kv_head) * int64_t(page * head_size) +
           (position - page_of(position) * page) * head_size + lane % kPieces * 8;
  }

  // Starts the copies of the next tile; also without one a group of copies is closed, so that all warps count
  // alike.
  __device__ __forceinline__ void next(int lane) {
    if (line < end) {
      const T* const key_cache = static_cast<const T*>(a.key_cache);
      const T* const value_cache = static_cast<const T*>(a.value_cache);
      const int head_size = S::head_size(a);
      const bool inside = S::kExact || lane % kPieces * 8 < head_size;
      const SharedAddress tile = ring + stage * (2 * kTileBytes);
      const int first = item.first_position - base, count = item.sequence.length - base;
#pragma unroll
      for (int m = 0; m < S::kPositionBlocks; ++m) {
        const SharedAddress keys = tile + m * (16 * kRowBytes), values = keys + kTileBytes;
        const int page = shuffle(block, 16 * m);
        if (!whole_pages) {
#pragma unroll 1
          for (int r = 0; r < 16; r += kRowsAtOnce) {
            const int row = r + lane / kPieces, row_page = shuffle(block, 16 * m + row);
            const bool valid = inside && row_page >= 0 && 16 * m + row >= first && 16 * m + row < count;
            const int64_t offset = valid ? offset_of(row_page, base + 16 * m + row, lane) : 0;
            copy_async16((keys + r * kRowBytes) ^ ((r & 7) * 16), key_cache + offset, valid);
            copy_async16((values + r * kRowBytes) ^ ((r & 7) * 16), value_cache + offset, valid);
          }
          continue;
        }
        const int64_t offset =
            page < 0 ? 0 : offset_of(page, base + 16 * m, lane) + (lane / kPieces) * head_size;
        const T *const key = key_cache + offset, *const value = value_cache + offset;
        if (S::kExact && page >= 0 && 16 * m >= first && 16 * m + 16 <= count) {
#pragma unroll
          for (int r = 0; r < 16; r += kRowsAtOnce) {
            copy_async16((keys ^ ((r & 7) * 16)) + r * kRowBytes, key + r * head_size);
            copy_async16((values ^ ((r & 7) * 16)) + r * kRowBytes, value + r * head_size);
          }
        } else {
#pragma unroll
          for (int r = 0; r < 16; r += kRowsAtOnce) {
            const int row = 16 * m + r + lane / kPieces;
            const bool valid = inside && page >= 0 && row >= first && row < count;
            const int64_t from = valid ? r * head_size : 0;
            copy_async16((keys ^ ((r & 7) * 16)) + r * kRowBytes, valid ? key + from : key_cache, valid);
            copy_async16((values ^ ((r & 7) * 16)) + r * kRowBytes, valid ? value + from : value_cache,
                         valid);
          }
        }
      }
      line += S::kWarps;
      stage = stage + 1 == stages ? 0 : stage + 1;
    }
    copy_async_commit();
    look_up(lane);
  }
};

// Sums of one warp over its tiles of an item. A lane has the rows 8 n + 2 pair, + 1 (index n, c), where
// pair = lane % 4; of the head, elements 16 e + group and + 8 (index e, 2 half + c), where group = lane / 4.
template <class S>
struct Accumulator {
  float sums[S::D / 16][S::kRowBlocks][4], maximum[S::kRowBlocks][2], weight[S::kRowBlocks][2];

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < S::kRowBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < S::D / 16; ++e) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[e][n][i] = 0;
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        maximum[n][c] = -INFINITY;
        weight[n][c] = 0;
      }
    }
  }
};

// The rows of a tile in the registers of a lane: Q as B operand, and the positions that each row sees.
template <class S>
struct QueryRows {
  uint32_t q[S::D / 16][S::kRowBlocks][2];
  int first[S::kRowBlocks][2], last[S::kRowBlocks][2];
  int whole_first, whole_last;  // positions that all rows see

  __device__ void load(const AttentionArgs& a, const typename S::Item& item, int group, int lane) {
    using T = typename S::T;
    const int rows = item.sequence.num_queries * group, first_row = item.row_tile * S::kRows;
    const int head_size = S::head_size(a);
#pragma unroll
    for (int n = 0; n < S::kRowBlocks; ++n) {
      const int row = first_row + 8 * n + lane / 4;
      const int query = row / group, head = item.kv_head * group + row % group;
      const T* from = static_cast<const T*>(a.query) +
                      (item.sequence.first_row + query) * a.query_token_stride + head * a.query_head_stride;
#pragma unroll
      for (int k = 0; k < S::D / 16; ++k) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int d = 16 * k + 8 * half + 2 * (lane % 4);
          uint32_t pair = 0;
          if (row < rows && d < head_size) pair = *reinterpret_cast<const uint32_t*>(from + d);
          q[k][n][half] = pair;
        }
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int query_c =
            min((first_row + 8 * n + 2 * (lane % 4) + c) / group, item.sequence.num_queries - 1);
        last[n][c] = item.sequence.position(query_c);
        first[n][c] = first_visible(a, last[n][c]);
      }
    }
    whole_last = item.sequence.position(first_row / group);
    whole_first = first_visible(
        a, item.sequence.position(min((first_row + S::kRows - 1) / group, item.sequence.num_queries - 1)));
  }
};

// Values that are not finite, at positions that only some of the rows see: zero times them would reach all
// rows.
template <class S>
__device__ bool values_are_finite(const typename S::T* values, int lane) {
  bool finite = true;
#pragma unroll 1
  for (int i = lane; i < S::kTile / 8; i += kWarp) {
    const auto words = load_vector<uint32_t>(reinterpret_cast<const uint32_t*>(values) + 4 * i);
    for (int w = 0; w < 4; ++w) finite = finite && !any_not_finite<typename S::T>(words[w]);
  }
  return warp_sum(finite ? 0.0f : 1.0f) == 0;
}

template <class S>
__device__ __forceinline__ void attend_tile(Accumulator<S>& acc, const QueryRows<S>& rows,
                                            const Scores& score, typename S::T* keys, int base,
                                            bool several_queries, int lane) {
  using T = typename S::T;
  constexpr int kSteps = S::D / 16, kBlocks = S::kPositionBlocks, kHalves = 2 * kBlocks;
  T* const values = keys + S::kTile;
  // Scores: of positions 16 m + 8 half + group, where group = lane / 4, for the lane's rows (index 2 m +
  // half).
  float s[S::kRowBlocks][kHalves][2];
  {
    // Two chains of products at least hide their latency.
    constexpr int kChains = kBlocks * S::kRowBlocks == 1 ? 2 : 1;
    float d[kChains][kBlocks][S::kRowBlocks][4] = {};
    const LaneRow<S::D> lane_row = lane_of_rows<S::D>(shared_address(keys));
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        uint32_t a[4];
        load_matrix_x4<false>(a, lane_row.at(k, m));
#pragma unroll
        for (int n = 0; n < S::kRowBlocks; ++n) mma_m16n8k16<T>(d[k % kChains][m][n], a, rows.q[k][n]);
      }
    }
#pragma unroll
    for (int n = 0; n < S::kRowBlocks; ++n) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          s[n][h][c] = d[0][h / 2][n][h % 2 * 2 + c];
          if constexpr (kChains == 2) s[n][h][c] += d[1][h / 2][n][h % 2 * 2 + c];
        }
      }
    }
  }
  const bool edge = base < rows.whole_first || base + S::kPositions - 1 > rows.whole_last;
  if (!score.direct) {
#pragma unroll
    for (int n = 0; n < S::kRowBlocks; ++n) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
#pragma unroll
        for (int c = 0; c < 2; ++c) s[n][h][c] = score(s[n][h][c]);
      }
    }
  }
  if (edge) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int position = base + 8 * h + lane / 4;
#pragma unroll
      for (int n = 0; n < S::kRowBlocks; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (position < rows.first[n][c] || position > rows.last[n][c]) s[n][h][c] = -INFINITY;
        }
      }
    }
  }
  float highest[S::kRowBlocks][2];
  bool higher = false;
#pragma unroll
  for (int n = 0; n < S::kRowBlocks; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      highest[n][c] = acc.maximum[n][c];
#pragma unroll
      for (int h = 0; h < kHalves; ++h) highest[n][c] = fmaxf(highest[n][c], s[n][h][c]);
    }
  }
#pragma unroll
  for (int mask = 4; mask < kWarp; mask *= 2) {
#pragma unroll
    for (int n = 0; n < S::kRowBlocks; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) highest[n][c] = fmaxf(highest[n][c], shuffle_xor(highest[n][c], mask));
    }
  }
#pragma unroll
  for (int n = 0; n < S::kRowBlocks; ++n) {
    higher = higher || highest[n][0] > acc.maximum[n][0] || highest[n][1] > acc.maximum[n][1];
  }
  if (__any_sync(kAllLanes, higher)) {
#pragma unroll
    for (int n = 0; n < S::kRowBlocks; ++n) {
      float keep[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float origin = highest[n][c] == -INFINITY ? 0 : highest[n][c];
        keep[c] = exp2_fast((acc.maximum[n][c] - origin) * score.unit);
        acc.maximum[n][c] = highest[n][c];
        acc.weight[n][c] *= keep[c];
      }
#pragma unroll
      for (int e = 0; e < kSteps; ++e) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc.sums[e][n][i] *= keep[i % 2];
      }
    }
  }
  uint32_t p[S::kRowBlocks][kHalves];
#pragma unroll
  for (int n = 0; n < S::kRowBlocks; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float origin = acc.maximum[n][c] == -INFINITY ? 0 : acc.maximum[n][c];
      float sum = 0;
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        s[n][h][c] = exp2_fast((s[n][h][c] - origin) * score.unit);
        sum += s[n][h][c];
      }
      acc.weight[n][c] += sum;
    }
#pragma unroll
    for (int h = 0; h < kHalves; ++h) p[n][h] = transpose_matrix(pack2<T>(s[n][h][0], s[n][h][1]));
  }
  if (edge && several_queries && !values_are_finite<S>(values, lane)) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll 1
      for (int r = 0; r < 8; ++r) {
        const int position = base + 8 * h + r;
#pragma unroll
        for (int n = 0; n < S::kRowBlocks; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const float weight = shuffle(s[n][h][c], 4 * r + lane % 4);
            if (position < rows.first[n][c] || position > rows.last[n][c]) continue;
#pragma unroll
            for (int piece = 0; piece < 2 * kSteps; ++piece) {
              acc.sums[piece / 2][n][piece % 2 * 2 + c] +=
                  weight * to_float(piece_of<T, S::D>(values, 8 * h + r, piece)[lane / 4]);
            }
          }
        }
      }
    }
    return;
  }
  const LaneRow<S::D> lane_column = lane_of_columns<S::D>(shared_address(values));
#pragma unroll
  for (int e = 0; e < kSteps; ++e) {
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      uint32_t a[4];
      load_matrix_x4<true>(a, lane_column.at(e, m));
#pragma unroll
      for (int n = 0; n < S::kRowBlocks; ++n) {
        const uint32_t b[2] = {p[n][2 * m], p[n][2 * m + 1]};
        mma_m16n8k16<T>(acc.sums[e][n], a, b);
      }
    }
  }
}

// The oldest of as many groups of copies as there are stages is there.
constexpr int kMaxStages = 3;
__device__ __forceinline__ void wait_for_tile(int stages) {
  if (stages == 3) {
    copy_async_wait<2>();
  } else if (stages == 2) {
    copy_async_wait<1>();
  } else {
    copy_async_wait<0>();
  }
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    decode_kernel(const __grid_constant__ AttentionArgs a, const AttentionShare share, const int stages) {
  using T = typename S::T;
  const int lane = threadIdx.x % kWarp, warp = shuffle(int(threadIdx.x / kWarp), 0);  // the same in all lanes
  const int group = int(a.num_heads / a.num_kv_heads), head_size = S::head_size(a);
  // What the warps exchange, then each one's stages of tiles.
  float* const exchange = dynamic_shared<float>();
  T* const ring = reinterpret_cast<T*>(exchange + S::kExchangeBytes / 4) + warp * stages * (2 * S::kTile);
  __shared__ float maxima[S::kWarps][kExchangeRows], weights[S::kWarps][kExchangeRows];
  Cut* const cuts = reinterpret_cast<Cut*>(a.workspace);
  float* const slots = a.workspace + gridDim.x * (sizeof(Cut) / 4);

  // The block tables come while the lengths are read. All blocks of the grid share this, up to a size that is
  // worth it.
  constexpr int kLine = 128 / int(sizeof(int32_t)), kMostLines = 4096;
  const int64_t entries = (a.num_seqs - 1) * a.block_table_stride + a.max_blocks;
  const int table_line = int(blockIdx.x) * S::kThreads + int(threadIdx.x);
  if (table_line < kMostLines && int64_t(table_line) * kLine < entries) {
    prefetch_l2(a.block_tables + int64_t(table_line) * kLine);
  }

  typename S::Item item{};
  const auto count = [&](int s) { return item.open(a, group, share, s); };
  SequenceScan<S::kThreads> scan(int(a.num_seqs), count);
  const int most_parts = min(int(gridDim.x), ceil_div(scan.total, kMinTiles));
  const Cutting cutting(scan.total, int(a.num_seqs * a.num_kv_heads), most_parts);
  int first = 0, last = 0;
  if (blockIdx.x < cutting.parts) {
    first = cutting.first(blockIdx.x);
    last = cutting.first(blockIdx.x + 1);
    find_item(scan, count, first, item);
  }
  Cut cut{};
  let_next_start();

  if (first < last) {
    const Scores score(a);
    constexpr int kPieces = S::D / 8;
    Loader<S> loader{
        .a = a,
        .ring =
            shared_address(ring) + lane / kPieces * (S::D * 2) + (lane % kPieces ^ (lane / kPieces & 7)) * 16,
        .group = group,
        .share = share,
        .item = item,
        .stages = stages,
        .line = first + warp,
        .end = last,
        .page_shift = (a.block_size & (a.block_size - 1)) == 0 ? __ffs(int(a.block_size)) - 1 : -1,
        .whole_pages = a.block_size % 16 == 0};
    loader.look_up(lane);
    int ahead = 0;  // tiles whose copies were started and that are not used yet
    QueryRows<S> rows;
    Accumulator<S> acc;
    int line = first + warp;
    int stage = 0;
    bool opened = false;
    for (;;) {
      __syncwarp();  // the last tile has been used by all lanes
#pragma unroll 1
      for (; ahead < stages; ++ahead) loader.next(lane);
      if (!opened) {
        rows.load(a, item, group, lane);
        acc.clear();
        opened = true;
      }
      if (line < min(item.end, last)) {
        wait_for_tile(stages);
        __syncwarp();
        const int base = (item.first_tile + line - item.start) * S::kPositions;
        attend_tile<S>(acc, rows, score, ring + stage * 2 * S::kTile, base, item.sequence.num_queries > 1,
                       lane);
        line += S::kWarps;
        stage = stage + 1 == stages ? 0 : stage + 1;
        --ahead;
        continue;
      }

      // Put the warps' sums together, four rows at a time.
      const int rows_here = min(item.sequence.num_queries * group - item.row_tile * S::kRows, S::kRows);
      const bool begins = item.start >= first, ends = item.end <= last;
      float* const slot = slots + (2 * blockIdx.x + (begins ? 1 : 0)) * slot_floats(head_size);
#pragma unroll
      for (int n = 0; n < S::kRowBlocks; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
#pragma unroll
          for (int mask = 4; mask < kWarp; mask *= 2) acc.weight[n][c] += shuffle_xor(acc.weight[n][c], mask);
        }
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
          const int first_row = 8 * n + kExchangeRows * half;
          if (first_row >= rows_here) break;
          __syncthreads();
          if (lane % 4 / 2 == half) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              const int row = lane % 2 * 2 + c;
              if (lane < 4) {
                maxima[warp][row] = acc.maximum[n][c] * score.unit;
                weights[warp][row] = acc.weight[n][c];
              }
              float* const to = exchange + (warp * kExchangeRows + row) * S::kSumStride + lane / 4;
#pragma unroll
              for (int e = 0; e < S::D / 16; ++e) {
                to[16 * e] = acc.sums[e][n][c];
                to[16 * e + 8] = acc.sums[e][n][2 + c];
              }
            }
          }
          __syncthreads();
          constexpr int kPairs = S::D / 2;
          for (int i = threadIdx.x; i < min(rows_here - first_row, kExchangeRows) * kPairs;
               i += S::kThreads) {
            const int row = i / kPairs, d = i % kPairs * 2;
            if (d >= head_size) continue;
            float highest = -INFINITY;
            for (int w = 0; w < S::kWarps; ++w) highest = fmaxf(highest, maxima[w][row]);
            const float origin = highest == -INFINITY ? 0 : highest;
            float weight = 0, low = 0, high = 0;
            for (int w = 0; w < S::kWarps; ++w) {
              const float factor = exp2_fast(maxima[w][row] - origin);
              const auto part =
                  load_vector<float, 2>(exchange + (w * kExchangeRows + row) * S::kSumStride + d);
              weight += weights[w][row] * factor;
              low += part[0] * factor;
              high += part[1] * factor;
            }
            const int tile_row = first_row + row;
            if (begins && ends) {
              const int full_row = item.row_tile * S::kRows + tile_row;
              T* const out = static_cast<T*>(a.out) +
                             (item.sequence.first_row + full_row / group) * a.out_token_stride +
                             (item.kv_head * group + full_row % group) * a.out_head_stride + d;
              store2(out, low, high, weight);
            } else {
              store_vector(slot + tile_row * head_size + d, Vector<float, 2>{low, high});
              if (d == 0) {
                slot[kDecodeRows * head_size + 2 * tile_row] = highest;
                slot[kDecodeRows * head_size + 2 * tile_row + 1] = weight;
              }
            }
          }
        }
      }
      if (!ends) {
        if (begins) {
          cut = {cutting.part_of(item.end - 1) - int(blockIdx.x) + 1, item.sequence.first_row, item.kv_head,
                 item.row_tile * S::kRows, rows_here};
        }
        break;
      }
      if (item.end == last) break;
      item.advance(a, group, share);
      opened = false;
    }
    copy_async_wait<0>();
  }
  if (gridDim.x > 1 && threadIdx.x == 0) cuts[blockIdx.x] = cut;
  if (share == AttentionShare::decode) wait_for_previous();
}

template <class S>
int start(const AttentionArgs& a, AttentionShare share, cudaStream_t stream) {
  const DeviceProperties& device = device_properties();
  const int64_t each = sizeof(Cut) / 4 + 2 * slot_floats(int(a.head_size));
  const int64_t blocks =
      std::max<int64_t>(1, std::min<int64_t>(device.multiprocessors, a.workspace_size / each));
  constexpr int kStaticBytes = 2048;
  const int room = device.shared_memory_per_block - kStaticBytes - S::kExchangeBytes;
  const int stages = std::max(1, std::min(kMaxStages, room / S::kStageBytes));
  const int shared = S::kExchangeBytes + stages * S::kStageBytes;
  if (const int error = allow_shared_memory(decode_kernel<S>, shared)) return error;
  if (share == AttentionShare::decode) {  // beside the end of the prefill kernel, which writes other rows
    if (const int error = launch_dependent(decode_kernel<S>, unsigned(blocks), S::kThreads, shared, stream, a,
                                           share, stages)) {
      return error;
    }
  } else {
    decode_kernel<S><<<unsigned(blocks), S::kThreads, shared, stream>>>(a, share, stages);
    if (const int error = launch_result()) return error;
  }
  if (blocks == 1) return 0;
  return launch_dependent(merge_kernel < typename S::T, S::kExact ? S::D : 0 >, unsigned(blocks),
                          kMergeThreads, 0, stream, a);
}

// For the head size.
template <class T>
int start_head(const AttentionArgs& a, AttentionShare share, cudaStream_t stream) {
  // Two blocks of rows for large groups, and where sequences may have several queries.
  const bool wide = a.num_heads / a.num_kv_heads > 8 || a.num_tokens > a.num_seqs;
  if (a.head_size > 128) return start<DecodeShape<T, 256, false, 1, 1, 6>>(a, share, stream);
  if (a.head_size > 64 && a.head_size < 128)
    return start<DecodeShape<T, 128, false, 1, 1, 12>>(a, share, stream);
  if (a.head_size == 128) {
    return wide ? start<DecodeShape<T, 128, true, 2, 1, 8>>(a, share, stream)
                : start<DecodeShape<T, 128, true, 1, 1, 12>>(a, share, stream);
  }
  return wide ? start<DecodeShape<T, 64, false, 2, 1, 12>>(a, share, stream)
              : start<DecodeShape<T, 64, false, 1, 1, 12>>(a, share, stream);
}

}  // namespace pelton::gpu::decode
