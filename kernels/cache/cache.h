// Boundary between device code (no torch) and the operators (no device code).
#pragma once
#include <cstdint>

namespace pelton {

// Sizes and strides in bytes: the cache moves elements and does not look into them.

// New keys or values, [tokens, heads, head size], and the cache they go to, [blocks, heads, offset, head
// size].
struct CacheWrite {
  const void* from;
  int64_t from_token_stride, from_head_stride;
  void* to;
  int64_t to_block_stride, to_head_stride, to_offset_stride;
};

struct ReshapeAndCacheArgs {
  CacheWrite key, value;
  const int64_t* slot_mapping;  // [tokens]; negative: the token is skipped
  int64_t heads, head_bytes, block_size;
};

struct CopyBlocksArgs {
  const void* from;  // blocks from_stride apart
  void* to;          // blocks to_stride apart
  int64_t from_stride, to_stride;
  int64_t block_bytes;
  const int64_t* block_mapping;  // [pairs, 2]: source, destination
  int64_t pairs;
};

namespace cpu {
void reshape_and_cache(const ReshapeAndCacheArgs& args, int64_t first_token, int64_t last_token);
// Bytes [first, last) of every block in the mapping.
void copy_blocks(const CopyBlocksArgs& args, int64_t first, int64_t last);
}  // namespace cpu

}  // namespace pelton
