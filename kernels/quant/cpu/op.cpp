#include "../../common/op.h"
#include "quant_linear.h"

namespace pelton {
namespace {

// Weights to copy that are worth a thread.
constexpr int64_t kPackGrain = 64 << 10;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t panels_of(int64_t out_features) { return ceil_div(out_features, cpu::quant_panel_width()); }

void check_bits(const char* op, int64_t bits) {
  PELTON_CHECK(bits == 4 || bits == 8, op, ": bits must be 4 or 8, found ", bits);
}

// Blocks of inputs: of `order` where there is one, as it may have gaps.
int64_t blocks_of(const char* op, const std::optional<Tensor>& order, int64_t in_features) {
  if (!order) return ceil_div(in_features, kQuantBlock);
  check_index(op, "order", *order, ScalarType::Int, {-1});
  PELTON_CHECK(order->size(0) % kQuantBlock == 0, op, ": order must have a multiple of ", kQuantBlock,
               " entries, found ", order->size(0));
  return order->size(0) / kQuantBlock;
}

void quant_linear_cpu(Tensor& out, const Tensor& x, const Tensor& weight, const Tensor& scales,
                      const std::optional<Tensor>& zeros, const std::optional<Tensor>& order,
                      const std::optional<Tensor>& bias, int64_t bits, int64_t group_size, bool int8) {
  const char* op = "quant_linear";
  const Rows in = rows_of(op, "x", x), to = rows_of(op, "out", out);
  check_same_dtype(op, x, out);
  check_bits(op, bits);
  const int64_t blocks = blocks_of(op, order, in.width), panels = panels_of(to.width);
  PELTON_CHECK(group_size == -1 || (group_size > 0 && group_size % kQuantBlock == 0), op,
               ": group_size must be -1 or a multiple of ", kQuantBlock, ", found ", group_size);
  const int64_t group_blocks = group_size == -1 ? std::max<int64_t>(1, blocks) : group_size / kQuantBlock;
  const int64_t groups = ceil_div(blocks, group_blocks), width = cpu::quant_panel_width();
  check_index(op, "packed_weight", weight, ScalarType::Byte,
              {panels, blocks, kQuantBlock * width * bits / 8});
  PELTON_CHECK(scales.dim() == 3 && scales.is_contiguous() && scales.size(0) == panels &&
                   scales.size(1) == groups && scales.size(2) == width,
               op, ": scales must be contiguous, [", panels, ", ", groups, ", ", width, "], found ",
               shape_of(scales));
  if (zeros) check_index(op, "zeros", *zeros, ScalarType::Byte, {panels, groups, width});
  // Rows without elements have no count of their own: compare the leading sizes.
  bool same_rows = x.dim() == out.dim();
  for (int64_t d = 0; same_rows && d + 1 < x.dim(); ++d) same_rows = x.size(d) == out.size(d);
  PELTON_CHECK(same_rows, op, ": out must have the leading dimensions of x, found ", shape_of(out), " for ",
               shape_of(x));
  if (bias) {
    PELTON_CHECK(bias->dim() == 1 && bias->is_contiguous() && bias->size(0) == to.width, op,
                 ": bias must be contiguous with the ", to.width, " features of out, found ",
                 shape_of(*bias));
  }
  const QuantLinearArgs args{out.mutable_data_ptr(),
                             x.const_data_ptr(),
                             weight.const_data_ptr<uint8_t>(),
                             scales.const_data_ptr(),
                             zeros ? zeros->const_data_ptr<uint8_t>() : nullptr,
                             order ? order->const_data_ptr<int32_t>() : nullptr,
                             bias ? bias->const_data_ptr() : nullptr,
                             to.count,
                             in.width,
                             to.width,
                             in.stride,
                             to.stride,
                             blocks,
                             groups,
                             group_blocks,
                             dtype_of(op, x),
                             dtype_of(op, scales),
                             bias ? dtype_of(op, *bias) : DType::f32,
                             int(bits),
                             int8};
  submit(
      [args] {
        if (args.rows == 0) return;
        static std::atomic<uint64_t> calls{0};
        const uint64_t call = calls.fetch_add(1, std::memory_order_relaxed) + 1;
        const QuantLinearPlan plan = cpu::plan_quant_linear(args, torch::stable::get_num_threads());
        parallel_tasks(plan.tasks(), [&](int64_t task) { cpu::quant_linear(args, plan, task, call); });
      },
      {out, x, weight, scales, zeros ? *zeros : weight, order ? *order : weight, bias ? *bias : weight});
}

void pack_quant_weight_cpu(Tensor& packed, const Tensor& q, const std::optional<Tensor>& order,
                           int64_t bits) {
  const char* op = "pack_quant_weight";
  check_bits(op, bits);
  PELTON_CHECK(q.dim() == 2 && q.scalar_type() == ScalarType::Byte, op,
               ": q must be uint8 [out_features, in_features], found ",
               torch::headeronly::toString(q.scalar_type()), " ", shape_of(q));
  const int64_t blocks = blocks_of(op, order, q.size(1)), panels = panels_of(q.size(0));
  check_index(op, "packed", packed, ScalarType::Byte,
              {panels, blocks, kQuantBlock * cpu::quant_panel_width() * bits / 8});
  const QuantPackArgs args{packed.mutable_data_ptr<uint8_t>(),
                           q.const_data_ptr<uint8_t>(),
                           order ? order->const_data_ptr<int32_t>() : nullptr,
                           q.size(1),
                           q.size(0),
                           q.stride(0),
                           q.stride(1),
                           blocks,
                           int(bits)};
  submit(
      [args, panels] {
        const int64_t panel_size = std::max<int64_t>(1, args.blocks * kQuantBlock * cpu::quant_panel_width());
        parallel_for(panels, std::max<int64_t>(1, kPackGrain / panel_size),
                     [&](int64_t first, int64_t last) { cpu::pack_quant_weight(args, first, last); });
      },
      {packed, q, order ? *order : q});
}

}  // namespace
}  // namespace pelton

STABLE_TORCH_LIBRARY_FRAGMENT(pelton, m) {
  m.def(
      "quant_linear(Tensor(a!) out, Tensor x, Tensor packed_weight, Tensor scales, Tensor? zeros, Tensor? "
      "order, "
      "Tensor? bias, int bits, int group_size, bool int8) -> ()");
  m.def("pack_quant_weight(Tensor(a!) packed, Tensor q, Tensor? order, int bits) -> ()");
  m.def("quant_panel_width() -> int");
  m.def("quant_uses_vnni() -> bool");
  m.def("quant_allow_vnni(bool allow) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(pelton, CPU, m) {
  m.impl("quant_linear", TORCH_BOX(&pelton::quant_linear_cpu));
  m.impl("pack_quant_weight", TORCH_BOX(&pelton::pack_quant_weight_cpu));
}
STABLE_TORCH_LIBRARY_IMPL(pelton, CompositeExplicitAutograd, m) {
  m.impl("quant_panel_width", TORCH_BOX(&pelton::cpu::quant_panel_width));
  m.impl("quant_uses_vnni", TORCH_BOX(&pelton::cpu::quant_uses_vnni));
  m.impl("quant_allow_vnni", TORCH_BOX(&pelton::cpu::quant_allow_vnni));
}
