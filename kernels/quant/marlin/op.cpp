#include <optional>

#include "../../common/device.h"
#include "../../common/op.h"
#include "layout.h"
#include "marlin.h"

namespace pelton {
namespace {

using Optional = std::optional<Tensor>;

void check_bits(const char* op, int64_t bits) {
  PELTON_CHECK(bits == 4 || bits == 8, op, ": bits must be 4 or 8, found ", bits);
}

// Words (int32) of a tile.
int64_t tile_words(int64_t bits) { return marlin::tile_bytes(int(bits)) / 4; }

// What kernels read by 16-byte accesses alone.
void check_aligned(const char* op, const char* name, const Tensor& t) {
  PELTON_CHECK(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0, op, ": ", name,
               " must begin at a multiple of 16 bytes");
}

// The data of a tensor that may be missing, beside x and with this dtype and shape.
const void* optional_data(const char* op, const Tensor& x, const char* name, const Optional& t,
                          ScalarType dtype, std::initializer_list<int64_t> shape) {
  if (!t) return nullptr;
  check_device(op, {{"x", x}, {name, *t}});
  check_index(op, name, *t, dtype, shape);
  return t->const_data_ptr();
}

void marlin_repack(Tensor& out, const Tensor& q, const Optional& perm, int64_t bits) {
  constexpr const char* kOp = "marlin_repack";
  check_device(kOp, {{"q", q}, {"out", out}});
  check_bits(kOp, bits);
  check_index(kOp, "q", q, ScalarType::Byte, {-1, -1});
  const int64_t n = q.size(0), k = q.size(1);
  check_index(kOp, "out", out, ScalarType::Int, {marlin::tiles(n), marlin::tiles(k), tile_words(bits)});
  check_aligned(kOp, "out", out);
  if (perm) {
    check_device(kOp, {{"q", q}, {"perm", *perm}});
    check_index(kOp, "perm", *perm, ScalarType::Int, {k});
  }
  const MarlinRepackArgs args{out.mutable_data_ptr(),
                              q.const_data_ptr<uint8_t>(),
                              perm ? perm->const_data_ptr<int32_t>() : nullptr,
                              n,
                              k,
                              int(bits)};
  launch(kOp, q, [&](void* stream) { return gpu::marlin_repack(args, stream); });
}

void marlin_gemm(Tensor& out, const Tensor& x, const Tensor& weight, const Tensor& scales,
                 const Optional& zeros, const Optional& perm, const Optional& bias, Tensor& workspace,
                 int64_t bits, int64_t group_size) {
  constexpr const char* kOp = "marlin_gemm";
  check_device(kOp,
               {{"x", x}, {"weight", weight}, {"scales", scales}, {"workspace", workspace}, {"out", out}});
  check_bits(kOp, bits);
  const Rows in = rows_of(kOp, "x", x), to = rows_of(kOp, "out", out);
  const int64_t k = in.width, n = to.width;
  bool same_rows = x.dim() == out.dim();
  for (int64_t d = 0; same_rows && d + 1 < x.dim(); ++d) same_rows = x.size(d) == out.size(d);
  PELTON_CHECK(same_rows, kOp, ": out must have the leading dimensions of x, found ", shape_of(out), " for ",
               shape_of(x));
  PELTON_CHECK(k > 0, kOp, ": x must have inputs, found ", shape_of(x));
  const DType dtype = dtype_of(kOp, x);
  PELTON_CHECK(dtype != DType::f32, kOp, ": x must be float16 or bfloat16, found Float");
  check_same_dtype(kOp, x, out);
  PELTON_CHECK(group_size == -1 || group_size >= k || (group_size > 0 && group_size % 32 == 0), kOp,
               ": group_size must be a multiple of 32, or -1 for one group, found ", group_size);
  const bool one_group = group_size == -1 || group_size >= k;
  const int64_t groups = one_group ? 1 : (k + group_size - 1) / group_size;
  check_index(kOp, "weight", weight, ScalarType::Int, {marlin::tiles(n), marlin::tiles(k), tile_words(bits)});
  check_index(kOp, "scales", scales, x.scalar_type(), {marlin::tiles(n), groups, marlin::kTile});
  check_index(kOp, "workspace", workspace, ScalarType::Float, {-1});
  MarlinGemmArgs args{
      .out = out.mutable_data_ptr(),
      .x = x.const_data_ptr(),
      .weight = weight.const_data_ptr(),
      .scales = scales.const_data_ptr(),
      .zeros = static_cast<const uint8_t*>(
          optional_data(kOp, x, "zeros", zeros, ScalarType::Byte, {marlin::tiles(n), groups, marlin::kTile})),
      .perm = static_cast<const int32_t*>(optional_data(kOp, x, "perm", perm, ScalarType::Int, {k})),
      .bias = optional_data(kOp, x, "bias", bias, x.scalar_type(), {n}),
      .workspace = workspace.mutable_data_ptr<float>(),
      .m = to.count,
      .n = n,
      .k = k,
      .x_stride = in.stride,
      .out_stride = to.stride,
      .groups = groups,
      .workspace_size = workspace.size(0),
      .bits = int(bits),
      .group_size = int(one_group ? marlin::tiles(k) * marlin::kTile : group_size),
      .dtype = dtype};
  check_aligned(kOp, "weight", weight);
  check_aligned(kOp, "scales", scales);
  check_aligned(kOp, "workspace", workspace);
  if (zeros) check_aligned(kOp, "zeros", *zeros);
  const int64_t needed = gpu::marlin_workspace_size(args.m, n, k, gpu::marlin_copies_inputs(args));
  PELTON_CHECK(workspace.size(0) >= needed, kOp, ": workspace must have at least ", needed,
               " elements (marlin_workspace_size), found ", workspace.size(0));
  launch(kOp, x, [&](void* stream) { return gpu::marlin_gemm(args, stream); });
}

}  // namespace
}  // namespace pelton

STABLE_TORCH_LIBRARY_FRAGMENT(pelton, m) {
  m.def("marlin_repack(Tensor(a!) out, Tensor q, Tensor? perm, int bits) -> ()");
  m.def(
      "marlin_gemm(Tensor(a!) out, Tensor x, Tensor weight, Tensor scales, Tensor? zeros, Tensor? perm, "
      "Tensor? bias, Tensor(b!) workspace, int bits, int group_size) -> ()");
  m.def("marlin_workspace_size(int num_tokens, int out_features, int in_features, bool copied) -> int");
}
STABLE_TORCH_LIBRARY_IMPL(pelton, CompositeExplicitAutograd, m) {
  m.impl("marlin_repack", TORCH_BOX(&pelton::marlin_repack));
  m.impl("marlin_gemm", TORCH_BOX(&pelton::marlin_gemm));
  m.impl("marlin_workspace_size", TORCH_BOX(&pelton::gpu::marlin_workspace_size));
}
