#include "../common/op.h"
#include "../common/device.h"
#include "norm.h"

namespace pelton {
namespace {

// Below this many elements a thread costs more than it brings.
constexpr int64_t kGrainElements = 16384;

void check_weight(const char* op, const Tensor& x, const Tensor& weight) {
  check_same_dtype(op, x, weight);
  PELTON_CHECK(weight.dim() == 1 && weight.is_contiguous() && weight.size(0) == x.size(x.dim() - 1), op,
               ": weight must be contiguous with the ", x.size(x.dim() - 1),
               " elements of x's last dimension");
}

void rms_norm(Tensor& out, const Tensor& x, const Tensor& weight, double eps) {
  check_device("rms_norm", {{"x", x}, {"weight", weight}, {"out", out}});
  const GroupedRows in = grouped_rows_of("rms_norm", "x", x), to = grouped_rows_of("rms_norm", "out", out);
  check_same_shape("rms_norm", "out", out, "x", x);
  check_same_dtype("rms_norm", x, out);
  check_weight("rms_norm", x, weight);
  const RmsNormArgs args{out.mutable_data_ptr(),
                         x.const_data_ptr(),
                         weight.const_data_ptr(),
                         in.width,
                         in.layout,
                         to.layout,
                         float(eps),
                         dtype_of("rms_norm", x)};
  if constexpr (kGpu) {
    launch("rms_norm", x, [&](void* stream) { return gpu::rms_norm(args, in.count, stream); });
  } else {
    submit(
        [args, rows = in.count] {
          parallel_for(rows, std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, args.width)),
                       [&](int64_t first, int64_t last) { cpu::rms_norm(args, first, last); });
        },
        {out, x, weight});
  }
}

void fused_add_rms_norm(Tensor& x, Tensor& residual, const Tensor& weight, double eps) {
  check_device("fused_add_rms_norm", {{"x", x}, {"residual", residual}, {"weight", weight}});
  const Rows in = rows_of("fused_add_rms_norm", "x", x),
             res = rows_of("fused_add_rms_norm", "residual", residual);
  check_same_shape("fused_add_rms_norm", "residual", residual, "x", x);
  check_same_dtype("fused_add_rms_norm", x, residual);
  check_weight("fused_add_rms_norm", x, weight);
  const FusedAddRmsNormArgs args{x.mutable_data_ptr(),
                                 residual.mutable_data_ptr(),
                                 weight.const_data_ptr(),
                                 in.width,
                                 in.stride,
                                 res.stride,
                                 float(eps),
                                 dtype_of("fused_add_rms_norm", x)};
  if constexpr (kGpu) {
    launch("fused_add_rms_norm", x,
           [&](void* stream) { return gpu::fused_add_rms_norm(args, in.count, stream); });
  } else {
    submit(
        [args, rows = in.count] {
          parallel_for(rows, std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, args.width)),
                       [&](int64_t first, int64_t last) { cpu::fused_add_rms_norm(args, first, last); });
        },
        {x, residual, weight});
  }
}

}  // namespace
}  // namespace pelton

STABLE_TORCH_LIBRARY_FRAGMENT(pelton, m) {
  m.def("rms_norm(Tensor(a!) out, Tensor x, Tensor weight, float eps) -> ()");
  m.def("fused_add_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(pelton, CompositeExplicitAutograd, m) {
  m.impl("rms_norm", TORCH_BOX(&pelton::rms_norm));
  m.impl("fused_add_rms_norm", TORCH_BOX(&pelton::fused_add_rms_norm));
}
