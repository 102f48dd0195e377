// Attention of few queries a sequence: the choice of the dtype, and bf16. decode.cuh has the kernels.
#include "decode.cuh"

namespace pelton::gpu {

int attention_decode_f16(const AttentionArgs& a, AttentionShare share, void* stream);

int64_t attention_workspace_size(int64_t head_size) {
  return device_properties().multiprocessors *
         int64_t(sizeof(decode::Cut) / 4 + 2 * decode::slot_floats(int(head_size)));
}

int attention_decode(const AttentionArgs& a, AttentionShare share, void* stream) {
  return a.dtype == DType::f16 ? attention_decode_f16(a, share, stream)
                               : decode::start_head<bf16>(a, share, cudaStream_t(stream));
}

}  // namespace pelton::gpu
