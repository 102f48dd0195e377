// Prefill attention for sm_90a: what it takes, and head size 128. The kernel is sm90.cuh's.
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
  switch (args.head_size) {
    case 64:
      return sm90::launch_64(args, share, on);
    case 96:
      return sm90::launch_96(args, share, on);
    case 128:
      return sm90::launch_of<sm90::Config<128, 2, 128, 2, false>>(args, share, on);
    case 192:
      return sm90::launch_192(args, share, on);
    case 256:
      return sm90::launch_256(args, share, on);
  }
  return int(cudaErrorInvalidValue);
}

}  // namespace pelton::gpu
