// Products with weights of 8 bits, f16. gemm.cuh has the kernel.
#include "gemm.cuh"

namespace pelton::gpu::marlin {

int gemm_f16_8(const MarlinGemmArgs& a, cudaStream_t stream) { return gemm<f16, 8>(a, stream); }

}  // namespace pelton::gpu::marlin
