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
  int64_t heads, head_bytes, block_size, slots;
};

struct CopyBlocksArgs {
  const void* from;  // blocks from_stride apart
  void* to;          // blocks to_stride apart
  int64_t from_stride, to_stride;
  int64_t block_bytes;
  const int64_t* block_mapping;  // [pairs, 2]: source, destination
  int64_t pairs, sources, destinations;
};

namespace cpu {
void reshape_and_cache(const ReshapeAndCacheArgs& args, int64_t first_token, int64_t last_token);
// Bytes [first, last) of every block in the mapping.
void copy_blocks(const CopyBlocksArgs& args, int64_t first, int64_t last);
}  // namespace cpu

// GPU launchers return the runtime's error, 0 for none. Slots and pairs that are out of range are left out.
namespace gpu {
int reshape_and_cache(const ReshapeAndCacheArgs& args, int64_t tokens, void* stream);
// Both lists are the same.
int copy_blocks(const CopyBlocksArgs& keys, const CopyBlocksArgs& values, void* stream);
int swap_blocks(const CopyBlocksArgs& args, void* stream);
// The same by the copy engines; block_mapping is in host memory and right.
int swap_blocks_by_engine(const CopyBlocksArgs& args, void* stream);
// Where the GPU finds host memory that is pinned; null for other host memory.
void* device_view(const void* host);
}  // namespace gpu

}  // namespace pelton
