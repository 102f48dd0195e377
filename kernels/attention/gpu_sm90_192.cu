// Prefill attention for sm_90a, head size 192.
#include "sm90.cuh"

namespace pelton::gpu::sm90 {

int launch_192(const AttentionArgs& args, AttentionShare share, cudaStream_t stream) {
  return launch_of<Config<192, 2, 96, 2, true>>(args, share, stream);
}

}  // namespace pelton::gpu::sm90
