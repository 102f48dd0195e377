// Products with weights of 8 bits, bf16. gemm.cuh has the kernel.
#include "gemm.cuh"

namespace pelton::gpu::marlin {

int gemm_bf16_8(const MarlinGemmArgs& a, cudaStream_t stream) { return gemm<bf16, 8>(a, stream); }

}  // namespace pelton::gpu::marlin
