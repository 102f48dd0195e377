#include "embedding.h"

#include "../common/device.h"
#include "../common/op.h"

namespace pelton {
namespace {

// Below this many bytes a thread costs more than it brings.
constexpr int64_t kGrainBytes = 65536;

void embedding(Tensor& out, const Tensor& ids, const Tensor& weight) {
  constexpr const char* op = "embedding";
  check_device(op, {{"weight", weight}, {"ids", ids}, {"out", out}});
  dtype_of(op, weight);
  check_same_dtype(op, weight, out);
  PELTON_CHECK(weight.dim() == 2, op, ": weight must be [vocab_size, hidden_size], found ", shape_of(weight));
  check_index(op, "ids", ids, ScalarType::Long, {-1});
  const int64_t tokens = ids.size(0), vocabulary = weight.size(0), width = weight.size(1);
  PELTON_CHECK(out.dim() == 2 && out.size(0) == tokens && out.size(1) == width, op, ": out must have shape [",
               tokens, ", ", width, "], found ", shape_of(out));
  const Rows from = rows_of(op, "weight", weight), to = rows_of(op, "out", out);
  const auto bytes = int64_t(weight.element_size());
  const EmbeddingArgs args{out.mutable_data_ptr(),
                           static_cast<const int64_t*>(ids.const_data_ptr()),
                           weight.const_data_ptr(),
                           width * bytes,
                           to.stride * bytes,
                           from.stride * bytes,
                           vocabulary};
  if constexpr (kGpu) {
    launch(op, weight, [&](void* stream) { return gpu::embedding(args, tokens, stream); });
  } else {
    submit(
        [args, tokens] {
          check_values(op, "ids", args.ids, tokens, args.vocabulary);
          parallel_for(tokens, std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, args.row_bytes)),
                       [&](int64_t first, int64_t last) { cpu::embedding(args, first, last); });
        },
        {out, ids, weight});
  }
}

}  // namespace
}  // namespace pelton

STABLE_TORCH_LIBRARY_FRAGMENT(pelton, m) {
  m.def("embedding(Tensor(a!) out, Tensor ids, Tensor weight) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(pelton, CompositeExplicitAutograd, m) {
  m.impl("embedding", TORCH_BOX(&pelton::embedding));
}
