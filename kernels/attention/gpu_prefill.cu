// Attention of many queries a sequence over the paged cache, with matrix instructions of sm_80.
// A block takes a tile of rows (queries x heads of a group) of one kv head and goes over the positions that
// they see, keys and values in turn on their way while the other is used; tiles that no row sees are left
// out. Method: Dao, "FlashAttention-2", 2023.
#include "../common/dependent.cuh"
#include "../common/gpu.cuh"
#include "../common/mma.cuh"
#include "attention.h"
#include "batch.cuh"
#include "mma_tile.cuh"
#include "portable.cuh"

namespace pelton::gpu {
namespace {

constexpr int kThreads = kPortableThreads, kWarps = kThreads / kWarp;

template <class T_, int D_, int RowBlocks_, int Positions_>
struct PrefillShape {
  using T = T_;
  static constexpr int D = D_, kRowBlocks = RowBlocks_, kPositions = Positions_;  // row blocks: of 16, a warp
  static constexpr int kWarpRows = 16 * kRowBlocks, kRows = kWarps * kWarpRows;
  static constexpr int kSharedBytes = (kRows + 2 * kPositions) * D * 2;
  static constexpr int kBlocksAtOnce = 2;  // on a multiprocessor
};

template <class S>
__device__ __forceinline__ void load_queries(const AttentionArgs& a, const RowTile& rows,
                                             typename S::T* tile) {
  using T = typename S::T;
  constexpr int kPieces = S::D / 8;
  const bool aligned = a.query_token_stride % 8 == 0 && a.query_head_stride % 8 == 0 &&
                       reinterpret_cast<uintptr_t>(a.query) % 16 == 0;
  for (int i = threadIdx.x; i < S::kRows * kPieces; i += kThreads) {
    const int row = i / kPieces, piece = i % kPieces;
    Vector<T, 8> v{};
    if (row < rows.num_rows && piece * 8 < a.head_size) {
      const T* from = static_cast<const T*>(a.query) +
                      (rows.sequence.first_row + rows.query(row)) * a.query_token_stride +
                      rows.head(row) * a.query_head_stride + piece * 8;
      if (aligned) {
        v = load_vector<T>(from);
      } else {
        for (int j = 0; j < 8; ++j) v[j] = from[j];
      }
    }
    store_vector(piece_of<T, S::D>(tile, row, piece), v);
  }
}

// Starts the copies of a tile whose positions lie at `offsets` in the cache, or nowhere (negative).
template <class S>
__device__ __forceinline__ void load_tile(const typename S::T* cache, const int64_t* offsets,
                                          typename S::T* tile, int head_size) {
  using T = typename S::T;
  constexpr int kPieces = S::D / 8, kRowsAtOnce = kThreads / kPieces;
  const int piece = threadIdx.x % kPieces;
#pragma unroll
  for (int r = 0; r < S::kPositions; r += kRowsAtOnce) {
    const int row = r + threadIdx.x / kPieces;
    const int64_t offset = offsets[row];
    const bool valid = offset >= 0 && piece * 8 < head_size;
    copy_async16(piece_of<T, S::D>(tile, row, piece), cache + (valid ? offset + piece * 8 : 0), valid);
  }
  copy_async_commit();
}

template <class S>
__global__ void __launch_bounds__(kThreads, S::kBlocksAtOnce)
    prefill_kernel(const __grid_constant__ AttentionArgs a, const AttentionShare share) {
  using T = typename S::T;
  constexpr int kSteps = S::D / 16, kColumns = S::kPositions / 8;
  static_assert(S::kPositions <= kThreads && S::kRows <= kThreads);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, pair = lane % 4;
  const int group = int(a.num_heads / a.num_kv_heads), head_size = int(a.head_size);
  const int block_size = int(a.block_size);
  __shared__ int64_t offsets[2][S::kPositions];
  __shared__ int last_of_row[S::kRows];  // the last position that a row sees

  let_next_start();  // the decode kernel, with the sequences that are not for this one

  // Which tile: the last rows of a sequence, which see most, come first.
  const auto count = [&](int s) { return prefill_tiles(a, share, group, S::kRows, s); };
  SequenceScan<kThreads> scan(int(a.num_seqs), count);
  const int kv_heads = int(a.num_kv_heads), tile_index = blockIdx.x / kv_heads;
  if (tile_index >= scan.total) return;
  int index, begin;
  scan.find(tile_index, count, index, begin);
  __shared__ RowTile rows;  // registers are scarce
  if (threadIdx.x == 0) {
    const Sequence sequence = sequence_of(a, index);
    const int all_rows = sequence.num_queries * group;
    const int first_row = (count(index) - 1 - (tile_index - begin)) * S::kRows;
    rows = {.sequence = sequence,
            .index = index,
            .kv_head = int(blockIdx.x) % kv_heads,
            .group = group,
            .first_row = first_row,
            .num_rows = all_rows - first_row < S::kRows ? all_rows - first_row : S::kRows};
  }
  __syncthreads();

  T* const queries = dynamic_shared<T>();
  T* const keys = queries + S::kRows * S::D;
  T* const values = keys + S::kPositions * S::D;
  const T* const key_cache = static_cast<const T*>(a.key_cache);
  const T* const value_cache = static_cast<const T*>(a.value_cache);
  const int first_position = first_visible(a, rows.position(0)),
            last_position = rows.position(rows.num_rows - 1);
  const int32_t* const table = a.block_tables + rows.index * a.block_table_stride;

  // Of position base + thread, in the caches.
  const auto block_at = [&](int base) {
    const int position = base + int(threadIdx.x);
    const bool visible =
        threadIdx.x < S::kPositions && position >= first_position && position <= last_position;
    return visible ? table[position / block_size] : -1;
  };
  const auto store_offset = [&](int base, int block, int64_t* to) {
    if (threadIdx.x < S::kPositions) {
      const int within = (base + int(threadIdx.x)) % block_size;
      to[threadIdx.x] =
          uint32_t(block) < uint64_t(a.num_blocks)
              ? ((int64_t(block) * a.num_kv_heads + rows.kv_head) * block_size + within) * head_size
              : -1;
    }
  };

  int base = first_position / S::kPositions * S::kPositions;
  store_offset(base, block_at(base), offsets[0]);
  if (threadIdx.x < S::kRows) last_of_row[threadIdx.x] = rows.position(threadIdx.x);
  __syncthreads();
  load_tile<S>(key_cache, offsets[0], keys, head_size);
  load_queries<S>(a, rows, queries);

  // A lane has the rows 16 m + group_row and + 8 (index m, half) of its warp's, where group_row = lane / 4.
  const int warp_row = warp * S::kWarpRows;
  const int whole_last = rows.position(warp_row);
  const int whole_first = first_visible(a, rows.position(warp_row + S::kWarpRows - 1));
  const Scores score(a);
  float sums[S::kRowBlocks][2 * kSteps][4] = {};
  float maximum[S::kRowBlocks][2], weight[S::kRowBlocks][2] = {};
#pragma unroll
  for (int m = 0; m < S::kRowBlocks; ++m) maximum[m][0] = maximum[m][1] = -INFINITY;

  for (int turn = 0; base <= last_position; base += S::kPositions, turn ^= 1) {
    copy_async_wait<0>();
    __syncthreads();  // the keys are there, and the values before these have been used
    load_tile<S>(value_cache, offsets[turn], values, head_size);
    const int next_block = block_at(base + S::kPositions);

    float s[S::kRowBlocks][kColumns][4] = {};
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t q[S::kRowBlocks][4];
#pragma unroll
      for (int m = 0; m < S::kRowBlocks; ++m) load_rows<S::D>(q[m], queries, warp_row + 16 * m, k);
#pragma unroll
      for (int n = 0; n < kColumns; n += 2) {
        uint32_t b[2][2];
        load_rows_b<S::D>(b, keys, 8 * n, k);
#pragma unroll
        for (int m = 0; m < S::kRowBlocks; ++m) {
          mma_m16n8k16<T>(s[m][n], q[m], b[0]);
          mma_m16n8k16<T>(s[m][n + 1], q[m], b[1]);
        }
      }
    }
    store_offset(base + S::kPositions, next_block, offsets[turn ^ 1]);
    copy_async_wait<0>();
    __syncthreads();  // the values are there, and the keys have been used
    if (base + S::kPositions <= last_position) load_tile<S>(key_cache, offsets[turn ^ 1], keys, head_size);

    const bool edge = base < whole_first || base + S::kPositions - 1 > whole_last;
#pragma unroll
    for (int m = 0; m < S::kRowBlocks; ++m) {
      if (!score.direct) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) s[m][n][i] = score(s[m][n][i]);
        }
      }
      if (edge) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int last = last_of_row[warp_row + 16 * m + 8 * half + lane / 4],
                    first = first_visible(a, last);
#pragma unroll
          for (int n = 0; n < kColumns; ++n) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              const int position = base + 8 * n + 2 * pair + c;
              if (position < first || position > last) s[m][n][2 * half + c] = -INFINITY;
            }
          }
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float highest = maximum[m][half];
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          highest = fmaxf(highest, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        }
        highest = fmaxf(highest, shuffle_xor(highest, 1));
        highest = fmaxf(highest, shuffle_xor(highest, 2));
        const float origin = highest == -INFINITY ? 0 : highest;
        const float keep = exp2_fast((maximum[m][half] - origin) * score.unit);
        maximum[m][half] = highest;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& p = s[m][n][2 * half + c];
            p = exp2_fast((p - origin) * score.unit);
            sum += p;
          }
        }
        weight[m][half] = weight[m][half] * keep + sum;
