// Prefill attention for sm_90a, head size 64.
#include "sm90.cuh"

namespace pelton::gpu::sm90 {

int launch_64(const AttentionArgs& args, AttentionShare share, cudaStream_t stream) {
  // Smaller tiles fill the multiprocessors better when there are few.
  using Small = Config<64, 2, 128, 2, true>;
  using Large = Config<64, 3, 128, 2, true>;
  const int64_t rows = args.num_tokens * args.num_heads;
  if (args.soft_cap == 0 && rows < 2 * device_properties().multiprocessors * Large::kRows) {
    return args.dtype == DType::f16 ? launch<Small, f16, false>(args, share, stream)
                                    : launch<Small, bf16, false>(args, share, stream);
  }
  return launch_of<Large>(args, share, stream);
}

}  // namespace pelton::gpu::sm90
