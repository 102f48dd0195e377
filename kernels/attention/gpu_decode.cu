// Attention of few queries a sequence over the paged cache, with matrix instructions of sm_80.
// The tiles of keys and values that all sequences and kv heads need stand on one line, which is cut into
// equal parts, one a block; a block's warps take its tiles in turn, each through its own asynchronous
// pipeline. Scores are K Q^T and outputs V^T P^T, with the rows (queries x heads of a group) as the narrow
// side, so that a group reads its keys once. What is cut leaves partial results in the workspace, which a
// second kernel puts together, always in one order. Method: Dao et al., "Flash-Decoding", 2023; the line of
// work: Osama et al., "Stream-K", 2023.
#include "../common/dependent.cuh"
#include "../common/gpu.cuh"
#include "../common/mma.cuh"
#include "attention.h"
#include "batch.cuh"
#include "mma_tile.cuh"

namespace pelton::gpu {
namespace {

constexpr int kMinTiles = 8;  // of a block: with fewer, putting parts together costs more than it brings

// A row's partial result in the workspace is head_size sums, then maximum and weight.
__host__ __device__ constexpr int64_t slot_floats(int64_t head_size) { return kDecodeRows * (head_size + 2); }

// What the second kernel must know of a block whose last item goes on in the blocks behind it.
struct Cut {
  int pieces, sequence, kv_head, row_tile;  // pieces 0: nothing was cut
};

// The line cut into parts, the first of which are one longer when it does not divide.
struct Cutting {
  int each = 0, longer = 0;

  __device__ Cutting(int total, int parts) {
    if (parts > 0) {
      each = total / parts;
      longer = total % parts;
    }
  }
  __device__ int first(int part) const { return part * each + min(part, longer); }
  __device__ int part_of(int tile) const {
    const int in_longer = longer * (each + 1);
    return tile < in_longer ? tile / (each + 1) : longer + (tile - in_longer) / each;
  }
};

// One kv head of a sequence and a tile of its rows: tiles first_tile ... of positions, [start, end) on the
// line.
template <int Positions, int Rows>
struct Item {
  int start = 0, end = 0;
  int index = -1, kv_head = 0, row_tile = 0, row_tiles = 0, first_tile = 0, tiles = 0;
  Sequence sequence;

  // Looks at a sequence; returns its tiles on the line.
  __device__ int64_t open(const AttentionArgs& a, int group, AttentionShare share, int64_t s) {
    index = int(s);
    kv_head = row_tile = tiles = 0;
    sequence = sequence_of(a, s);
    if (sequence.num_queries == 0) return 0;
    if (share == AttentionShare::decode && !attention_decodes(sequence.num_queries, group)) return 0;
    row_tiles = ceil_div(sequence.num_queries * group, Rows);
    first_tile = first_visible(a, sequence.position(0)) / Positions;
    tiles = ceil_div(sequence.length, Positions) - first_tile;
    return int64_t(tiles) * row_tiles * a.num_kv_heads;
  }
  // To the item at `line`, of a sequence that begins at `sequence_start`.
  __device__ void seek(int sequence_start, int line) {
    const int item = (line - sequence_start) / tiles;
    kv_head = item / row_tiles;
    row_tile = item % row_tiles;
    start = sequence_start + item * tiles;
    end = start + tiles;
  }
  // To the next item; there must be one.
  __device__ void advance(const AttentionArgs& a, int group, AttentionShare share) {
    start = end;
    if (++row_tile == row_tiles) {
      row_tile = 0;
      if (++kv_head == a.num_kv_heads) {
        while (index + 1 < a.num_seqs && open(a, group, share, index + 1) == 0) {
        }
      }
    }
    end = start + tiles;
  }
};

template <class T_, int D_, int RowBlocks_, int Warps_, int Stages_>
struct DecodeShape {
  using T = T_;
  static constexpr int D = D_, kRowBlocks = RowBlocks_, kWarps = Warps_, kStages = Stages_;
  static constexpr int kThreads = kWarps * kWarp, kPositions = 16, kRows = 8 * kRowBlocks;
  static constexpr int kTile = kPositions * D;  // elements of a tile of keys, or of values
  static constexpr int kSumStride = D + 4;      // floats: rows in different banks
  static constexpr int kRing = kWarps * kStages * 2 * kTile;
  static constexpr int kSharedBytes = kRing * 2 + kWarps * 8 * kSumStride * 4;
  using Item = gpu::Item<kPositions, kRows>;
};

// The copies of one warp: its tiles of the block's part of the line, one after another, kStages ahead of
// their use. The blocks that hold a tile are looked up when the tile before it is copied.
template <class S>
struct Loader {
  using T = typename S::T;
  static constexpr int kPieces = S::D / 8;  // of 16 bytes, a position
  static constexpr int kRowsAtOnce = kWarp >= kPieces ? kWarp / kPieces : 1;

