// Boundary between device code (no torch) and the operators (no device code).
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

#include "../common/dtype.h"
#include "../common/rows.h"

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

// GPU launchers return the runtime's error, 0 for none. The lengths of a batch are known on the device alone,
// so that a graph can be replayed with others: grids are sized by num_tokens and num_seqs, and a sequence is
// the work of one kernel or another by what its block finds in query_start_loc.
namespace gpu {

// A decode tile's rows are queries x heads of a group. A sequence whose rows fit into this many is the decode
// kernel's, and so is every sequence with one query; all others are the prefill kernel's. A kernel that is
// launched alone takes all sequences.
constexpr int64_t kDecodeRows = 16;
PELTON_HOST_DEVICE constexpr bool attention_decodes(int64_t num_queries, int64_t group) {
  return num_queries == 1 || num_queries * group <= kDecodeRows;
}
enum class AttentionShare : int { all, decode, prefill };

int64_t attention_workspace_size(int64_t head_size);
int attention(const AttentionArgs& args, void* stream);  // chooses among the following

// Any dtype, head size and alignment, without matrix instructions (gpu.cu).
int attention_portable(const AttentionArgs& args, void* stream);

// The following take fp16 and bf16, a cache of the query's dtype and head sizes that are multiples of 8.
//
// mma.sync, sm_80 and later (decode.cuh, gpu_prefill.cu).
int attention_decode(const AttentionArgs& args, AttentionShare share, void* stream);
int attention_prefill(const AttentionArgs& args, AttentionShare share, void* stream);

// wgmma and TMA, sm_90a (gpu_sm90.cu), when the plan defines PELTON_HAS_SM90. `fits` looks at dtypes, sizes,
// strides and alignment, not at the device, which the caller knows to be of compute capability 9.0.
bool attention_sm90_fits(const AttentionArgs& args);
int attention_prefill_sm90(const AttentionArgs& args, AttentionShare share, void* stream);

// MFMA of CDNA, WMMA of RDNA 3 (gpu_decode_amd.cu, gpu_prefill_amd.cu). On GPUs without such instructions
// these kernels do what the portable one does.
int attention_decode_amd(const AttentionArgs& args, AttentionShare share, void* stream);
int attention_prefill_amd(const AttentionArgs& args, AttentionShare share, void* stream);

}  // namespace gpu

}  // namespace pelton
