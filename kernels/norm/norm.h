// Boundary between device code (no torch) and the operators (no device code).
#pragma once
#include <cstdint>

#include "../common/dtype.h"
#include "../common/rows.h"

namespace pelton {

struct RmsNormArgs {
  void* out;           // [rows, width]
  const void* x;       // [rows, width]
  const void* weight;  // [width]
  int64_t width;
  RowLayout x_rows, out_rows;
  float eps;
  DType dtype;
};

struct FusedAddRmsNormArgs {
  void* x;             // [rows, width], row stride x_stride: input, then the normalized sum
  void* residual;      // [rows, width], row stride residual_stride: becomes x + residual
  const void* weight;  // [width]
  int64_t width, x_stride, residual_stride;
  float eps;
  DType dtype;
};

namespace cpu {
void rms_norm(const RmsNormArgs& args, int64_t first_row, int64_t last_row);
void fused_add_rms_norm(const FusedAddRmsNormArgs& args, int64_t first_row, int64_t last_row);
}  // namespace cpu

// GPU launchers return the runtime's error, 0 for none.
namespace gpu {
int rms_norm(const RmsNormArgs& args, int64_t rows, void* stream);
int fused_add_rms_norm(const FusedAddRmsNormArgs& args, int64_t rows, void* stream);
}  // namespace gpu

}  // namespace pelton
