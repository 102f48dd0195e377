#include "../../common/op.h"
#include "../../common/device.h"
#include "../product_checks.h"
#include "gptq.h"

namespace pelton {
namespace {

using Optional = std::optional<Tensor>;

int64_t fields_of(const char* op, int64_t bits) {
  PELTON_CHECK(bits == 4 || bits == 8, op, ": bits must be 4 or 8, found ", bits);
  return 32 / bits;
}

// The weights and what belongs to them; args.columns and args.inputs are known.
template <class Args>
void check_weight(const char* op, const Tensor& qweight, const Optional& qzeros, const Tensor& scales,
                  const Optional& g_idx, const Optional& order, int64_t bits, int64_t group_size,
                  Args& args) {
  const int64_t fields = fields_of(op, bits);
  check_device(op, {{"qweight", qweight}, {"scales", scales}});
  check_index(op, "qweight", qweight, ScalarType::Int, {-1, args.columns});
  args.bits = int(bits);
  args.rows = qweight.size(0) * fields;
  args.weight = qweight.const_data_ptr<int32_t>();
  args.zeros = args.order = args.g_idx = nullptr;
  if (order) {
    check_device(op, {{"qweight", qweight}, {"order", *order}});
    check_index(op, "order", *order, ScalarType::Int, {args.rows});
    args.order = order->const_data_ptr<int32_t>();
  } else {
    PELTON_CHECK(args.rows == args.inputs, op, ": qweight must have the ", args.inputs, " inputs of x in ",
                 args.inputs / fields, " rows of words, found ", shape_of(qweight));
  }
  if (g_idx) {
    check_device(op, {{"qweight", qweight}, {"g_idx", *g_idx}});
    check_index(op, "g_idx", *g_idx, ScalarType::Int, {args.rows});
    args.g_idx = g_idx->const_data_ptr<int32_t>();
  }
  check_groups(op, scales, group_size, bool(g_idx), args);
  if (qzeros) {
    check_device(op, {{"qweight", qweight}, {"qzeros", *qzeros}});
    PELTON_CHECK(args.columns % fields == 0, op, ": with qzeros the outputs must be a multiple of ", fields,
                 ", found ", args.columns);
    check_index(op, "qzeros", *qzeros, ScalarType::Int, {args.groups, args.columns / fields});
    args.zeros = qzeros->const_data_ptr<int32_t>();
  }
}

void gptq_gemm(Tensor& out, const Tensor& x, const Tensor& qweight, const Optional& qzeros,
               const Tensor& scales, const Optional& g_idx, const Optional& order, const Optional& bias,
               int64_t bits, int64_t group_size) {
  constexpr const char* kOp = "gptq_gemm";
  check_device(kOp, {{"x", x}, {"qweight", qweight}, {"scales", scales}, {"out", out}});
  QuantProductArgs args;
  check_product(kOp, out, x, bias, args);
  check_weight(kOp, qweight, qzeros, scales, g_idx, order, bits, group_size, args);
  launch(kOp, x, [&](void* stream) { return gpu::gptq_gemm(args, stream); });
}

void gptq_dequantize(Tensor& out, const Tensor& qweight, const Optional& qzeros, const Tensor& scales,
                     const Optional& g_idx, const Optional& order, int64_t bits, int64_t group_size) {
  constexpr const char* kOp = "gptq_dequantize";
  check_device(kOp, {{"qweight", qweight}, {"scales", scales}, {"out", out}});
  DequantizeArgs args;
  check_matrix(kOp, out, args);
  check_weight(kOp, qweight, qzeros, scales, g_idx, order, bits, group_size, args);
  launch(kOp, out, [&](void* stream) { return gpu::gptq_dequantize(args, stream); });
}

void gptq_shuffle(Tensor& out, const Tensor& qweight, const Tensor& order, int64_t bits) {
  constexpr const char* kOp = "gptq_shuffle";
  check_device(kOp, {{"qweight", qweight}, {"order", order}, {"out", out}});
  const int64_t fields = fields_of(kOp, bits);
  check_index(kOp, "qweight", qweight, ScalarType::Int, {-1, -1});
  check_index(kOp, "out", out, ScalarType::Int, {-1, qweight.size(1)});
  check_index(kOp, "order", order, ScalarType::Int, {out.size(0) * fields});
  const GptqShuffleArgs args{.out = out.mutable_data_ptr<int32_t>(),
                             .weight = qweight.const_data_ptr<int32_t>(),
                             .order = order.const_data_ptr<int32_t>(),
                             .columns = out.size(1),
                             .rows = out.size(0) * fields,
                             .source_rows = qweight.size(0) * fields,
                             .bits = int(bits)};
  launch(kOp, out, [&](void* stream) { return gpu::gptq_shuffle(args, stream); });
}

}  // namespace
}  // namespace pelton

STABLE_TORCH_LIBRARY_FRAGMENT(pelton, m) {
  m.def(
      "gptq_gemm(Tensor(a!) out, Tensor x, Tensor qweight, Tensor? qzeros, Tensor scales, Tensor? g_idx, "
      "Tensor? order, Tensor? bias, int bits, int group_size) -> ()");
  m.def(
      "gptq_dequantize(Tensor(a!) out, Tensor qweight, Tensor? qzeros, Tensor scales, Tensor? g_idx, Tensor? "
      "order, int bits, int group_size) -> ()");
  m.def("gptq_shuffle(Tensor(a!) out, Tensor qweight, Tensor order, int bits) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(pelton, CompositeExplicitAutograd, m) {
  m.impl("gptq_gemm", TORCH_BOX(&pelton::gptq_gemm));
  m.impl("gptq_dequantize", TORCH_BOX(&pelton::gptq_dequantize));
  m.impl("gptq_shuffle", TORCH_BOX(&pelton::gptq_shuffle));
}
