// Attention over the paged cache: the choice of a kernel, and the one that fits everything.
#include "../common/gpu.cuh"
#include "attention.h"
#include "portable.cuh"

namespace pelton::gpu {
namespace {

// One block a query and head. The sequence of a row is found by bisection of query_start_loc.
template <class Q, class C>
__global__ void __launch_bounds__(kPortableThreads) portable_kernel(const AttentionArgs a) {
  __shared__ PortableShared<> shared;
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

// What all kernels with matrix instructions want.
static bool attention_matrix_fits(const AttentionArgs& a) {
  const auto pairs = [](const void* p, int64_t token_stride, int64_t head_stride) {
    return address(p) % 4 == 0 && token_stride % 2 == 0 && head_stride % 2 == 0;
  };
  // The decode kernels count tiles of 16 positions in 32 bits.
  const double tiles =
      double(a.num_seqs) * double(a.max_blocks * a.block_size / 16 + 1) * double(a.num_heads);
  return a.dtype != DType::f32 && a.cache_dtype == a.dtype && a.head_size % 8 == 0 &&
         is_aligned16(a.key_cache) && is_aligned16(a.value_cache) && is_aligned16(a.workspace) &&
         tiles < 0x3fffffff && a.num_blocks <= 0x7fffffff &&
         pairs(a.query, a.query_token_stride, a.query_head_stride) &&
         pairs(a.out, a.out_token_stride, a.out_head_stride);
}

static int start_prefill(const AttentionArgs& a, AttentionShare share, void* stream) {
#if defined(PELTON_ROCM)
  return attention_prefill_amd(a, share, stream);
#else
#ifdef PELTON_EMULATION
  if (emulation::wanted_wave() != 0) return attention_prefill_amd(a, share, stream);
#endif
#ifdef PELTON_HAS_SM90
  if (device_properties().compute_capability == 90 && attention_sm90_fits(a)) {
    return attention_prefill_sm90(a, share, stream);
  }
#endif
  return attention_prefill(a, share, stream);
#endif
}
static int start_decode(const AttentionArgs& a, AttentionShare share, void* stream) {
#if defined(PELTON_ROCM)
  return attention_decode_amd(a, share, stream);
#else
#ifdef PELTON_EMULATION
  if (emulation::wanted_wave() != 0) return attention_decode_amd(a, share, stream);
#endif
  return attention_decode(a, share, stream);
#endif
}

int attention(const AttentionArgs& a, void* stream) {
  if (a.num_tokens == 0 || a.num_seqs == 0 || a.num_heads == 0 || a.max_blocks == 0 || a.num_blocks == 0)
    return 0;
  if (!attention_matrix_fits(a)) return attention_portable(a, stream);
  if (a.num_tokens <= a.num_seqs) return start_decode(a, AttentionShare::all, stream);
  // One sequence of many queries is nothing for the decode kernel.
  const bool both = a.num_seqs > 1 || attention_decodes(a.num_tokens, a.num_heads / a.num_kv_heads);
  const AttentionShare share = both ? AttentionShare::prefill : AttentionShare::all;
  if (const int error = start_prefill(a, share, stream)) return error;
  return both ? start_decode(a, AttentionShare::decode, stream) : 0;
}

}  // namespace pelton::gpu
