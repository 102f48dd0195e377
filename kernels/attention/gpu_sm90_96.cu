// Prefill attention for sm_90a, head size 96.
#include "sm90.cuh"

namespace pelton::gpu::sm90 {

int launch_96(const AttentionArgs& args, AttentionShare share, cudaStream_t stream) {
  return launch_of<Config<96, 2, 128, 2, false>>(args, share, stream);
}

}  // namespace pelton::gpu::sm90
