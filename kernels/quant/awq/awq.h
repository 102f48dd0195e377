// Boundary between device code (no torch) and the operators (no device code).
#pragma once
#include "../product.h"

namespace pelton {

// Launchers return the runtime's error, 0 for none.
namespace gpu {
int awq_gemm(const QuantProductArgs& args, void* stream);
int awq_dequantize(const DequantizeArgs& args, void* stream);
}  // namespace gpu

}  // namespace pelton
