// Products with weights of 4 bits, bf16. gemm.cuh has the kernel.
#include "gemm.cuh"

namespace pelton::gpu::marlin {

int gemm_bf16_4(const MarlinGemmArgs& a, cudaStream_t stream) { return gemm<bf16, 4>(a, stream); }

}  // namespace pelton::gpu::marlin
