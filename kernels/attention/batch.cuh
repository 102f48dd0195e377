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
  int first_row = 0, num_queries = 0, length = 0;

  // Position of query i.
  __device__ int position(int i) const { return length - num_queries + i; }
};

// Sequence `index`; without queries when there is nothing to do, or when its values make no sense.
__device__ __forceinline__ Sequence sequence_of(const AttentionArgs& a, int64_t index) {
  const int first = a.query_start_loc[index], last = a.query_start_loc[index + 1], length = a.seq_lens[index];
  const bool good = first >= 0 && last > first && last <= a.num_tokens && last - first <= length &&
                    length <= a.max_blocks * a.block_size;
  return good ? Sequence{first, last - first, length} : Sequence{};
}

// The first position that a query at `position` sees.
__device__ __forceinline__ int first_visible(const AttentionArgs& a, int position) {
  return a.sliding_window > 0 && position >= a.sliding_window ? position - int(a.sliding_window) + 1 : 0;
}

}  // namespace pelton::gpu
