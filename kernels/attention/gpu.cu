// Attention over the paged cache: the choice of a kernel, and the one that fits everything.
#include "../common/gpu.cuh"
#include "attention.h"
#include "portable.cuh"

namespace pelton::gpu {
namespace {

// One block a query and head. The sequence of a row is found by bisection of query_start_loc.
template <class Q, class C>
__global__ void __launch_bounds__(kPortableThreads) portable_kernel(const AttentionArgs a) {
  __shared__ PortableShared shared;
  const int64_t row = blockIdx.x;
  int64_t low = 0, high = a.num_seqs;  // the last sequence that begins at `row` or before lies in [low, high)
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (a.query_start_loc[middle] <= row ? low : high) = middle;
  }
  const Sequence sequence = sequence_of(a, low);
  const int64_t query = row - sequence.first_row;
  if (query < 0 || query >= sequence.num_queries) return;
  attend_portable<Q, C>(a, shared, low, sequence, int(query), int(blockIdx.y));
}

}  // namespace

int attention_portable(const AttentionArgs& args, void* stream) {
  const dim3 grid(unsigned(args.num_tokens), unsigned(args.num_heads));
  dispatch(args.dtype, [&](auto q) {
    dispatch(args.cache_dtype, [&](auto c) {
      portable_kernel<decltype(q), decltype(c)><<<grid, kPortableThreads, 0, cudaStream_t(stream)>>>(args);
    });
  });
  return launch_result();
}

int64_t attention_workspace_size(int64_t num_heads, int64_t head_size) { return 0; }

int attention(const AttentionArgs& args, void* stream) {
  if (args.num_tokens == 0 || args.num_seqs == 0 || args.num_heads == 0) return 0;
  return attention_portable(args, stream);
}

}  // namespace pelton::gpu
