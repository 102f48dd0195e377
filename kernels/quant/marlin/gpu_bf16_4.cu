// Products with weights of 4 bits, bf16. narrow.cuh and gemm.cuh have the kernels.
#include "product.cuh"

namespace pelton::gpu::marlin {

int product_bf16_4(const MarlinGemmArgs& a, cudaStream_t stream) { return product<bf16, 4>(a, stream); }

}  // namespace pelton::gpu::marlin
