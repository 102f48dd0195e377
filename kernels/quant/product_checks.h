// What the operators of both layouts check.
#pragma once
#include "../common/device.h"
#include "../common/op.h"
#include "product.h"

namespace pelton {

// Rows of x and out, of the same count and one half-precision dtype.
inline void check_product(const char* op, const Tensor& out, const Tensor& x,
                          const std::optional<Tensor>& bias, QuantProductArgs& args) {
  const Rows in = rows_of(op, "x", x), to = rows_of(op, "out", out);
  bool same_rows = x.dim() == out.dim();
  for (int64_t d = 0; same_rows && d + 1 < x.dim(); ++d) same_rows = x.size(d) == out.size(d);
  PELTON_CHECK(same_rows, op, ": out must have the leading dimensions of x, found ", shape_of(out), " for ",
               shape_of(x));
  args.dtype = dtype_of(op, x);
  PELTON_CHECK(args.dtype != DType::f32, op, ": x must be float16 or bfloat16, found Float");
  check_same_dtype(op, x, out);
  if (bias) {
    check_device(op, {{"x", x}, {"bias", *bias}});
    check_same_dtype(op, x, *bias);
    PELTON_CHECK(bias->dim() == 1 && bias->is_contiguous() && bias->size(0) == to.width, op,
                 ": bias must be contiguous with the ", to.width, " features of out, found ",
                 shape_of(*bias));
  }
  args.out = out.mutable_data_ptr();
  args.x = x.const_data_ptr();
  args.bias = bias ? bias->const_data_ptr() : nullptr;
  args.tokens = to.count;  // rows without elements have no count of their own
  args.columns = to.width;
  args.inputs = in.width;
  args.x_stride = in.stride;
  args.out_stride = to.stride;
}

// Where a dequantized weight goes.
inline void check_matrix(const char* op, Tensor& out, DequantizeArgs& args) {
  PELTON_CHECK(out.dim() == 2 && out.is_contiguous(), op,
               ": out must be contiguous, [inputs, outputs], found ", shape_of(out));
  args.out = out.mutable_data_ptr();
  args.dtype = dtype_of(op, out);
  PELTON_CHECK(args.dtype != DType::f32, op, ": out must be float16 or bfloat16, found Float");
  args.inputs = out.size(0);
  args.columns = out.size(1);
}

// Scales of args.columns outputs; sets the number of groups, their size, and what scales they are. An index
// may map the rows to any number of groups, else it is what the size says.
template <class Args>
void check_groups(const char* op, const Tensor& scales, int64_t group_size, bool indexed, Args& args) {
  PELTON_CHECK(group_size == -1 || group_size > 0, op,
               ": group_size must be positive, or -1 for one group, found ", group_size);
  args.group_size = group_size == -1 || group_size > args.rows ? std::max<int64_t>(1, args.rows) : group_size;
  const ScalarType type = scales.scalar_type();
  PELTON_CHECK(type == ScalarType::Half || type == ScalarType::BFloat16, op,
               ": scales must be float16 or bfloat16, found ", torch::headeronly::toString(type));
  const int64_t groups = (args.rows + args.group_size - 1) / args.group_size;
  PELTON_CHECK(scales.dim() == 2 && scales.is_contiguous() && scales.size(1) == args.columns &&
                   (indexed || scales.size(0) == groups),
               op, ": scales must be contiguous, [", groups, ", ", args.columns, "], found ",
               shape_of(scales));
  args.groups = scales.size(0);
  args.scales = scales.const_data_ptr();
  args.bf16_scales = type == ScalarType::BFloat16;
}

}  // namespace pelton
