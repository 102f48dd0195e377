// Prefill attention for sm_90a: which tiles for which sizes. The kernel is sm90.cuh's.
#include "sm90.cuh"

namespace pelton::gpu {

bool attention_sm90_fits(const AttentionArgs& a) {
  constexpr int64_t kMaxLength = 1 << 24;  // of what the kernel's divisions are exact for
  const auto aligned = [](int64_t stride) { return stride > 0 && stride % 8 == 0; };  // 16 bytes
  const bool head_size = a.head_size == 64 || a.head_size == 96 || a.head_size == 128 || a.head_size == 192 ||
                         a.head_size == 256;
  return a.dtype == a.cache_dtype && a.dtype != DType::f32 && head_size && a.block_size % 8 == 0 &&
         a.scale > 0 && a.num_tokens < kMaxLength && a.max_blocks * a.block_size < kMaxLength &&
         is_aligned16(a.query) && is_aligned16(a.out) && is_aligned16(a.key_cache) &&
         is_aligned16(a.value_cache) && aligned(a.query_token_stride) && aligned(a.query_head_stride) &&
         aligned(a.out_token_stride) && aligned(a.out_head_stride);
}

int attention_prefill_sm90(const AttentionArgs& args, AttentionShare share, void* stream) {
  const auto on = cudaStream_t(stream);
  if (args.head_size == 128) return sm90::launch_of<sm90::Config<128, 2, 128, 2, false>>(args, share, on);
  if (args.head_size == 64) return sm90::launch_64(args, share, on);
  return sm90::launch_wide(args, share, on);
}

}  // namespace pelton::gpu
