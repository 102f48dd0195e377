// Attention of one query head over the paged cache, for any dtype, head size and alignment.
// A block's warps take chunks of 32 positions in turn, one position a lane for the scores, then one element
// of the head a lane for the values; what the warps found is put together at the end. Method: online softmax,
// Milakov and Gimelshein, 2018.
#pragma once
#include "batch.cuh"

namespace pelton::gpu {

constexpr int kPortableWarps = 4, kPortableThreads = kPortableWarps * kWarp;

template <class Q, class C>
__device__ __forceinline__ float dot(const float* q, const C* k, int head_size, bool vectors) {
  float sum = 0;
  if (vectors) {
    constexpr int kWidth = kVectorWidth<C>;
    for (int d = 0; d < head_size; d += kWidth) {
      const auto part = load_vector<C>(k + d);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum += q[d + i] * to_float(part[i]);
    }
  } else {
    for (int d = 0; d < head_size; ++d) sum += q[d] * to_float(k[d]);
  }
  return sum;
}

template <int Warps = kPortableWarps>
struct PortableShared {
  float q[kMaxHeadSize];
  float sums[Warps][kMaxHeadSize], maximum[Warps], weight[Warps];
};

// Row `row` of the batch, the `query`-th of `sequence`, for one head; all threads of a block together.
template <class Q, class C, int Warps>
__device__ void attend_portable(const AttentionArgs& a, PortableShared<Warps>& shared, int64_t sequence_index,
                                const Sequence& sequence, int query, int head) {
  constexpr int kThreads = Warps * kWarp;
  constexpr int kElements = kMaxHeadSize / kWarp;  // of the head, a lane
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, head_size = int(a.head_size);
  const int64_t row = sequence.first_row + query;
  const Q* q = static_cast<const Q*>(a.query) + row * a.query_token_stride + head * a.query_head_stride;
  __syncthreads();  // an earlier row may still be read
  for (int d = threadIdx.x; d < head_size; d += kThreads) shared.q[d] = to_float(q[d]) * a.scale;
  __syncthreads();

  const C* keys = static_cast<const C*>(a.key_cache);
  const C* values = static_cast<const C*>(a.value_cache);
  const int32_t* table = a.block_tables + sequence_index * a.block_table_stride;
  const int64_t kv_head = head / (a.num_heads / a.num_kv_heads);
  const bool vectors = head_size * sizeof(C) % 16 == 0 && reinterpret_cast<uintptr_t>(keys) % 16 == 0;
  const int last = sequence.position(query), first = first_visible(a, last);
  float maximum = -INFINITY, weight = 0, sums[kElements] = {};
  for (int chunk = first + warp * kWarp; chunk <= last; chunk += kThreads) {
    const int position = chunk + lane;
    int64_t offset = -1;  // of this lane's position in the caches; negative: not visible
    if (position <= last) {
      const int64_t block = table[position / a.block_size];
      if (block >= 0 && block < a.num_blocks) {
        offset = ((block * a.num_kv_heads + kv_head) * a.block_size + position % a.block_size) * head_size;
      }
    }
    float score = -INFINITY;
    if (offset >= 0) {
      score = dot<Q>(shared.q, keys + offset, head_size, vectors);
      if (a.soft_cap > 0) score = a.soft_cap * tanhf(score / a.soft_cap);
    }
    const float new_maximum = fmaxf(maximum, warp_max(score));
    const float keep = maximum == new_maximum ? 1 : expf(maximum - new_maximum);
    const float p = offset >= 0 ? expf(score - new_maximum) : 0;
    maximum = new_maximum;
    weight = weight * keep + p;
#pragma unroll
    for (int e = 0; e < kElements; ++e) sums[e] *= keep;
    for (int i = 0; i < kWarp; ++i) {
      const float p_i = shuffle(p, i);
      const int64_t offset_i = shuffle(offset, i);
      if (offset_i < 0) continue;
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const int d = e * kWarp + lane;
        if (d < head_size) sums[e] += p_i * to_float(values[offset_i + d]);
      }
    }
  }

  weight = warp_sum(weight);
  if (lane == 0) {
    shared.maximum[warp] = maximum;
    shared.weight[warp] = weight;
  }
#pragma unroll
  for (int e = 0; e < kElements; ++e) shared.sums[warp][e * kWarp + lane] = sums[e];
  __syncthreads();
  float total_maximum = -INFINITY, total_weight = 0;
  for (int w = 0; w < Warps; ++w) total_maximum = fmaxf(total_maximum, shared.maximum[w]);
  float factors[Warps];
  for (int w = 0; w < Warps; ++w) {
    factors[w] = shared.maximum[w] == total_maximum ? 1 : expf(shared.maximum[w] - total_maximum);
    total_weight += shared.weight[w] * factors[w];
  }
  Q* out = static_cast<Q*>(a.out) + row * a.out_token_stride + head * a.out_head_stride;
  for (int d = threadIdx.x; d < head_size; d += kThreads) {
    float sum = 0;
    for (int w = 0; w < Warps; ++w) sum += shared.sums[w][d] * factors[w];
    out[d] = from_float<Q>(total_weight == 0 ? 0 : sum / total_weight);
  }
}

}  // namespace pelton::gpu
