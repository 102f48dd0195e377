#include "../common/op.h"
#include "../common/device.h"
#include "sampling.h"

namespace pelton {
namespace {

int64_t sample_workspace_size(int64_t rows, int64_t vocab) {
  return rows * sample_workspace_bytes(vocab) / int64_t(sizeof(float));
}

// What both operators take: out, logits and the workspace.
SampleArgs common_args(const char* op, Tensor& out, const Tensor& logits, Tensor& workspace, Rows& rows) {
  PELTON_CHECK(logits.dim() == 2, op, ": logits must be [rows, vocab], found ", shape_of(logits));
  rows = rows_of(op, "logits", logits);
  rows.count = logits.size(0);
  PELTON_CHECK(rows.width >= 1 && rows.width <= kSampleMaxVocab, op, ": the vocabulary must have 1 to ",
               kSampleMaxVocab, " tokens, logits has ", rows.width);
  check_index(op, "out", out, ScalarType::Long, {rows.count});
  check_index(op, "workspace", workspace, ScalarType::Float, {-1});
  const int64_t size = sample_workspace_size(rows.count, rows.width);
  PELTON_CHECK(workspace.size(0) >= size, op, ": workspace must have at least ", size, " elements, found ",
               workspace.size(0));
  SampleArgs args{};
  args.out = static_cast<int64_t*>(out.mutable_data_ptr());
  args.logits = logits.const_data_ptr();
  args.stride = logits.stride(0);
  args.vocab = rows.width;
  args.workspace = workspace.mutable_data_ptr();
  args.dtype = dtype_of(op, logits);
  PELTON_CHECK(reinterpret_cast<uintptr_t>(args.workspace) % alignof(SliceStatistics) == 0, op,
               ": workspace must be aligned to ", alignof(SliceStatistics), " bytes");
  return args;
}

template <class T>
const T* option(const char* name, const std::optional<Tensor>& t, ScalarType dtype, const Tensor& logits) {
  if (!t) return nullptr;
  check_device("sample", {{"logits", logits}, {name, *t}});
  check_index("sample", name, *t, dtype, {logits.size(0)});
  return static_cast<const T*>(t->const_data_ptr());
}

void sample(Tensor& out, std::optional<Tensor> logprobs, const Tensor& logits, const Tensor& temperature,
            const std::optional<Tensor>& top_k, const std::optional<Tensor>& top_p,
            const std::optional<Tensor>& min_p, const Tensor& seeds, const Tensor& positions,
            Tensor& workspace) {
  check_device("sample", {{"logits", logits},
                          {"temperature", temperature},
                          {"seeds", seeds},
                          {"positions", positions},
                          {"out", out},
                          {"workspace", workspace}});
  Rows rows;
  SampleArgs args = common_args("sample", out, logits, workspace, rows);
  check_index("sample", "temperature", temperature, ScalarType::Float, {rows.count});
  check_index("sample", "seeds", seeds, ScalarType::Long, {rows.count});
  check_index("sample", "positions", positions, ScalarType::Long, {rows.count});
  args.temperature = static_cast<const float*>(temperature.const_data_ptr());
  args.top_k = option<int32_t>("top_k", top_k, ScalarType::Int, logits);
  args.top_p = option<float>("top_p", top_p, ScalarType::Float, logits);
  args.min_p = option<float>("min_p", min_p, ScalarType::Float, logits);
  args.seeds = static_cast<const int64_t*>(seeds.const_data_ptr());
  args.positions = static_cast<const int64_t*>(positions.const_data_ptr());
  args.logprobs = const_cast<float*>(option<float>("logprobs", logprobs, ScalarType::Float, logits));
  launch("sample", logits, [&](void* stream) { return gpu::sample(args, rows.count, stream); });
}

void greedy_sample(Tensor& out, const Tensor& logits, Tensor& workspace) {
  check_device("greedy_sample", {{"logits", logits}, {"out", out}, {"workspace", workspace}});
  Rows rows;
  const SampleArgs args = common_args("greedy_sample", out, logits, workspace, rows);
  launch("greedy_sample", logits, [&](void* stream) { return gpu::greedy_sample(args, rows.count, stream); });
}

}  // namespace
}  // namespace pelton

STABLE_TORCH_LIBRARY_FRAGMENT(pelton, m) {
  m.def("sample_workspace_size(int rows, int vocab) -> int");
  m.def(
      "sample(Tensor(a!) out, Tensor(b!)? logprobs, Tensor logits, Tensor temperature, Tensor? top_k, "
      "Tensor? top_p, Tensor? min_p, Tensor seeds, Tensor positions, Tensor(c!) workspace) -> ()");
  m.def("greedy_sample(Tensor(a!) out, Tensor logits, Tensor(b!) workspace) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(pelton, CompositeExplicitAutograd, m) {
  m.impl("sample_workspace_size", TORCH_BOX(&pelton::sample_workspace_size));
  m.impl("sample", TORCH_BOX(&pelton::sample));
  m.impl("greedy_sample", TORCH_BOX(&pelton::greedy_sample));
}
