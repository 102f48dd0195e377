// Boundary between device code (no torch) and the operators (no device code).
#pragma once
#include <cstdint>

namespace pelton {

// Sizes and strides in bytes: an embedding moves rows and does not look into them.
struct EmbeddingArgs {
  void* out;           // [tokens] rows, out_stride apart
  const int64_t* ids;  // [tokens]
  const void* weight;  // [vocabulary] rows, weight_stride apart
  int64_t row_bytes, out_stride, weight_stride;
};

namespace cpu {
void embedding(const EmbeddingArgs& args, int64_t first_token, int64_t last_token);
}  // namespace cpu

}  // namespace pelton
