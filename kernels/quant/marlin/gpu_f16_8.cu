// Products with weights of 8 bits, f16. narrow.cuh and gemm.cuh have the kernels.
#include "product.cuh"

namespace pelton::gpu::marlin {

int product_f16_8(const MarlinGemmArgs& a, cudaStream_t stream) { return product<f16, 8>(a, stream); }

}  // namespace pelton::gpu::marlin
