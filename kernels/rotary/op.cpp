#include "../common/op.h"
#include "../common/device.h"
#include "rotary.h"

namespace pelton {
namespace {

// Below this many elements a thread costs more than it brings.
constexpr int64_t kGrainElements = 16384;

void rotary_embedding(Tensor& query, Tensor& key, const Tensor& positions, const Tensor& cos_sin_cache,
                      bool interleaved) {
  constexpr const char* op = "rotary_embedding";
  check_device(op,
               {{"query", query}, {"key", key}, {"positions", positions}, {"cos_sin_cache", cos_sin_cache}});
  check_heads(op, "query", query);
  check_heads(op, "key", key);
  check_same_dtype(op, query, key);
  const int64_t tokens = query.size(0), head_size = query.size(2);
  PELTON_CHECK(key.size(0) == tokens && key.size(2) == head_size, op,
               ": query and key must have the same num_tokens and head_size, found ", shape_of(query),
               " and ", shape_of(key));
  check_index(op, "positions", positions, ScalarType::Long, {tokens});
  check_index(op, "cos_sin_cache", cos_sin_cache, ScalarType::Float, {-1, -1});
  const int64_t max_position = cos_sin_cache.size(0), rotary_dim = cos_sin_cache.size(1);
  PELTON_CHECK(rotary_dim % 2 == 0 && rotary_dim <= head_size, op, ": cos_sin_cache has rotary_dim ",
               rotary_dim, ", which must be even and at most the head_size ", head_size);
  const RotaryArgs args{{query.mutable_data_ptr(), query.size(1), query.stride(0), query.stride(1)},
                        {key.mutable_data_ptr(), key.size(1), key.stride(0), key.stride(1)},
                        static_cast<const int64_t*>(positions.const_data_ptr()),
                        static_cast<const float*>(cos_sin_cache.const_data_ptr()),
                        rotary_dim,
                        head_size,
                        max_position,
                        interleaved,
                        dtype_of(op, query)};
  if constexpr (kGpu) {
    launch(op, query, [&](void* stream) { return gpu::rotary_embedding(args, tokens, stream); });
  } else {
    const int64_t per_token = std::max<int64_t>(1, (args.query.heads + args.key.heads) * rotary_dim);
    submit(
        [args, tokens, grain = std::max<int64_t>(1, kGrainElements / per_token)] {
          check_values(op, "positions", args.positions, tokens, args.max_position);
          parallel_for(tokens, grain,
                       [&](int64_t first, int64_t last) { cpu::rotary_embedding(args, first, last); });
        },
        {query, key, positions, cos_sin_cache});
  }
}

}  // namespace
}  // namespace pelton

STABLE_TORCH_LIBRARY_FRAGMENT(pelton, m) {
  m.def(
      "rotary_embedding(Tensor(a!) query, Tensor(b!) key, Tensor positions, Tensor cos_sin_cache, "
      "bool interleaved) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(pelton, CompositeExplicitAutograd, m) {
  m.impl("rotary_embedding", TORCH_BOX(&pelton::rotary_embedding));
}
