// A product with weights that are still as a checkpoint has them, in 4 or 8 bits. Boundary between device
// code (no torch) and the operators (no device code).
#pragma once
#include <cstdint>

#include "../common/dtype.h"

namespace pelton {

// out[t, n] = sum over k of x[t, input(k)] * (q[k, n] - zero[g, n]) * scale[g, n] + bias[n], where g is
// group(k).
struct QuantProductArgs {
  void* out;              // [tokens, columns], row stride out_stride
  const void* x;          // [tokens, inputs], row stride x_stride
  const int32_t* weight;  // gptq: [rows / (32 / bits), columns]; awq: [rows, columns / 8]
  const int32_t* zeros;   // [groups, columns / (32 / bits)]; null: 2^(bits - 1)
  const void* scales;     // [groups, columns], fp16 or bf16
  const void* bias;       // [columns] of dtype; null: none
  const int32_t* order;   // [rows]: input(k), none when it is out of range; null: k
  const int32_t* g_idx;   // [rows]: group(k), a row out of range counts as zeros; null: k / group_size
  int64_t tokens, columns, rows, inputs, groups, group_size;
  int64_t x_stride, out_stride;
  int bits;
  bool bf16_scales;
  DType dtype;
};

// out[input(k), n] = (q[k, n] - zero[g, n]) * scale[g, n], with the members of QuantProductArgs that it
// needs.
struct DequantizeArgs {
  void* out;  // [inputs, columns]
  const int32_t *weight, *zeros;
  const void* scales;
  const int32_t *order, *g_idx;
  int64_t columns, rows, inputs, groups, group_size;
  int bits;
  bool bf16_scales;
  DType dtype;
};

}  // namespace pelton
