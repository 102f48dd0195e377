// The paged KV cache: writing new tokens into their slots, copying blocks.
// Writes are split over tokens. Copies are split over the bytes of a block, and each thread follows
// the whole list for its bytes: so pairs take effect in the order of the list, chains included.
// Method: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
// PagedAttention", 2023.
#include <cstring>

#include "cache.h"

namespace pelton::cpu {
namespace {

void write_token(const CacheWrite& w, int64_t token, int64_t block, int64_t offset, int64_t heads,
                 int64_t head_bytes) {
  const char* from = static_cast<const char*>(w.from) + token * w.from_token_stride;
  char* to = static_cast<char*>(w.to) + block * w.to_block_stride + offset * w.to_offset_stride;
  for (int64_t head = 0; head < heads; ++head)
    std::memcpy(to + head * w.to_head_stride, from + head * w.from_head_stride, size_t(head_bytes));
}

}  // namespace

void reshape_and_cache(const ReshapeAndCacheArgs& a, int64_t first_token, int64_t last_token) {
  for (int64_t token = first_token; token < last_token; ++token) {
    const int64_t slot = a.slot_mapping[token];
    if (slot < 0) continue;
    const int64_t block = slot / a.block_size, offset = slot % a.block_size;
    write_token(a.key, token, block, offset, a.heads, a.head_bytes);
    write_token(a.value, token, block, offset, a.heads, a.head_bytes);
  }
}

void copy_blocks(const CopyBlocksArgs& a, int64_t first, int64_t last) {
  for (int64_t pair = 0; pair < a.pairs; ++pair) {
    const int64_t source = a.block_mapping[2 * pair], destination = a.block_mapping[2 * pair + 1];
    // memmove, because a block may be copied onto itself.
    std::memmove(static_cast<char*>(a.to) + destination * a.to_stride + first,
                 static_cast<const char*>(a.from) + source * a.from_stride + first, size_t(last - first));
  }
}

}  // namespace pelton::cpu
