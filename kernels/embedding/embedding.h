// Boundary between device code (no torch) and the operators (no device code).
#pragma once
#include <cstdint>

namespace pelton {

// Sizes and strides in bytes: an embedding moves rows and does not look into them.
struct EmbeddingArgs {
  void* out;           // [tokens] rows, out_stride apart
  const int64_t* ids;  // [tokens]
  const void* weight;  // [vocabulary] rows, weight_stride apart
  int64_t row_bytes, out_stride, weight_stride, vocabulary;
};

namespace cpu {
void embedding(const EmbeddingArgs& args, int64_t first_token, int64_t last_token);
}  // namespace cpu

// GPU launchers return the runtime's error, 0 for none.
namespace gpu {
int embedding(const EmbeddingArgs& args, int64_t tokens, void* stream);
}  // namespace gpu

}  // namespace pelton
