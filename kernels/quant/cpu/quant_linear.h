// Boundary between device code (no torch) and the operators (no device code).
//
// Weights of `bits` bits lie in panels of P outputs, cut into blocks of 32 inputs, in the order in which
// registers take them. A step of a block is one vector for each W = Vec::width outputs, four bytes for each
// of them: 4 bits: inputs k .. k + 3 in the low halves, k + 4 .. k + 7 in the high ones; 8 bits: inputs
// k .. k + 3. So four bytes are what the dot product instructions multiply with four bytes of x.
//   weight  uint8 [panels][blocks][32 * bits / (8 * 4 * 8 / bits) steps][P / W][W][4]
//   scales, zeros [panels][groups][P]
// A group has `group_blocks` blocks, the last one may have fewer.
#pragma once
#include <cstdint>

#include "../../common/dtype.h"

namespace pelton {

inline constexpr int64_t kQuantBlock = 32;

struct QuantLinearArgs {
  void* out;      // [rows, out_features], row stride out_stride
  const void* x;  // [rows, in_features], row stride x_stride
  const uint8_t* weight;
  const void* scales;
  const uint8_t* zeros;  // or null: 2^(bits - 1)
  const int32_t* order;  // [32 * blocks]: which of x each input of the weight is, -1 for none; or null
  const void* bias;      // [out_features] or null
  int64_t rows, in_features, out_features, x_stride, out_stride;
  int64_t blocks, groups, group_blocks;
  DType dtype, scale_dtype, bias_dtype;
  int bits;
  bool int8;  // x in int8, a scale for each block; otherwise in fp32
};

// A grid of tasks: blocks of rows times blocks of panels, each block as even as can be.
struct QuantLinearPlan {
  int64_t panels, row_blocks, panel_blocks;
  int64_t tasks() const { return row_blocks * panel_blocks; }
};

struct QuantPackArgs {
  uint8_t* packed;
  const uint8_t* q;      // [out_features, in_features], any strides
  const int32_t* order;  // or null
  int64_t in_features, out_features, row_stride, column_stride, blocks;
  int bits;
};

namespace cpu {
int64_t quant_panel_width();
// Whether this CPU has the dot product instructions of its level (AVX512-VNNI, AVX-VNNI), and they are used.
bool quant_uses_vnni();
// Allows them, or not, for tests; they are not used where the CPU lacks them.
void quant_allow_vnni(bool allow);

QuantLinearPlan plan_quant_linear(const QuantLinearArgs& args, int64_t threads);
// `call` is another number for each call, so that a thread converts rows of x once for all of its tasks.
void quant_linear(const QuantLinearArgs& args, const QuantLinearPlan& plan, int64_t task, uint64_t call);
void pack_quant_weight(const QuantPackArgs& args, int64_t first_panel, int64_t last_panel);
}  // namespace cpu

}  // namespace pelton
