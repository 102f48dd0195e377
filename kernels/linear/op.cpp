#include "../common/op.h"
#include "linear.h"

namespace pelton {
namespace {

// Weights to copy that are worth a thread.
constexpr int64_t kPackGrain = 64 << 10;

int64_t panels_of(int64_t out_features) {
  return (out_features + cpu::linear_panel_width() - 1) / cpu::linear_panel_width();
}

void linear_cpu(Tensor& out, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const Rows in = rows_of("linear", "x", x), to = rows_of("linear", "out", out);
  check_same_dtype("linear", x, out);
  PELTON_CHECK(weight.dim() == 3 && weight.is_contiguous() && weight.size(2) == cpu::linear_panel_width(),
               "linear: packed_weight must be what pack_linear_weight made on this machine: contiguous, "
               "[panels, in_features, ",
               cpu::linear_panel_width(), "]");
  PELTON_CHECK(weight.size(1) == in.width, "linear: x has ", in.width,
               " features a row, packed_weight takes ", weight.size(1));
  PELTON_CHECK(weight.size(0) == panels_of(to.width), "linear: out has ", to.width,
               " features a row, packed_weight has ", weight.size(0), " panels of ", weight.size(2));
  // Rows without elements have no count of their own: compare the leading sizes.
  bool same_rows = x.dim() == out.dim();
  for (int64_t d = 0; same_rows && d + 1 < x.dim(); ++d) same_rows = x.size(d) == out.size(d);
  PELTON_CHECK(same_rows, "linear: out must have the leading dimensions of x");
  if (bias) {
    PELTON_CHECK(bias->dim() == 1 && bias->is_contiguous() && bias->size(0) == to.width,
                 "linear: bias must be contiguous with the ", to.width, " features of out");
  }
  const LinearArgs args{out.mutable_data_ptr(),
                        x.const_data_ptr(),
                        weight.const_data_ptr(),
                        bias ? bias->const_data_ptr() : nullptr,
                        to.count,
                        in.width,
                        to.width,
                        in.stride,
                        to.stride,
                        dtype_of("linear", x),
                        dtype_of("linear", weight),
                        bias ? dtype_of("linear", *bias) : DType::f32};
  submit(
      [args] {
        if (args.rows == 0) return;
        const LinearPlan plan = cpu::plan_linear(args, torch::stable::get_num_threads());
        parallel_tasks(plan.tasks(), [&](int64_t task) { cpu::linear(args, plan, task); });
      },
      {out, x, weight, bias ? *bias : weight});
}

void pack_linear_weight_cpu(Tensor& packed, const Tensor& weight) {
  check_same_dtype("pack_linear_weight", packed, weight);
  PELTON_CHECK(weight.dim() == 2 && (weight.size(1) <= 1 || weight.stride(1) == 1),
               "pack_linear_weight: weight must be [out_features, in_features] with contiguous rows");
  PELTON_CHECK(packed.dim() == 3 && packed.is_contiguous() && packed.size(0) == panels_of(weight.size(0)) &&
                   packed.size(1) == weight.size(1) && packed.size(2) == cpu::linear_panel_width(),
               "pack_linear_weight: packed must be contiguous, [", panels_of(weight.size(0)), ", ",
               weight.size(1), ", ", cpu::linear_panel_width(), "]");
  const PackArgs args{packed.mutable_data_ptr(),
                      weight.const_data_ptr(),
                      weight.size(1),
                      weight.size(0),
                      weight.stride(0),
                      dtype_of("pack_linear_weight", weight)};
  submit(
      [args, panels = packed.size(0)] {
        const int64_t panel_size = std::max<int64_t>(1, args.in_features * cpu::linear_panel_width());
        parallel_for(panels, std::max<int64_t>(1, kPackGrain / panel_size),
                     [&](int64_t first, int64_t last) { cpu::pack_linear_weight(args, first, last); });
      },
      {packed, weight});
}

}  // namespace
}  // namespace pelton

STABLE_TORCH_LIBRARY_FRAGMENT(pelton, m) {
  m.def("linear(Tensor(a!) out, Tensor x, Tensor packed_weight, Tensor? bias) -> ()");
  m.def("pack_linear_weight(Tensor(a!) packed, Tensor weight) -> ()");
  m.def("linear_panel_width() -> int");
  m.def("cpu_uses_amx() -> bool");
  m.def("cpu_allow_amx(bool allow) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(pelton, CPU, m) {
  m.impl("linear", TORCH_BOX(&pelton::linear_cpu));
  m.impl("pack_linear_weight", TORCH_BOX(&pelton::pack_linear_weight_cpu));
}
STABLE_TORCH_LIBRARY_IMPL(pelton, CompositeExplicitAutograd, m) {
  m.impl("linear_panel_width", TORCH_BOX(&pelton::cpu::linear_panel_width));
  m.impl("cpu_uses_amx", TORCH_BOX(&pelton::cpu::uses_amx));
  m.impl("cpu_allow_amx", TORCH_BOX(&pelton::cpu::allow_amx));
}
