// Products with weights in AWQ's layout, and that layout as numbers; see ../product.cuh.
// Method: Lin et al., "AWQ: Activation-aware Weight Quantization", 2023.
#include "../product.cuh"
#include "awq.h"

namespace pelton::gpu {

int awq_gemm(const QuantProductArgs& a, void* stream) { return run_product<Awq>(a, stream); }
int awq_dequantize(const DequantizeArgs& a, void* stream) { return run_dequantize<Awq>(a, stream); }

}  // namespace pelton::gpu
