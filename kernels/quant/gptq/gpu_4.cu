// Products with weights of 4 bits in GPTQ's layout, and that layout as numbers. See ../product.cuh.
#include "../product.cuh"
#include "gptq.h"

namespace pelton::gpu::gptq {

int product_4(const QuantProductArgs& a, void* stream) { return run_product<Gptq<4>>(a, stream); }

int dequantize_4(const DequantizeArgs& a, void* stream) { return run_dequantize<Gptq<4>>(a, stream); }

}  // namespace pelton::gpu::gptq