  const AttentionArgs& a;
  T* ring;
  int group;
  AttentionShare share;
  typename S::Item item;
  int line, end;                        // the next tile, and where this block's part ends
  bool whole_pages;                     // the positions of a tile lie in one block of the cache
  int base = 0, block = -1, stage = 0;  // of the next tile; the block of position base + lane % kPositions

  __device__ void look_up(int lane) {
    if (line >= end) return;
    while (line >= item.end) item.advance(a, group, share);
    base = (item.first_tile + line - item.start) * S::kPositions;
    const int position = base + lane % S::kPositions;
    block = -1;
    if (position >= first_visible(a, item.sequence.position(0)) && position < item.sequence.length) {
      block = a.block_tables[item.index * a.block_table_stride + position / int(a.block_size)];
      if (uint32_t(block) >= uint64_t(a.num_blocks)) block = -1;
    }
  }

  // Starts the copies of the next tile; also without one a group of copies is closed, so that all warps count
  // alike.
  __device__ void next(int lane) {
    if (line < end) {
      T* const keys = ring + stage * 2 * S::kTile;
      const int block_size = int(a.block_size), head_size = int(a.head_size), piece = lane % kPieces;
      const T* const key_cache = static_cast<const T*>(a.key_cache);
      const T* const value_cache = static_cast<const T*>(a.value_cache);
      const auto offset_of = [&](int block_of, int position) {
        return ((int64_t(block_of) * a.num_kv_heads + item.kv_head) * block_size + position % block_size) *
               head_size;
      };
      int64_t offset = 0;  // of the tile's first position
      if (whole_pages) {
        int any = block;  // positions that are not visible have none
#pragma unroll
        for (int mask = 1; mask < S::kPositions; mask *= 2) any = max(any, shuffle_xor(any, mask));
        offset = offset_of(any, base);
      }
#pragma unroll
      for (int r = 0; r < S::kPositions; r += kRowsAtOnce) {
        const int row = r + lane / kPieces;
        const int row_block = shuffle(block, row);
        const int64_t from = whole_pages ? offset + row * head_size : offset_of(row_block, base + row);
#pragma unroll
        for (int p = piece; p < kPieces; p += kWarp) {
          const bool valid = row_block >= 0 && p * 8 < head_size;
          const int64_t element = valid ? from + p * 8 : 0;
          copy_async16(piece_of<T, S::D>(keys, row, p), key_cache + element, valid);
          copy_async16(piece_of<T, S::D>(keys + S::kTile, row, p), value_cache + element, valid);
        }
      }
      line += S::kWarps;
      stage = stage + 1 == S::kStages ? 0 : stage + 1;
      look_up(lane);
    }
    copy_async_commit();
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

  __device__ void load(const AttentionArgs& a, const typename S::Item& item, int group, bool aligned,
                       int lane) {
    using T = typename S::T;
    const int rows = item.sequence.num_queries * group, first_row = item.row_tile * S::kRows;
    const int head_size = int(a.head_size);
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
          if (row < rows && d < head_size) {
            pair = aligned ? *reinterpret_cast<const uint32_t*>(from + d)
                           : uint32_t(from[d].bits) | uint32_t(from[d + 1].bits) << 16;
          }
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
  constexpr int kSteps = S::D / 16;
  T* const values = keys + S::kTile;
  // Scores of positions group and group + 8 for the lane's rows; two chains of products hide their latency.
  float s[S::kRowBlocks][4] = {}, odd[S::kRowBlocks][4] = {};
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    uint32_t a[4];
    load_rows<S::D>(a, keys, 0, k);
#pragma unroll
    for (int n = 0; n < S::kRowBlocks; ++n) mma_m16n8k16<T>(k % 2 ? odd[n] : s[n], a, rows.q[k][n]);
  }
  const bool edge = base < rows.whole_first || base + S::kPositions - 1 > rows.whole_last;
  uint32_t p[S::kRowBlocks][2];
#pragma unroll
  for (int n = 0; n < S::kRowBlocks; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] += odd[n][i];
    if (!score.direct) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = score(s[n][i]);
    }
    if (edge) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int position = base + lane / 4 + i / 2 * 8;
        if (position < rows.first[n][i % 2] || position > rows.last[n][i % 2]) s[n][i] = -INFINITY;
      }
    }
    float keep[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float highest = fmaxf(acc.maximum[n][c], fmaxf(s[n][c], s[n][2 + c]));
#pragma unroll
      for (int mask = 4; mask < kWarp; mask *= 2) highest = fmaxf(highest, shuffle_xor(highest, mask));
      const float origin = highest == -INFINITY ? 0 : highest;
      keep[c] = exp2f((acc.maximum[n][c] - origin) * score.unit);
      acc.maximum[n][c] = highest;
      s[n][c] = exp2f((s[n][c] - origin) * score.unit);
      s[n][2 + c] = exp2f((s[n][2 + c] - origin) * score.unit);
      acc.weight[n][c] = acc.weight[n][c] * keep[c] + s[n][c] + s[n][2 + c];
    }
#pragma unroll
    for (int e = 0; e < kSteps; ++e) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc.sums[e][n][i] *= keep[i % 2];
    }
    p[n][0] = transpose_matrix(pack2<T>(s[n][0], s[n][1]));
    p[n][1] = transpose_matrix(pack2<T>(s[n][2], s[n][3]));
  }
  if (edge && several_queries && !values_are_finite<S>(values, lane)) {
#pragma unroll 1
    for (int r = 0; r < S::kPositions; ++r) {
      const int position = base + r;
#pragma unroll
      for (int n = 0; n < S::kRowBlocks; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float weight = shuffle(r < 8 ? s[n][c] : s[n][2 + c], r % 8 * 4 + lane % 4);
          if (position < rows.first[n][c] || position > rows.last[n][c]) continue;
#pragma unroll
          for (int e = 0; e < kSteps; ++e) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int piece = 2 * e + half;
              acc.sums[e][n][2 * half + c] +=
                  weight * to_float(piece_of<T, S::D>(values, r, piece)[lane / 4]);
            }
          }
        }
      }
    }
    return;
  }
