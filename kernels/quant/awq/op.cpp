#include "../../common/op.h"
#include "../../common/device.h"
#include "../product_checks.h"
#include "awq.h"

namespace pelton {
namespace {

template <class Args>
void check_weight(const char* op, const Tensor& qweight, const Tensor& qzeros, const Tensor& scales,
                  int64_t group_size, Args& args) {
  PELTON_CHECK(args.columns % 8 == 0, op, ": the outputs must be a multiple of 8, found ", args.columns);
  check_index(op, "qweight", qweight, ScalarType::Int, {args.inputs, args.columns / 8});
  args.bits = 4;
  args.rows = args.inputs;
  args.weight = qweight.const_data_ptr<int32_t>();
  args.order = args.g_idx = nullptr;
  check_groups(op, scales, group_size, false, args);
  check_index(op, "qzeros", qzeros, ScalarType::Int, {args.groups, args.columns / 8});
  args.zeros = qzeros.const_data_ptr<int32_t>();
}

void awq_gemm(Tensor& out, const Tensor& x, const Tensor& qweight, const Tensor& qzeros, const Tensor& scales,
              const std::optional<Tensor>& bias, int64_t group_size) {
  constexpr const char* kOp = "awq_gemm";
  check_device(kOp, {{"x", x}, {"qweight", qweight}, {"qzeros", qzeros}, {"scales", scales}, {"out", out}});
  QuantProductArgs args;
  check_product(kOp, out, x, bias, args);
  check_weight(kOp, qweight, qzeros, scales, group_size, args);
  launch(kOp, x, [&](void* stream) { return gpu::awq_gemm(args, stream); });
}

void awq_dequantize(Tensor& out, const Tensor& qweight, const Tensor& qzeros, const Tensor& scales,
                    int64_t group_size) {
  constexpr const char* kOp = "awq_dequantize";
  check_device(kOp, {{"qweight", qweight}, {"qzeros", qzeros}, {"scales", scales}, {"out", out}});
  DequantizeArgs args;
  check_matrix(kOp, out, args);
  check_weight(kOp, qweight, qzeros, scales, group_size, args);
  launch(kOp, out, [&](void* stream) { return gpu::awq_dequantize(args, stream); });
}

}  // namespace
}  // namespace pelton

STABLE_TORCH_LIBRARY_FRAGMENT(pelton, m) {
  m.def(
      "awq_gemm(Tensor(a!) out, Tensor x, Tensor qweight, Tensor qzeros, Tensor scales, Tensor? bias, int "
      "group_size) -> ()");
  m.def("awq_dequantize(Tensor(a!) out, Tensor qweight, Tensor qzeros, Tensor scales, int group_size) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(pelton, CompositeExplicitAutograd, m) {
  m.impl("awq_gemm", TORCH_BOX(&pelton::awq_gemm));
  m.impl("awq_dequantize", TORCH_BOX(&pelton::awq_dequantize));
}
