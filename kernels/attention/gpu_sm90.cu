// Prefill attention for sm_90a: which tiles for which sizes. The kernel is sm90.cuh's.
#include "sm90.cuh"

namespace pelton::gpu {

bool attention_sm90_fits(const AttentionArgs& a) {
  const auto aligned = [](int64_t stride) { return stride % 8 == 0; };  // 16 bytes
  return a.dtype == a.cache_dtype && a.dtype != DType::f32 && (a.head_size == 64 || a.head_size == 128) &&
         a.block_size % 8 == 0 && a.scale > 0 && is_aligned16(a.query) && is_aligned16(a.out) &&
         is_aligned16(a.key_cache) && is_aligned16(a.value_cache) && aligned(a.query_token_stride) &&
         aligned(a.query_head_stride) && aligned(a.out_token_stride) && aligned(a.out_head_stride);
}

int attention_prefill_sm90(const AttentionArgs& args, AttentionShare share, void* stream) {
  int error = 0;
  dispatch(args.dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (sizeof(T) == 2) {
      const auto launch = [&](auto config) {
        using C = decltype(config);
        error = args.soft_cap > 0 ? sm90::launch<C, T, true>(args, share, cudaStream_t(stream))
                                  : sm90::launch<C, T, false>(args, share, cudaStream_t(stream));
      };
      if (args.head_size == 64) {
        launch(sm90::Config<64, 3, 128, 2, true>{});
      } else {
        launch(sm90::Config<128, 2, 128, 2, true>{});
      }
    }
  });
  return error;
}

}  // namespace pelton::gpu