#pragma unroll
  for (int e = 0; e < kSteps; ++e) {
    uint32_t a[4];
    load_columns<S::D>(a, values, 0, e);
#pragma unroll
    for (int n = 0; n < S::kRowBlocks; ++n) mma_m16n8k16<T>(acc.sums[e][n], a, p[n]);
  }
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    decode_kernel(const __grid_constant__ AttentionArgs a, const AttentionShare share) {
  using T = typename S::T;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int group = int(a.num_heads / a.num_kv_heads), head_size = int(a.head_size);
  T* const ring = dynamic_shared<T>() + warp * (S::kStages * 2 * S::kTile);
  float* const exchange = reinterpret_cast<float*>(dynamic_shared<T>() + S::kRing);
  __shared__ float maxima[S::kWarps][S::kRows], weights[S::kWarps][S::kRows];
  Cut* const cuts = reinterpret_cast<Cut*>(a.workspace);
  float* const slots = a.workspace + gridDim.x * (sizeof(Cut) / 4);

  typename S::Item item;
  const auto count = [&](int64_t s) { return item.open(a, group, share, s); };
  SequenceScan<S::kThreads> scan(a.num_seqs, count);
  const int total = int(scan.total), parts = min(int(gridDim.x), ceil_div(total, kMinTiles));
  const Cutting cutting(total, parts);
  int first = 0, last = 0;
  if (int(blockIdx.x) < parts) {
    first = cutting.first(blockIdx.x);
    last = cutting.first(blockIdx.x + 1);
    int64_t sequence, sequence_start;
    scan.find(first, count, sequence, sequence_start);
    count(sequence);
    item.seek(int(sequence_start), first);
  }
  Cut cut{};
  let_next_start();

  if (first < last) {
    const Scores score(a);
    const bool aligned = a.query_token_stride % 2 == 0 && a.query_head_stride % 2 == 0 &&
                         reinterpret_cast<uintptr_t>(a.query) % 4 == 0;
    Loader<S> loader{.a = a,
                     .ring = ring,
                     .group = group,
                     .share = share,
                     .item = item,
                     .line = first + warp,
                     .end = last,
                     .whole_pages = a.block_size % S::kPositions == 0};
    loader.look_up(lane);
    for (int i = 0; i < S::kStages - 1; ++i) loader.next(lane);
    QueryRows<S> rows;
    Accumulator<S> acc;
    int line = first + warp;
    for (int stage = 0;;) {
      rows.load(a, item, group, aligned, lane);
      acc.clear();
      const int piece_end = min(item.end, last);
      for (; line < piece_end; line += S::kWarps) {
        copy_async_wait<S::kStages - 2>();
        __syncwarp();
        loader.next(lane);
        const int base = (item.first_tile + line - item.start) * S::kPositions;
        attend_tile<S>(acc, rows, score, ring + stage * 2 * S::kTile, base, item.sequence.num_queries > 1,
                       lane);
        stage = stage + 1 == S::kStages ? 0 : stage + 1;
      }

      // Put the warps' sums together, eight rows at a time.
      const int rows_here = min(item.sequence.num_queries * group - item.row_tile * S::kRows, S::kRows);
      const bool begins = item.start >= first, ends = item.end <= last;
      float* const slot = slots + (2 * blockIdx.x + (begins ? 1 : 0)) * slot_floats(head_size);
#pragma unroll
      for (int n = 0; n < S::kRowBlocks; ++n) {
        if (8 * n >= rows_here) break;
        __syncthreads();
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float weight = acc.weight[n][c];
#pragma unroll
          for (int mask = 4; mask < kWarp; mask *= 2) weight += shuffle_xor(weight, mask);
          const int row = 2 * (lane % 4) + c;
          if (lane < 4) {
            maxima[warp][row] = acc.maximum[n][c] * score.unit;
            weights[warp][row] = weight;
          }
          float* const to = exchange + (warp * 8 + row) * S::kSumStride + lane / 4;
          if (8 * n + row < rows_here) {
#pragma unroll
            for (int e = 0; e < S::D / 16; ++e) {
              to[16 * e] = acc.sums[e][n][c];
              to[16 * e + 8] = acc.sums[e][n][2 + c];
            }
          }
        }
        __syncthreads();
        constexpr int kQuads = S::D / 4;
        for (int i = threadIdx.x; i < min(rows_here - 8 * n, 8) * kQuads; i += S::kThreads) {
          const int row = i / kQuads, d = i % kQuads * 4;
          if (d >= head_size) continue;
          float highest = -INFINITY;
          for (int w = 0; w < S::kWarps; ++w) highest = fmaxf(highest, maxima[w][row]);
          const float origin = highest == -INFINITY ? 0 : highest;
          float weight = 0, sum[4] = {};
          for (int w = 0; w < S::kWarps; ++w) {
            const float factor = exp2f(maxima[w][row] - origin);
            const auto part = load_vector<float>(exchange + (w * 8 + row) * S::kSumStride + d);
            weight += weights[w][row] * factor;
            for (int j = 0; j < 4; ++j) sum[j] += part[j] * factor;
          }
          const int tile_row = 8 * n + row;
          if (begins && ends) {
            const int full_row = item.row_tile * S::kRows + tile_row;
            T* const out = static_cast<T*>(a.out) +
                           (item.sequence.first_row + full_row / group) * a.out_token_stride +
                           (item.kv_head * group + full_row % group) * a.out_head_stride + d;
            for (int j = 0; j < 4; ++j) out[j] = from_float<T>(weight == 0 ? 0 : sum[j] / weight);
          } else {
            for (int j = 0; j < 4; ++j) slot[tile_row * head_size + d + j] = sum[j];
            if (d == 0) {
              slot[kDecodeRows * head_size + 2 * tile_row] = highest;
              slot[kDecodeRows * head_size + 2 * tile_row + 1] = weight;
            }
          }
        }
      }
      if (!ends) {
        if (begins) {
          cut = {cutting.part_of(item.end - 1) - int(blockIdx.x) + 1, item.index, item.kv_head,
                 item.row_tile};
        }
        break;
      }
      if (item.end == last) break;
      item.advance(a, group, share);
    }
    copy_async_wait<0>();
  }
  if (gridDim.x > 1 && threadIdx.x == 0) cuts[blockIdx.x] = cut;
}

