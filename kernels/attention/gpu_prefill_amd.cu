// Attention of many queries a sequence over the paged cache, with matrix instructions of CDNA (MFMA) or RDNA
// 3 (WMMA). A block takes a tile of rows (queries x heads of a group) of one kv head and goes over the
// positions that they see; tiles that no row sees are left out. amd_tile.cuh has the method.
#include "amd_tile.cuh"
#include "attention.h"

namespace pelton::gpu {
namespace {

constexpr int kThreads = 256;

constexpr int row_tiles(int head_size) { return head_size <= 128 ? 8 : 4; }

// Of positions: as many as leave enough registers, of which a lane has 512 on CDNA and 256 on RDNA.
template <class M, int D>
constexpr int kPositions = D <= 96 || (D <= 128 && M::kWave == 64) ? 64 : 32;

template <class M, class T, int D>
using PrefillShape = amd::TileShape<M, T, D, row_tiles(D), kPositions<M, D>, kThreads>;

template <class M, class T, int D>
__global__ void __launch_bounds__(kThreads, 2)  // waves that share a SIMD
    amd_prefill_kernel(const AttentionArgs a, const AttentionShare share) {
  using S = PrefillShape<M, T, D>;
  __shared__ amd::TileShared<S> shared;
  static_assert(sizeof shared <= 62 * 1024);
  const int group = int(a.num_heads / a.num_kv_heads), kv_heads = int(a.num_kv_heads);

  // Which tile: the last rows of a sequence, which see most, come first.
  const auto count = [&](int s) { return prefill_tiles(a, share, group, S::kRows, s); };
  SequenceScan<kThreads> scan(int(a.num_seqs), count);
  const int tile_index = int(blockIdx.x) / kv_heads;
  if (tile_index >= scan.total) return;
  int index, begin;
  scan.find(tile_index, count, index, begin);
  const Sequence sequence = sequence_of(a, index);
  const int first_row = (count(index) - 1 - (tile_index - begin)) * S::kRows;
  const RowTile rows{.sequence = sequence,
                     .index = index,
                     .kv_head = int(blockIdx.x) % kv_heads,
                     .group = group,
                     .first_row = first_row,
                     .num_rows = min(sequence.num_queries * group - first_row, S::kRows)};

  if constexpr (M::kExists) {
    const int first_position = first_visible(a, rows.position(0));
    amd::TileRows<S> own;
    amd::attend<S>(a, rows, first_position / S::kPositions * S::kPositions,
                   rows.position(rows.num_rows - 1) + 1, Scores(a), own, shared);
    if (own.split == 0) amd::write_out<S>(a, rows, own);
  } else {
    for (int row = 0; row < rows.num_rows; ++row) {
      attend_portable<T, T>(a, shared.portable, index, sequence, rows.query(row), rows.head(row));
    }
  }
}

template <class M, class T, int D>
int start(const AttentionArgs& a, AttentionShare share, cudaStream_t stream) {
  constexpr int kRows = 16 * row_tiles(D);
  const int64_t group = a.num_heads / a.num_kv_heads;
  // A sequence that is not decode work has at least this many queries.
  const int64_t least = share == AttentionShare::prefill ? std::max<int64_t>(2, kDecodeRows / group + 1) : 1;
  const int64_t tiles = a.num_tokens * group / kRows + std::min(a.num_seqs, a.num_tokens / least);
  if (tiles == 0) return 0;
  amd_prefill_kernel<M, T, D><<<grid_size(tiles * a.num_kv_heads), kThreads, 0, stream>>>(a, share);
  return launch_result();
}

}  // namespace

int attention_prefill_amd(const AttentionArgs& a, AttentionShare share, void* stream) {
  return amd::start_for(a, [&](auto matrix, auto element, auto head) {
    return start<decltype(matrix), decltype(element), decltype(head)::value>(a, share, cudaStream_t(stream));
  });
}

}  // namespace pelton::gpu
