// What the attention kernels read of a batch. All values come from tensors that the host cannot check: what
// is out of range is left out.
#pragma once
#include "../common/gpu.cuh"
#include "attention.h"

namespace pelton::gpu {

constexpr int kMaxHeadSize = 256;
constexpr float kLog2e = 1.4426950408889634f;

// A sequence's queries are rows first_row ... of `query`, the last of them at position length - 1.
struct Sequence {
  int first_row, num_queries, length;

  // Position of query i.
  __device__ int position(int i) const { return length - num_queries + i; }
};

// Sequence `index`; without queries when there is nothing to do, or when its values make no sense.
__device__ __forceinline__ Sequence sequence_of(const AttentionArgs& a, int64_t index) {
  const int first = a.query_start_loc[index], last = a.query_start_loc[index + 1], length = a.seq_lens[index];
  const bool good = first >= 0 && last > first && last <= int(a.num_tokens) && last - first <= length &&
                    length <= a.max_blocks * a.block_size;
  return good ? Sequence{first, last - first, length} : Sequence{};
}

// The first position that a query at `position` sees.
__device__ __forceinline__ int first_visible(const AttentionArgs& a, int position) {
  const int window = int(a.sliding_window);
  return window > 0 && position >= window ? position - window + 1 : 0;
}

// Tiles of `rows` rows (queries x heads of the group) of a sequence that are the prefill kernel's.
__device__ __forceinline__ int prefill_tiles(const AttentionArgs& a, AttentionShare share, int group,
                                             int rows, int s) {
  const Sequence sequence = sequence_of(a, s);
  if (sequence.num_queries == 0) return 0;
  if (share == AttentionShare::prefill && attention_decodes(sequence.num_queries, group)) return 0;
  return ceil_div(sequence.num_queries * group, rows);
}

// The rows of a tile: queries x heads of the group.
struct RowTile {
  Sequence sequence;
  int index, kv_head, group, first_row, num_rows;

  __device__ int query(int row) const {
    const int q = (first_row + row) / group;
    return q < sequence.num_queries ? q : sequence.num_queries - 1;
  }
  __device__ int head(int row) const { return kv_head * group + (first_row + row) % group; }
  __device__ int position(int row) const { return sequence.position(query(row)); }
};

// Finds where in the batch a piece of work lies, when sequence s is count(s) pieces on one line. All threads
// of a block count together.
template <int Threads>
struct SequenceScan {
  int from, to, start, own = 0, total = 0;  // this thread's sequences, and where their pieces lie on the line

  template <class Count>
  __device__ SequenceScan(int num_seqs, const Count& count) {
    __shared__ int sums[Threads / kWarp];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int each = ceil_div(num_seqs, Threads);
    from = threadIdx.x * each;
    to = from + each < num_seqs ? from + each : num_seqs;
#pragma unroll 1
    for (int s = from; s < to; ++s) own += count(s);
    int up_to = own;  // of this warp's lanes up to this one
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int before = shuffle(up_to, lane >= distance ? lane - distance : lane);
      if (lane >= distance) up_to += before;
    }
    if (lane == kWarp - 1) sums[warp] = up_to;
    __syncthreads();
    start = up_to - own;
    for (int w = 0; w < Threads / kWarp; ++w) {
      if (w < warp) start += sums[w];
      total += sums[w];
    }
  }

  // Calls found(sequence, where it begins) in the thread that has counted the sequence of the piece at
  // `position` (less than total, the same in all threads) last.
  template <class Count, class Found>
  __device__ void find(int position, const Count& count, const Found& found) {
    if (position >= start && position < start + own) {
      int at = start;
#pragma unroll 1
      for (int s = from; s < to; ++s) {
        const int pieces = to - from == 1 ? own : count(s);
        if (position < at + pieces) {
          found(s, at);
          break;
        }
        at += pieces;
      }
    }
    __syncthreads();
  }

  // The sequence itself and where it begins, in all threads.
  template <class Count>
  __device__ void find(int position, const Count& count, int& sequence, int& begin) {
    __shared__ int found[2];
    find(position, count, [&](int s, int at) {
      found[0] = s;
      found[1] = at;
    });
    sequence = found[0];
    begin = found[1];
  }
};

}  // namespace pelton::gpu
