// Boundary between device code (no torch) and the operators (no device code).
#pragma once
#include <cstdint>

#include "../common/dtype.h"

namespace pelton {

struct LinearArgs {
  void* out;           // [rows, out_features], row stride out_stride
  const void* x;       // [rows, in_features], row stride x_stride
  const void* weight;  // [panels, in_features, panel width]
  const void* bias;    // [out_features] or null
  int64_t rows, in_features, out_features, x_stride, out_stride;
  DType dtype, weight_dtype, bias_dtype;
};

// A grid of tasks: blocks of rows times blocks of panels, each block as even as can be.
struct LinearPlan {
  int64_t panels, row_blocks, panel_blocks;
  int64_t tasks() const { return row_blocks * panel_blocks; }
};

struct PackArgs {
  void* packed;        // [panels, in_features, panel width]
  const void* weight;  // [out_features, in_features], row stride weight_stride
  int64_t in_features, out_features, weight_stride;
  DType dtype;
};

namespace cpu {
int64_t linear_panel_width();
// Whether AMX is used, which the CPU, the system and the library's level decide; and whether it may be, for
// tests.
bool uses_amx();
void allow_amx(bool allow);
LinearPlan plan_linear(const LinearArgs& args, int64_t threads);
void linear(const LinearArgs& args, const LinearPlan& plan, int64_t task);
void pack_linear_weight(const PackArgs& args, int64_t first_panel, int64_t last_panel);
}  // namespace cpu

}  // namespace pelton
