// The paged KV cache on the GPU: writing new tokens into their slots, copying blocks, also to and from pinned
// host memory. Writes go over the bytes of a head (x), the heads (y) and tokens (z); copies over the bytes of
// a block (x), pairs (y) and the two caches (z), and pairs take effect in the order of the list. Method: Kwon
// et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023.
#include "../common/gpu.cuh"
#include "cache.h"

namespace pelton::gpu {
namespace {

constexpr int kWriteThreads = 256;
constexpr int kCopyThreads = 256;
constexpr int kUnroll = 4;      // pairs that a thread has under way together
constexpr int kListPart = 512;  // pairs that a kernel looks through for clashes

template <class T>
__device__ __forceinline__ T* at(void* base, int64_t bytes) {
  return reinterpret_cast<T*>(static_cast<char*>(base) + bytes);
}
template <class T>
__device__ __forceinline__ const T* at(const void* base, int64_t bytes) {
  return reinterpret_cast<const T*>(static_cast<const char*>(base) + bytes);
}

template <class Access>
__global__ void __launch_bounds__(kWriteThreads)
    reshape_and_cache_kernel(const ReshapeAndCacheArgs a, int64_t tokens, Divisor block_size) {
  const int64_t token = int64_t(blockIdx.x) * blockDim.z + threadIdx.z;
  if (token >= tokens) return;
  const int items = int(a.head_bytes / int64_t(sizeof(Access))), heads = int(a.heads);
  const void* key = at<void>(a.key.from, token * a.key.from_token_stride);
  const void* value = at<void>(a.value.from, token * a.value.from_token_stride);
  const int64_t slot = a.slot_mapping[token];
  for (int head = threadIdx.y; head < heads; head += blockDim.y) {
    for (int i = threadIdx.x; i < items; i += blockDim.x) {
      const Access k = at<Access>(key, head * a.key.from_head_stride)[i];
      const Access v = at<Access>(value, head * a.value.from_head_stride)[i];
      if (uint64_t(slot) >= uint64_t(a.slots)) return;  // asked after the loads, which do not wait for it
      int64_t offset;
      const int64_t block = block_size.divide(slot, offset);
      at<Access>(a.key.to, block * a.key.to_block_stride + offset * a.key.to_offset_stride +
                               head * a.key.to_head_stride)[i] = k;
      at<Access>(a.value.to, block * a.value.to_block_stride + offset * a.value.to_offset_stride +
                                 head * a.value.to_head_stride)[i] = v;
    }
  }
}

struct CopyLists {
  CopyBlocksArgs list[2];
};

// Part of a list of pairs, as addresses; a pair that is out of range or copies a block onto itself is left
// out.
struct Pairs {
  static constexpr int kSlots = 2 * kListPart;
  int64_t source[kListPart], destination[kListPart];  // destination 0: left out
  int written[kSlots];  // hash table of the destinations: number of the pair + 1, 0 for a free slot
  int ordered;          // not 0: a pair reads or writes what another one writes

  static __device__ __forceinline__ int slot_of(int64_t block) {
    return int(uint64_t(block) * 0x9e3779b97f4a7c15u >> 40) % kSlots;
  }
  __device__ __forceinline__ bool is_written(int64_t block) const {
    for (int slot = slot_of(block); written[slot] != 0; slot = (slot + 1) % kSlots) {
      if (destination[written[slot] - 1] == block) return true;
    }
    return false;
  }
  // Notes that a pair writes `block`, unless one does already.
  __device__ __forceinline__ bool write(int64_t block, int pair) {
    for (int slot = slot_of(block);; slot = (slot + 1) % kSlots) {
      const int other = atomicCAS(&written[slot], 0, pair + 1);
      if (other == 0) return true;
      if (destination[other - 1] == block) return false;
    }
  }

