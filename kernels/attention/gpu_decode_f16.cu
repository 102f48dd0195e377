// Attention of few queries a sequence in fp16. decode.cuh has the kernels; apart, so that both compile at
// once.
#include "decode.cuh"

namespace pelton::gpu {

int attention_decode_f16(const AttentionArgs& a, AttentionShare share, void* stream) {
  return decode::start_head<f16>(a, share, cudaStream_t(stream));
}

}  // namespace pelton::gpu