// One block a cut, one warp a row.
template <class T, int Rows>
__global__ void __launch_bounds__(Rows* kWarp) merge_kernel(const __grid_constant__ AttentionArgs a) {
  constexpr int kElements = kMaxHeadSize / kWarp;  // of the head, a lane
  const int row = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int block = blockIdx.x, group = int(a.num_heads / a.num_kv_heads), head_size = int(a.head_size);
  wait_for_previous();
  const Cut cut = reinterpret_cast<const Cut*>(a.workspace)[block];
  if (cut.pieces == 0) return;
  const Sequence sequence = sequence_of(a, cut.sequence);
  const int full_row = cut.row_tile * Rows + row;
  if (full_row >= sequence.num_queries * group) return;
  const int64_t slot = slot_floats(head_size);
  // The first piece is the last of its block; the other blocks begin with theirs.
  const float* const pieces = a.workspace + gridDim.x * (sizeof(Cut) / 4) + 2 * block * slot;
  const auto piece = [&](int i) { return pieces + (i == 0 ? 1 : 2 * i) * slot; };
  const int statistics = int(kDecodeRows) * head_size + 2 * row;
  float highest = -INFINITY;
  for (int i = lane; i < cut.pieces; i += kWarp) highest = fmaxf(highest, piece(i)[statistics]);
  highest = warp_max(highest);
  const float origin = highest == -INFINITY ? 0 : highest;
  float sums[kElements] = {}, weight = 0;
#pragma unroll 4
  for (int i = 0; i < cut.pieces; ++i) {
    const float* const from = piece(i);
    const float factor = exp2f(from[statistics] - origin);
    weight += from[statistics + 1] * factor;
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const int d = e * kWarp + lane;
      if (d < head_size) sums[e] += from[row * head_size + d] * factor;
    }
  }
  T* const out = static_cast<T*>(a.out) + (sequence.first_row + full_row / group) * a.out_token_stride +
                 (cut.kv_head * group + full_row % group) * a.out_head_stride;
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    const int d = e * kWarp + lane;
    if (d < head_size) out[d] = from_float<T>(weight == 0 ? 0 : sums[e] / weight);
  }
}

