#include "cache.h"

#include "../common/device.h"
#include "../common/op.h"

namespace pelton {
namespace {

// Below this many bytes a thread costs more than it brings.
constexpr int64_t kGrainBytes = 65536;

void check_cache(const char* op, const char* name, const Tensor& cache) {
  PELTON_CHECK(cache.dim() == 4, op, ": ", name,
               " must be [num_blocks, num_kv_heads, block_size, head_size], found ", shape_of(cache));
  PELTON_CHECK(cache.size(3) <= 1 || cache.stride(3) == 1, op, ": ", name,
               "'s last dimension must be contiguous, its stride is ", cache.stride(3));
}

CacheWrite cache_write(const Tensor& from, Tensor& to) {
  const auto bytes = int64_t(to.element_size());
  return {from.const_data_ptr(), from.stride(0) * bytes, from.stride(1) * bytes, to.mutable_data_ptr(),
          to.stride(0) * bytes,  to.stride(1) * bytes,   to.stride(2) * bytes};
}

void check_slots(const char* op, const int64_t* slots, int64_t count, int64_t limit) {
  for (int64_t i = 0; i < count; ++i) {
    PELTON_CHECK(slots[i] < limit, op, ": slot_mapping[", i, "] is ", slots[i], ", but the cache has ", limit,
                 " slots");
  }
}

void reshape_and_cache(const Tensor& key, const Tensor& value, Tensor& key_cache, Tensor& value_cache,
                       const Tensor& slot_mapping) {
  constexpr const char* op = "reshape_and_cache";
  check_device(op, {{"key", key},
                    {"value", value},
                    {"key_cache", key_cache},
                    {"value_cache", value_cache},
                    {"slot_mapping", slot_mapping}});
  check_heads(op, "key", key);
  check_heads(op, "value", value);
  check_same_shape(op, "value", value, "key", key);
  check_cache(op, "key_cache", key_cache);
  check_cache(op, "value_cache", value_cache);
  check_same_shape(op, "value_cache", value_cache, "key_cache", key_cache);
  dtype_of(op, key);
  check_same_dtype(op, key, value);
  check_same_dtype(op, key, key_cache);
  check_same_dtype(op, key, value_cache);
  const int64_t tokens = key.size(0), heads = key.size(1), head_size = key.size(2);
  PELTON_CHECK(key_cache.size(1) == heads && key_cache.size(3) == head_size, op, ": key ", shape_of(key),
               " and key_cache ", shape_of(key_cache), " must have the same num_kv_heads and head_size");
  check_index(op, "slot_mapping", slot_mapping, ScalarType::Long, {tokens});
  const int64_t block_size = key_cache.size(2), slots = key_cache.size(0) * block_size;
  const ReshapeAndCacheArgs args{cache_write(key, key_cache),
                                 cache_write(value, value_cache),
                                 static_cast<const int64_t*>(slot_mapping.const_data_ptr()),
                                 heads,
                                 head_size * int64_t(key.element_size()),
                                 block_size,
                                 slots};
  if constexpr (kGpu) {
    launch(op, key, [&](void* stream) { return gpu::reshape_and_cache(args, tokens, stream); });
  } else {
    const int64_t per_token = std::max<int64_t>(1, 2 * args.heads * args.head_bytes);
    submit(
        [args, tokens, grain = std::max<int64_t>(1, kGrainBytes / per_token)] {
          check_slots(op, args.slot_mapping, tokens, args.slots);
          parallel_for(tokens, grain,
                       [&](int64_t first, int64_t last) { cpu::reshape_and_cache(args, first, last); });
        },
        {key, value, key_cache, value_cache, slot_mapping});
  }
}

// The bytes of one block, and from one block to the next. A block is contiguous in itself.
struct Blocks {
  int64_t count, bytes, stride;
};

Blocks blocks_of(const char* op, const char* name, const Tensor& t) {
  PELTON_CHECK(t.dim() >= 2, op, ": ", name, " must be [num_blocks, ...], found ", shape_of(t));
  PELTON_CHECK(t.size(0) <= INT32_MAX, op, ": ", name, " has ", t.size(0), " blocks, 2147483647 are allowed");
  if (t.numel() == 0) return {t.size(0), 0, 0};
  int64_t elements = 1;
  for (int64_t d = t.dim() - 1; d >= 1; --d) {
    PELTON_CHECK(t.size(d) <= 1 || t.stride(d) == elements, op, ": each block of ", name,
                 " must be contiguous, found stride ", t.stride(d), " in dimension ", d, " of ", shape_of(t));
    elements *= t.size(d);
  }
  PELTON_CHECK(t.size(0) <= 1 || t.stride(0) >= elements, op, ": the blocks of ", name, " overlap in memory");
  const auto bytes = int64_t(t.element_size());
  return {t.size(0), elements * bytes, t.stride(0) * bytes};
}

void check_block_mapping(const char* op, const CopyBlocksArgs& a) {
  for (int64_t i = 0; i < a.pairs; ++i) {
    const int64_t source = a.block_mapping[2 * i], destination = a.block_mapping[2 * i + 1];
    PELTON_CHECK(source >= 0 && source < a.sources, op, ": source block ", source, " of pair ", i,
                 " is outside of [0, ", a.sources, ")");
    PELTON_CHECK(destination >= 0 && destination < a.destinations, op, ": destination block ", destination,
                 " of pair ", i, " is outside of [0, ", a.destinations, ")");
  }
}

CopyBlocksArgs copy_args(const Tensor& src, const Blocks& from, Tensor& dst, const Blocks& to,
                         const Tensor& block_mapping) {
  return {src.const_data_ptr(),
          dst.mutable_data_ptr(),
          from.stride,
          to.stride,
          from.bytes,
          static_cast<const int64_t*>(block_mapping.const_data_ptr()),
          block_mapping.size(0),
          from.count,
          to.count};
}

void run_copy(const CopyBlocksArgs& a) {
  if (a.pairs == 0) return;
  parallel_for(a.block_bytes, std::max<int64_t>(4096, kGrainBytes / a.pairs),
               [&](int64_t first, int64_t last) { cpu::copy_blocks(a, first, last); });
}

void copy_blocks(Tensor& key_cache, Tensor& value_cache, const Tensor& block_mapping) {
  constexpr const char* op = "copy_blocks";
  check_device(op,
               {{"key_cache", key_cache}, {"value_cache", value_cache}, {"block_mapping", block_mapping}});
  const Blocks keys = blocks_of(op, "key_cache", key_cache),
               values = blocks_of(op, "value_cache", value_cache);
  PELTON_CHECK(keys.count == values.count, op, ": key_cache has ", keys.count, " blocks and value_cache ",
               values.count);
  check_index(op, "block_mapping", block_mapping, ScalarType::Long, {-1, 2});
  const CopyBlocksArgs key_args = copy_args(key_cache, keys, key_cache, keys, block_mapping);
  const CopyBlocksArgs value_args = copy_args(value_cache, values, value_cache, values, block_mapping);
  if constexpr (kGpu) {
    launch(op, key_cache, [&](void* stream) { return gpu::copy_blocks(key_args, value_args, stream); });
  } else {
    submit(
        [key_args, value_args] {
          check_block_mapping(op, key_args);
          run_copy(key_args);
          run_copy(value_args);
        },
        {key_cache, value_cache, block_mapping});
  }
}

#ifdef PELTON_GPU
// The GPU's address of a tensor's data, which may lie in pinned host memory.
void* data_for_gpu(const char* op, const char* name, const Tensor& t) {
  if (!kTensorsOnGpu || t.is_cuda() || t.numel() == 0) return t.mutable_data_ptr();
  void* data = gpu::device_view(t.const_data_ptr());
  PELTON_CHECK(data != nullptr, op, ": ", name,
               " is in host memory that is not pinned; allocate it with pin_memory=True");
  return data;
}

// One of src and dst may be in pinned host memory. A list in host memory is read now, and the copy engines do
// the work; a list on the GPU is read by a kernel, which a graph can replay with another list.
void swap_blocks_on_gpu(const char* op, const Tensor& src, Tensor& dst, const Tensor& block_mapping,
                        CopyBlocksArgs args) {
  const Tensor& on_gpu = src.is_cuda() ? src : dst;
  if constexpr (kTensorsOnGpu) {
    const NamedTensor first{src.is_cuda() ? "src" : "dst", on_gpu};
    check_device(op, {first});
    for (const NamedTensor& t : {NamedTensor{"src", src}, {"dst", dst}, {"block_mapping", block_mapping}}) {
      if (!t.tensor.is_cpu()) check_device(op, {first, t});
    }
  }
  args.from = data_for_gpu(op, "src", src);
  args.to = data_for_gpu(op, "dst", dst);
  const bool by_engine = kTensorsOnGpu && block_mapping.is_cpu();
  if (by_engine) check_block_mapping(op, args);
  launch(op, on_gpu, [&](void* stream) {
    return by_engine ? gpu::swap_blocks_by_engine(args, stream) : gpu::swap_blocks(args, stream);
  });
}
#endif

void swap_blocks(const Tensor& src, Tensor& dst, const Tensor& block_mapping) {
  constexpr const char* op = "swap_blocks";
  if constexpr (!kTensorsOnGpu) {
    check_device(op, {{"src", src}, {"dst", dst}, {"block_mapping", block_mapping}});
  }
  check_same_dtype(op, src, dst);
  const Blocks from = blocks_of(op, "src", src), to = blocks_of(op, "dst", dst);
  bool fits = src.dim() == dst.dim();
  for (int64_t d = 1; fits && d < src.dim(); ++d) fits = src.size(d) == dst.size(d);
  PELTON_CHECK(fits, op, ": src and dst must have blocks of one shape, found ", shape_of(src), " and ",
               shape_of(dst));
  check_index(op, "block_mapping", block_mapping, ScalarType::Long, {-1, 2});
  const CopyBlocksArgs args = copy_args(src, from, dst, to, block_mapping);
#ifdef PELTON_GPU
  swap_blocks_on_gpu(op, src, dst, block_mapping, args);
#else
  submit(
      [args] {
        check_block_mapping(op, args);
        run_copy(args);
      },
      {src, dst, block_mapping});
#endif
}

}  // namespace
}  // namespace pelton

STABLE_TORCH_LIBRARY_FRAGMENT(pelton, m) {
  m.def(
      "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor slot_mapping) -> ()");
  m.def("copy_blocks(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor block_mapping) -> ()");
  m.def("swap_blocks(Tensor src, Tensor(a!) dst, Tensor block_mapping) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(pelton, CompositeExplicitAutograd, m) {
  m.impl("reshape_and_cache", TORCH_BOX(&pelton::reshape_and_cache));
  m.impl("copy_blocks", TORCH_BOX(&pelton::copy_blocks));
  m.impl("swap_blocks", TORCH_BOX(&pelton::swap_blocks));
}
