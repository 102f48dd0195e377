// Boundary between device code (no torch) and the operators (no device code).
#pragma once
#include "../product.h"

namespace pelton {

struct GptqShuffleArgs {
  int32_t* out;           // [rows / (32 / bits), columns]
  const int32_t* weight;  // [source_rows / (32 / bits), columns]
  const int32_t* order;   // [rows]: the row of `weight`; zeros where it is out of range
  int64_t columns, rows, source_rows;
  int bits;
};

// Launchers return the runtime's error, 0 for none.
namespace gpu {
int gptq_gemm(const QuantProductArgs& args, void* stream);
int gptq_dequantize(const DequantizeArgs& args, void* stream);
int gptq_shuffle(const GptqShuffleArgs& args, void* stream);

namespace gptq {
int product_4(const QuantProductArgs& args, void* stream);
int product_8(const QuantProductArgs& args, void* stream);
int dequantize_4(const DequantizeArgs& args, void* stream);
int dequantize_8(const DequantizeArgs& args, void* stream);
}  // namespace gptq
}  // namespace gpu

}  // namespace pelton
