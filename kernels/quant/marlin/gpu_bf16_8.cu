// Products with weights of 8 bits, bf16. narrow.cuh and gemm.cuh have the kernels.
#include "product.cuh"

namespace pelton::gpu::marlin {

int product_bf16_8(const MarlinGemmArgs& a, cudaStream_t stream) { return product<bf16, 8>(a, stream); }

}  // namespace pelton::gpu::marlin
