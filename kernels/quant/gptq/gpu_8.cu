// Products with weights of 8 bits in GPTQ's layout, and that layout as numbers. See ../product.cuh.
#include "../product.cuh"
#include "gptq.h"

namespace pelton::gpu::gptq {

int product_8(const QuantProductArgs& a, void* stream) { return run_product<Gptq<8>>(a, stream); }

int dequantize_8(const DequantizeArgs& a, void* stream) { return run_dequantize<Gptq<8>>(a, stream); }

}  // namespace pelton::gpu::gptq
