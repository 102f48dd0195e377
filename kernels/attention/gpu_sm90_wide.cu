// Prefill attention for sm_90a, head sizes 96, 192 and 256.
#include "sm90.cuh"

namespace pelton::gpu::sm90 {

int launch_wide(const AttentionArgs& args, AttentionShare share, cudaStream_t stream) {
  if (args.head_size == 96) return launch_of<Config<96, 2, 128, 2, false>>(args, share, stream);
  if (args.head_size == 192) return launch_of<Config<192, 2, 96, 2, true>>(args, share, stream);
  return launch_of<Config<256, 2, 80, 2, true>>(args, share, stream);
}

}  // namespace pelton::gpu::sm90
