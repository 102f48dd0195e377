// Boundary between device code (no torch) and the operators (no device code).
#pragma once
#include <cstdint>

#include "../common/dtype.h"

namespace pelton {

// One of query and key: [tokens, heads, head size], strides in elements.
struct RotaryHeads {
  void* data;
  int64_t heads, token_stride, head_stride;
};

struct RotaryArgs {
  RotaryHeads query, key;
  const int64_t* positions;    // [tokens]
  const float* cos_sin_cache;  // [max position, rotary_dim]: cosines, then sines
  int64_t rotary_dim, head_size, max_position;
  bool interleaved;
  DType dtype;
};

namespace cpu {
void rotary_embedding(const RotaryArgs& args, int64_t first_token, int64_t last_token);
}  // namespace cpu

// GPU launchers return the runtime's error, 0 for none. A token whose position is not in the table stays as
// it is.
namespace gpu {
int rotary_embedding(const RotaryArgs& args, int64_t tokens, void* stream);
}  // namespace gpu

}  // namespace pelton