#pragma unroll
        for (int e = 0; e < 2 * kSteps; ++e) {
          sums[m][e][2 * half] *= keep;
          sums[m][e][2 * half + 1] *= keep;
        }
      }
    }

#pragma unroll
    for (int k = 0; k < S::kPositions / 16; ++k) {
      uint32_t p[S::kRowBlocks][4];
#pragma unroll
      for (int m = 0; m < S::kRowBlocks; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          p[m][i] = pack2<T>(s[m][2 * k + i / 2][i % 2 * 2], s[m][2 * k + i / 2][i % 2 * 2 + 1]);
        }
      }
#pragma unroll
      for (int e = 0; e < kSteps; ++e) {
        uint32_t b[2][2];
        load_columns_b<S::D>(b, values, 16 * k, e);
#pragma unroll
        for (int m = 0; m < S::kRowBlocks; ++m) {
          mma_m16n8k16<T>(sums[m][2 * e], p[m], b[0]);
          mma_m16n8k16<T>(sums[m][2 * e + 1], p[m], b[1]);
        }
      }
    }
  }

  // Through this warp's part of the query tile, so that writes are wide.
  bool finite = true;
  __syncwarp();
#pragma unroll
  for (int m = 0; m < S::kRowBlocks; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = weight[m][half];
      total += shuffle_xor(total, 1);
      total += shuffle_xor(total, 2);
      const float inverse = total == 0 ? 0 : 1 / total;
      const int row = warp_row + 16 * m + 8 * half + lane / 4;
#pragma unroll
      for (int e = 0; e < 2 * kSteps; ++e) {
        const float low = sums[m][e][2 * half] * inverse, high = sums[m][e][2 * half + 1] * inverse;
        finite = finite && low - low == 0 && high - high == 0;
        *reinterpret_cast<uint32_t*>(piece_of<T, S::D>(queries, row, e) + 2 * pair) = pack2<T>(low, high);
      }
    }
  }
  __syncwarp();
  const bool aligned = a.out_token_stride % 8 == 0 && a.out_head_stride % 8 == 0 &&
                       reinterpret_cast<uintptr_t>(a.out) % 16 == 0;
  constexpr int kPieces = S::D / 8;
  for (int i = lane; i < S::kWarpRows * kPieces; i += kWarp) {
    const int row = warp_row + i / kPieces, piece = i % kPieces;
    if (row >= rows.num_rows || piece * 8 >= head_size) continue;
    const auto v = load_vector<T>(piece_of<T, S::D>(queries, row, piece));
    T* const out = static_cast<T*>(a.out) + (rows.sequence.first_row + rows.query(row)) * a.out_token_stride +
                   rows.head(row) * a.out_head_stride + piece * 8;
    if (aligned) {
      store_vector(out, v);
    } else {
      for (int j = 0; j < 8; ++j) out[j] = v[j];
    }
  }

  // A value that is not finite reaches rows of its tile that do not see it, as zero times infinity. Such a
  // tile is done again without matrices.
  __shared__ int not_finite[kWarps];
  const bool warp_finite = warp_sum(finite ? 0.0f : 1.0f) == 0;
  if (lane == 0) not_finite[warp] = !warp_finite;
  __syncthreads();
  int any = 0;
  for (int w = 0; w < kWarps; ++w) any |= not_finite[w];
  if (any == 0) return;
  PortableShared<>& shared = *reinterpret_cast<PortableShared<>*>(keys);
  for (int row = 0; row < rows.num_rows; ++row) {
    attend_portable<T, T>(a, shared, rows.index, rows.sequence, rows.query(row), rows.head(row));
  }
}

