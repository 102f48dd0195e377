// Prefill attention for sm_90a, head size 256.
#include "sm90.cuh"

namespace pelton::gpu::sm90 {

int launch_256(const AttentionArgs& args, AttentionShare share, cudaStream_t stream) {
  return launch_of<Config<256, 2, 80, 2, true>>(args, share, stream);
}

}  // namespace pelton::gpu::sm90
