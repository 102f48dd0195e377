// Boundary between device code (no torch) and the operators (no device code).
#pragma once
#include <cstdint>

#include "../common/dtype.h"

namespace pelton {

enum class Activation : int { silu, gelu_erf, gelu_tanh };

struct GatedActivationArgs {
  void* out;      // [rows, width], row stride out_stride
  const void* x;  // [rows, 2 * width], row stride x_stride: gate, then up
  int64_t width, x_stride, out_stride;
  Activation activation;
  DType dtype;
};

namespace cpu {
// Elements [first, last) of the output, counted along its rows.
void activation_and_mul(const GatedActivationArgs& args, int64_t first, int64_t last);
}  // namespace cpu

// GPU launchers return the runtime's error, 0 for none.
namespace gpu {
int activation_and_mul(const GatedActivationArgs& args, int64_t rows, void* stream);
}  // namespace gpu

}  // namespace pelton