template <class S>
int start(const AttentionArgs& a, AttentionShare share, cudaStream_t stream) {
  static_assert(S::kSharedBytes - S::kRows * S::D * 2 >= int(sizeof(PortableShared<>)));
  const int64_t group = a.num_heads / a.num_kv_heads;
  // A sequence that is not decode work has at least this many queries.
  const int64_t least = share == AttentionShare::prefill ? std::max<int64_t>(2, kDecodeRows / group + 1) : 1;
  const int64_t sequences = std::min(a.num_seqs, a.num_tokens / least);
  const int64_t tiles = (a.num_tokens * group) / S::kRows + sequences;
  if (tiles == 0) return 0;
  if (const int error = allow_shared_memory(prefill_kernel<S>, S::kSharedBytes)) return error;
  prefill_kernel<S><<<unsigned(tiles * a.num_kv_heads), kThreads, S::kSharedBytes, stream>>>(a, share);
  return launch_result();
}

template <class T>
int start_head(const AttentionArgs& a, AttentionShare share, cudaStream_t stream) {
  if (a.head_size <= 64) return start<PrefillShape<T, 64, 2, 64>>(a, share, stream);
  if (a.head_size <= 128) return start<PrefillShape<T, 128, 2, 48>>(a, share, stream);
  return start<PrefillShape<T, 256, 1, 32>>(a, share, stream);
}

}  // namespace

int attention_prefill(const AttentionArgs& a, AttentionShare share, void* stream) {
  return a.dtype == DType::f16 ? start_head<f16>(a, share, cudaStream_t(stream))
                               : start_head<bf16>(a, share, cudaStream_t(stream));
}

}  // namespace pelton::gpu
