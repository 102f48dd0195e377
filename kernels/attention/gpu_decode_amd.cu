// Attention of few queries a sequence over the paged cache, with matrix instructions of CDNA (MFMA) or RDNA 3
// (WMMA). A block takes its part of the line of work (line.cuh), item after item; its waves share the rows
// (queries x heads of a group) and take parts of each tile of positions, so that a group reads its keys and
// values once. amd_tile.cuh has the method.
#include "amd_tile.cuh"
#include "attention.h"
#include "line.cuh"

namespace pelton::gpu {
namespace {

constexpr int kThreads = 128, kPositions = 64;
constexpr int kMinTiles = 2;      // of a block: with fewer, putting parts together costs more than it brings
constexpr int kBlocksAtOnce = 2;  // on a multiprocessor

constexpr int64_t kBlockFloats = sizeof(decode::Cut) / 4;
int64_t floats_of_block(int64_t head_size) { return kBlockFloats + 2 * decode::slot_floats(int(head_size)); }

template <class M, class T, int D>
using DecodeShape = amd::TileShape<M, T, D, int(kDecodeRows) / amd::kAtOnce, kPositions, kThreads>;

// Leaves a partial result in the workspace; the waves of split 0 alone.
template <class S>
__device__ void write_slot(float* slot, int head_size, int num_rows, const amd::TileRows<S>& own) {
  const int row = own.row_of(0);
  if (row >= num_rows) return;
#pragma unroll
  for (int section = 0; section < S::kSections; ++section) {
#pragma unroll
    for (int i = 0; i < S::kSums; ++i) {
      const int d = own.element(section, i);
      if (d >= head_size) continue;
#pragma unroll
      for (int j = 0; j < S::kWidth; j += 2) {
        const int e = section * S::kWidth + j;
        store_vector(slot + row * head_size + d + j,
                     Vector<float, 2>{own.sums[0][e][i], own.sums[0][e + 1][i]});
      }
    }
  }
  if (own.lane < amd::kAtOnce) {
    float* const statistics = slot + kDecodeRows * head_size + 2 * row;
    statistics[0] = own.maximum[0];
    statistics[1] = own.weight[0];
  }
}

template <class M, class T, int D>
__global__ void __launch_bounds__(kThreads, D <= 128 ? 2 : 1)  // waves that share a SIMD
    amd_decode_kernel(const AttentionArgs a, const AttentionShare share) {
  using S = DecodeShape<M, T, D>;
  using Item = decode::Item<kPositions, S::kRows>;
  __shared__ amd::TileShared<S> shared;
  static_assert(sizeof shared <= 62 * 1024 && S::kRowBlocks == 1);
  const int group = int(a.num_heads / a.num_kv_heads), head_size = int(a.head_size);
  decode::Cut* const cuts = reinterpret_cast<decode::Cut*>(a.workspace);
  float* const slots = a.workspace + gridDim.x * kBlockFloats;

  Item item{};
  const auto count = [&](int s) { return item.open(a, group, share, s); };
  SequenceScan<kThreads> scan(int(a.num_seqs), count);
  const int most_parts = min(int(gridDim.x), ceil_div(scan.total, kMinTiles));
  const decode::Cutting cutting(scan.total, int(a.num_seqs * a.num_kv_heads), most_parts);
  int first = 0, last = 0;
  if (blockIdx.x < cutting.parts) {
    first = cutting.first(blockIdx.x);
    last = cutting.first(blockIdx.x + 1);
    decode::find_item(scan, count, first, item);
  }

  decode::Cut cut{};
  const Scores score(a);
#pragma unroll 1
  for (int at = first; at < last; at = item.end) {
    if (at >= item.end) item.advance(a, group, share);
    const int first_row = item.row_tile * S::kRows, end = min(item.end, last);
    const RowTile rows{.sequence = item.sequence,
                       .index = item.index,
                       .kv_head = item.kv_head,
                       .group = group,
                       .first_row = first_row,
                       .num_rows = min(item.sequence.num_queries * group - first_row, S::kRows)};
    const bool begins = item.start >= first, ends = item.end <= last;
    if constexpr (M::kExists) {
      amd::TileRows<S> own;
      const int base = (item.first_tile - item.start) * kPositions;
      amd::attend<S>(a, rows, base + at * kPositions, base + end * kPositions, score, own, shared);
      if (own.split == 0 && begins && ends) {
        amd::write_out<S>(a, rows, own);
      } else if (own.split == 0) {
        float* const slot = slots + (2 * blockIdx.x + (begins ? 1 : 0)) * decode::slot_floats(head_size);
        write_slot<S>(slot, head_size, rows.num_rows, own);
      }
      if (begins && !ends) {
        cut = {cutting.part_of(item.end - 1) - int(blockIdx.x) + 1, item.sequence.first_row, item.kv_head,
               first_row, rows.num_rows};
      }
    } else if (begins) {  // the whole of it
      for (int row = 0; row < rows.num_rows; ++row) {
        attend_portable<T, T>(a, shared.portable, item.index, item.sequence, rows.query(row), rows.head(row));
      }
    }
  }
  if (gridDim.x > 1 && threadIdx.x == 0) cuts[blockIdx.x] = cut;
}

template <class M, class T, int D>
int start(const AttentionArgs& a, AttentionShare share, cudaStream_t stream) {
  const int64_t most = kBlocksAtOnce * device_properties().multiprocessors;
  const int64_t blocks =
      std::max<int64_t>(1, std::min(most, a.workspace_size / floats_of_block(a.head_size)));
  amd_decode_kernel<M, T, D><<<unsigned(blocks), kThreads, 0, stream>>>(a, share);
  if (const int error = launch_result()) return error;
  if (blocks == 1) return 0;
  decode::merge_kernel<T, 0><<<unsigned(blocks), decode::kMergeThreads, 0, stream>>>(a);
  return launch_result();
}

}  // namespace

#ifdef PELTON_ROCM
int64_t attention_workspace_size(int64_t head_size) {
  return kBlocksAtOnce * device_properties().multiprocessors * floats_of_block(head_size);
}
#endif

int attention_decode_amd(const AttentionArgs& a, AttentionShare share, void* stream) {
  return amd::start_for(a, [&](auto matrix, auto element, auto head) {
    return start<decltype(matrix), decltype(element), decltype(head)::value>(a, share, cudaStream_t(stream));
  });
}

}  // namespace pelton::gpu