template <class S>
int start(const AttentionArgs& a, AttentionShare share, cudaStream_t stream) {
  const int64_t each = sizeof(Cut) / 4 + 2 * slot_floats(a.head_size);
  const int64_t blocks =
      std::max<int64_t>(1, std::min<int64_t>(device_properties().multiprocessors, a.workspace_size / each));
  if (const int error = allow_shared_memory(decode_kernel<S>, S::kSharedBytes)) return error;
  decode_kernel<S><<<unsigned(blocks), S::kThreads, S::kSharedBytes, stream>>>(a, share);
  if (const int error = launch_result()) return error;
  if (blocks == 1) return 0;
  return launch_dependent(merge_kernel<typename S::T, S::kRows>, unsigned(blocks), S::kRows * kWarp, stream,
                          a);
}

template <class T, int D>
int start_rows(const AttentionArgs& a, AttentionShare share, cudaStream_t stream) {
  const bool narrow = a.num_heads / a.num_kv_heads <= 8 && a.num_tokens <= a.num_seqs;
  if constexpr (D == 256) {
    return start<DecodeShape<T, D, 1, 4, 3>>(a, share, stream);
  } else {
    constexpr int kStages = D == 64 ? 4 : 3;
    if (narrow) return start<DecodeShape<T, D, 1, 8, kStages>>(a, share, stream);
    return start<DecodeShape<T, D, 2, 8, kStages>>(a, share, stream);
  }
}

template <class T>
int start_head(const AttentionArgs& a, AttentionShare share, cudaStream_t stream) {
  if (a.head_size <= 64) return start_rows<T, 64>(a, share, stream);
  if (a.head_size <= 128) return start_rows<T, 128>(a, share, stream);
  return start_rows<T, 256>(a, share, stream);
}

}  // namespace

int64_t attention_workspace_size(int64_t head_size) {
  return device_properties().multiprocessors * int64_t(sizeof(Cut) / 4 + 2 * slot_floats(head_size));
}

int attention_decode(const AttentionArgs& a, AttentionShare share, void* stream) {
  return a.dtype == DType::f16 ? start_head<f16>(a, share, cudaStream_t(stream))
                               : start_head<bf16>(a, share, cudaStream_t(stream));
}

}  // namespace pelton::gpu
