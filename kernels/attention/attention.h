// Boundary between device code (no torch) and the operators (no device code).
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

#include "../common/dtype.h"

namespace pelton {

struct AttentionArgs {
  void* out;                       // [tokens, num_heads, head_size]
  const void* query;               // [tokens, num_heads, head_size]
  const void* key_cache;           // [num_blocks, num_kv_heads, block_size, head_size]
  const void* value_cache;         // [num_blocks, num_kv_heads, block_size, head_size]
  const int32_t* query_start_loc;  // [num_seqs + 1]
  const int32_t* seq_lens;         // [num_seqs]
  const int32_t* block_tables;     // [num_seqs, max_blocks], row stride block_table_stride
  float* workspace;                // workspace_size floats
  int64_t num_tokens, num_seqs, num_heads, num_kv_heads, head_size;
  int64_t num_blocks, block_size, max_blocks, block_table_stride, workspace_size;
  int64_t query_token_stride, query_head_stride, out_token_stride, out_head_stride;
  int64_t sliding_window;  // 0: none
  float scale, soft_cap;   // soft_cap 0: none
  DType dtype, cache_dtype;
};

// One sequence of the batch as it is at run time, and where its work begins on the line of all work.
struct AttentionSequence {
  int64_t index, first_token, num_tokens, length, work_start;
};

// A tile of queries and one kv head whose context was cut between parts.
struct AttentionCut {
  int64_t sequence = -1, kv_head = 0, tile = 0;  // of the item that part i begins and another goes on with
  int64_t chunks = 0, chunks_done = 0;           // of that item: all of them, those that part i did
  int64_t chunks_continued = 0;                  // what part i did of the item that an earlier part began
};

// All work on one line, tile after tile of queries, cut into equal parts; a tile that is cut leaves
// partial results in the workspace, which `merge_attention` puts together.
struct AttentionPlan {
  std::vector<AttentionSequence> sequences;
  std::vector<AttentionCut> cuts;  // one a part
  int64_t work = 0, parts = 0;
  std::atomic<int64_t> bad_entry{
      -1};  // of block_tables, sequence * max_blocks + entry, when one is out of range
};

namespace cpu {
// Floats of workspace for a batch of `num_tokens` on `threads` threads.
int64_t attention_workspace_size(int64_t num_tokens, int64_t num_heads, int64_t head_size, int64_t threads);
// Reads query_start_loc and seq_lens, which must have been checked.
void plan_attention(const AttentionArgs& args, int64_t threads, AttentionPlan& plan);
void attention(const AttentionArgs& args, AttentionPlan& plan, int64_t part);
void merge_attention(const AttentionArgs& args, const AttentionPlan& plan, int64_t part);
}  // namespace cpu

}  // namespace pelton