  // All threads of the block together.
  __device__ __forceinline__ void read(const CopyBlocksArgs& a, int64_t first, int count) {
    if (threadIdx.x == 0) ordered = 0;
    for (int i = threadIdx.x; i < kSlots; i += kCopyThreads) written[i] = 0;
    for (int i = threadIdx.x; i < count; i += kCopyThreads) {
      const int64_t from = a.block_mapping[2 * (first + i)], to = a.block_mapping[2 * (first + i) + 1];
      const bool known = uint64_t(from) < uint64_t(a.sources) && uint64_t(to) < uint64_t(a.destinations);
      source[i] = int64_t(reinterpret_cast<uintptr_t>(a.from)) + from * a.from_stride;
      destination[i] = int64_t(reinterpret_cast<uintptr_t>(a.to)) + to * a.to_stride;
      if (!known || source[i] == destination[i]) destination[i] = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kCopyThreads) {
      if (destination[i] != 0 && !write(destination[i], i)) atomicOr(&ordered, 1);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kCopyThreads) {
      if (destination[i] != 0 && is_written(source[i])) atomicOr(&ordered, 1);
    }
    __syncthreads();
  }
};

// One part of the list. Pairs without a clash are split over the grid's y; else each thread of y = 0 follows
// them for its bytes, one after the other.
template <class Access>
__global__ void __launch_bounds__(kCopyThreads)
    copy_blocks_kernel(const CopyLists lists, int64_t first, int count) {
  __shared__ Pairs pairs;
  const CopyBlocksArgs& a = lists.list[blockIdx.z];
  pairs.read(a, first, count);
  if (pairs.ordered && blockIdx.y > 0) return;
  const int64_t items = a.block_bytes / int64_t(sizeof(Access));
  const int64_t item = int64_t(blockIdx.x) * kCopyThreads + threadIdx.x;
  if (item >= items) return;
  const auto from = [&](int i) { return reinterpret_cast<const Access*>(uintptr_t(pairs.source[i])) + item; };
  const auto to = [&](int i) { return reinterpret_cast<Access*>(uintptr_t(pairs.destination[i])) + item; };
  if (pairs.ordered) {
    for (int i = 0; i < count; ++i) {
      if (pairs.destination[i] != 0) *to(i) = *from(i);
    }
    return;
  }
  for (int start = blockIdx.y; start < count; start += kUnroll * gridDim.y) {
    Access part[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = start + u * gridDim.y;
      if (i < count && pairs.destination[i] != 0) part[u] = *from(i);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = start + u * gridDim.y;
      if (i < count && pairs.destination[i] != 0) *to(i) = part[u];
    }
  }
}

int copy_accesses(const CopyBlocksArgs& a) {
  return access_bytes({address(a.from), address(a.to), a.from_stride, a.to_stride, a.block_bytes});
}

// The first `num_lists` lists, which have the same pairs.
int copy(const CopyLists& lists, int num_lists, void* stream) {
  const CopyBlocksArgs &first = lists.list[0], &second = lists.list[1];
  const int64_t most = std::max(first.block_bytes, second.block_bytes);
  if (first.pairs == 0 || most == 0) return 0;
  const int bytes = std::min(copy_accesses(first), copy_accesses(second));
  const unsigned x = grid_size(ceil_div<int64_t>(most / bytes, kCopyThreads));
  for (int64_t start = 0; start < first.pairs; start += kListPart) {  // the parts one after the other
    const int count = int(std::min<int64_t>(kListPart, first.pairs - start));
    const dim3 grid(x, unsigned(ceil_div(count, kUnroll)), unsigned(num_lists));
    dispatch_access(bytes, [&](auto access) {
      copy_blocks_kernel<decltype(access)>
          <<<grid, kCopyThreads, 0, cudaStream_t(stream)>>>(lists, start, count);
    });
  }
  return launch_result();
}

}  // namespace

int reshape_and_cache(const ReshapeAndCacheArgs& a, int64_t tokens, void* stream) {
  if (tokens == 0 || a.heads == 0 || a.head_bytes == 0 || a.slots == 0) return 0;
  int bytes = access_bytes({a.head_bytes});
  for (const CacheWrite& w : {a.key, a.value}) {
    bytes =
        std::min(bytes, access_bytes({address(w.from), address(w.to), w.from_token_stride, w.from_head_stride,
                                      w.to_block_stride, w.to_head_stride, w.to_offset_stride}));
  }
  const int x = int(std::min<int64_t>(a.head_bytes / bytes, kWriteThreads));
  const int y = int(std::min<int64_t>(a.heads, kWriteThreads / x));
  const int z = std::min(kWriteThreads / (x * y), 64);
  dispatch_access(bytes, [&](auto access) {
    reshape_and_cache_kernel<decltype(access)>
        <<<grid_size(ceil_div<int64_t>(tokens, z)), dim3(x, y, z), 0, cudaStream_t(stream)>>>(
            a, tokens, Divisor(a.block_size));
  });
  return launch_result();
}

int copy_blocks(const CopyBlocksArgs& keys, const CopyBlocksArgs& values, void* stream) {
  return copy({{keys, values}}, 2, stream);
}

int swap_blocks(const CopyBlocksArgs& args, void* stream) { return copy({{args, args}}, 1, stream); }

int swap_blocks_by_engine(const CopyBlocksArgs& a, void* stream) {
  if (a.block_bytes == 0) return 0;
  // Pairs that go on where the one before ended are one copy, unless one might read what another writes.
  const int64_t from = address(a.from), to = address(a.to);
  const bool apart = from + a.sources * a.from_stride <= to || to + a.destinations * a.to_stride <= from;
  const bool joins = apart && a.from_stride == a.block_bytes && a.to_stride == a.block_bytes;
  for (int64_t pair = 0, next; pair < a.pairs; pair = next) {
    const int64_t source = a.block_mapping[2 * pair], destination = a.block_mapping[2 * pair + 1];
    next = pair + 1;
    while (joins && next < a.pairs && a.block_mapping[2 * next] == source + next - pair &&
           a.block_mapping[2 * next + 1] == destination + next - pair) {
      ++next;
    }
    const auto error =
        cudaMemcpyAsync(static_cast<char*>(a.to) + destination * a.to_stride,
                        static_cast<const char*>(a.from) + source * a.from_stride,
                        size_t((next - pair) * a.block_bytes), cudaMemcpyDefault, cudaStream_t(stream));
    if (error != cudaSuccess) return int(error);
  }
  return 0;
}

void* device_view(const void* host) {
  void* view = nullptr;
  if (!pinned_view(host, &view)) launch_result();  // forget the error
  return view;
}

}  // namespace pelton::gpu
