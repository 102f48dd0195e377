#include <memory>

#include "../common/device.h"
#include "../common/op.h"
#include "attention.h"

namespace pelton {
namespace {

constexpr int64_t kMaxHeadSize = 256;

// The run-time values: what the engine wrote into the index tensors before this step. On the GPU the kernels
// leave out what fails here.
void check_batch(const AttentionArgs& a) {
  int64_t last = 0;
  for (int64_t s = 0; s < a.num_seqs; ++s) {
    const int64_t first = a.query_start_loc[s], tokens = a.query_start_loc[s + 1] - first,
                  length = a.seq_lens[s];
    PELTON_CHECK(first >= last && tokens >= 0 && first + tokens <= a.num_tokens,
                 "paged_attention: query_start_loc must grow from 0 to at most ", a.num_tokens,
                 " tokens, sequence ", s, " has rows ", first, " to ", first + tokens);
    PELTON_CHECK(length >= 0 && length <= a.max_blocks * a.block_size, "paged_attention: seq_lens[", s,
                 "] is ", length, ", block_tables holds at most ", a.max_blocks * a.block_size, " positions");
    PELTON_CHECK(length == 0 || tokens <= length, "paged_attention: sequence ", s, " has ", tokens,
                 " queries and only ", length, " positions");
    last = first + tokens;
  }
}

void run(const AttentionArgs& args, AttentionPlan& plan) {
  check_batch(args);
  cpu::plan_attention(args, torch::stable::get_num_threads(), plan);
  if (plan.work == 0) return;
  parallel_tasks(plan.parts, [&](int64_t part) { cpu::attention(args, plan, part); });
  const int64_t bad = plan.bad_entry;
  PELTON_CHECK(bad < 0, "paged_attention: block_tables[", bad / args.max_blocks, "][", bad % args.max_blocks,
               "] is not one of the ", args.num_blocks, " blocks of the cache");
  const bool any_cut =
      std::any_of(plan.cuts.begin(), plan.cuts.end(), [](auto& c) { return c.sequence >= 0; });
  if (any_cut) parallel_tasks(plan.parts, [&](int64_t part) { cpu::merge_attention(args, plan, part); });
}

void paged_attention(Tensor& out, const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                     const Tensor& query_start_loc, const Tensor& seq_lens, const Tensor& block_tables,
                     Tensor& workspace, double scale, int64_t sliding_window, double soft_cap) {
  check_device("paged_attention", {{"query", query},
                                   {"key_cache", key_cache},
                                   {"value_cache", value_cache},
                                   {"query_start_loc", query_start_loc},
                                   {"seq_lens", seq_lens},
                                   {"block_tables", block_tables},
                                   {"workspace", workspace},
                                   {"out", out}});
  check_heads("paged_attention", "query", query);
  check_heads("paged_attention", "out", out);
  check_same_shape("paged_attention", "out", out, "query", query);
  check_same_dtype("paged_attention", query, out);
  check_same_dtype("paged_attention", key_cache, value_cache);
  const int64_t num_tokens = query.size(0), num_heads = query.size(1), head_size = query.size(2);
  PELTON_CHECK(head_size >= 1 && head_size <= kMaxHeadSize, "paged_attention: head_size must be 1 to ",
               kMaxHeadSize, ", found ", head_size);
  PELTON_CHECK(key_cache.dim() == 4 && key_cache.is_contiguous() && value_cache.is_contiguous() &&
                   key_cache.size(3) == head_size,
               "paged_attention: the caches must be contiguous, [num_blocks, num_kv_heads, block_size, ",
               head_size, "], found ", shape_of(key_cache));
  check_same_shape("paged_attention", "value_cache", value_cache, "key_cache", key_cache);
  const int64_t num_kv_heads = key_cache.size(1);
  PELTON_CHECK(num_kv_heads > 0 && num_heads % num_kv_heads == 0 && key_cache.size(2) > 0,
               "paged_attention: the ", num_heads, " heads of query must be a multiple of the cache's ",
               num_kv_heads, " heads, and block_size positive");
  const int64_t num_seqs = seq_lens.numel();
  check_index("paged_attention", "seq_lens", seq_lens, ScalarType::Int, {num_seqs});
  check_index("paged_attention", "query_start_loc", query_start_loc, ScalarType::Int, {num_seqs + 1});
  PELTON_CHECK(block_tables.scalar_type() == ScalarType::Int && block_tables.dim() == 2 &&
                   block_tables.size(0) == num_seqs &&
                   (block_tables.size(1) <= 1 || block_tables.stride(1) == 1),
               "paged_attention: block_tables must be int32, [", num_seqs,
               ", max_blocks] with contiguous rows, found ", shape_of(block_tables));
  PELTON_CHECK(
      workspace.scalar_type() == ScalarType::Float && workspace.dim() == 1 && workspace.is_contiguous(),
      "paged_attention: workspace must be contiguous float32 of one dimension");
  PELTON_CHECK(sliding_window >= 0, "paged_attention: sliding_window must be 0 (none) or positive, found ",
               sliding_window);
  PELTON_CHECK(soft_cap >= 0, "paged_attention: soft_cap must be 0 (none) or positive, found ", soft_cap);
  const AttentionArgs args{.out = out.mutable_data_ptr(),
                           .query = query.const_data_ptr(),
                           .key_cache = key_cache.const_data_ptr(),
                           .value_cache = value_cache.const_data_ptr(),
                           .query_start_loc = query_start_loc.const_data_ptr<int32_t>(),
                           .seq_lens = seq_lens.const_data_ptr<int32_t>(),
                           .block_tables = block_tables.const_data_ptr<int32_t>(),
                           .workspace = workspace.mutable_data_ptr<float>(),
                           .num_tokens = num_tokens,
                           .num_seqs = num_seqs,
                           .num_heads = num_heads,
                           .num_kv_heads = num_kv_heads,
                           .head_size = head_size,
                           .num_blocks = key_cache.size(0),
                           .block_size = key_cache.size(2),
                           .max_blocks = block_tables.size(1),
                           .block_table_stride = block_tables.stride(0),
                           .workspace_size = workspace.size(0),
                           .query_token_stride = query.stride(0),
                           .query_head_stride = query.stride(1),
                           .out_token_stride = out.stride(0),
                           .out_head_stride = out.stride(1),
                           .sliding_window = sliding_window,
                           .scale = float(scale),
                           .soft_cap = float(soft_cap),
                           .dtype = dtype_of("paged_attention", query),
                           .cache_dtype = dtype_of("paged_attention", key_cache)};
  if constexpr (kGpu) {
    launch("paged_attention", query, [&](void* stream) { return gpu::attention(args, stream); });
  } else {
    // The plan is made anew in each run; shared, so that replays find its memory allocated.
    submit([args, plan = std::make_shared<AttentionPlan>()] { run(args, *plan); },
           {out, query, key_cache, value_cache, query_start_loc, seq_lens, block_tables, workspace});
  }
}

int64_t workspace_size(int64_t num_tokens, int64_t num_heads, int64_t head_size) {
  if constexpr (kGpu) {
    return gpu::attention_workspace_size(head_size);
  } else {
    return cpu::attention_workspace_size(num_tokens, num_heads, head_size, torch::stable::get_num_threads());
  }
}

}  // namespace
}  // namespace pelton

STABLE_TORCH_LIBRARY_FRAGMENT(pelton, m) {
  m.def(
      "paged_attention(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache, Tensor "
      "query_start_loc, "
      "Tensor seq_lens, Tensor block_tables, Tensor(b!) workspace, float scale, int sliding_window, "
      "float soft_cap) -> ()");
  m.def("paged_attention_workspace_size(int num_tokens, int num_heads, int head_size) -> int");
}
STABLE_TORCH_LIBRARY_IMPL(pelton, CompositeExplicitAutograd, m) {
  m.impl("paged_attention", TORCH_BOX(&pelton::paged_attention));
  m.impl("paged_attention_workspace_size", TORCH_BOX(&pelton::workspace_size));
}
