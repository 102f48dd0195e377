// Prefill attention on Hopper: a tile is kRows rows of queries x heads of one kv head (heads that share keys
// are packed into rows), its keys come in tiles of kKeys. A persistent block has a producer warpgroup, whose
// warps choose the work, and copy queries, keys and values by TMA, box by box as the block table says, and
// kWarpgroups consumers of 64 rows each, which take turns: while one multiplies, another does its softmax
// (and its own next product). Source: Shah et al., "FlashAttention-3", 2024; Dao, "FlashAttention-2", 2023;
// Kwon et al., "PagedAttention", 2023.
#pragma once
#include "../common/hopper.cuh"
#include "batch.cuh"

namespace pelton::gpu::sm90 {

// Tile sizes and depth of the pipeline. kTurns: consumers take turns at issuing products.
template <int HeadSize, int Warpgroups, int Keys, int Stages, bool Turns>
struct Config {
  static constexpr int kHeadSize = HeadSize, kWarpgroups = Warpgroups, kKeys = Keys, kStages = Stages;
  static constexpr bool kTurns = Turns;
  static constexpr int kRows = 64 * Warpgroups;
  static constexpr int kThreads = kWarpgroup * (Warpgroups + 1);
  static constexpr int kHalves = ceil_div(HeadSize, 64);  // columns of 64 elements, 128 bytes
  static constexpr int kProducerRegisters = Warpgroups == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = Warpgroups == 2 ? 232 : Warpgroups == 3 ? 160 : 112;
};

// One tile of queries: rows [0, tokens * pack) are query tokens first_row ... and heads first_head ...
struct Item {
  int sequence, kv_head, first_head;
  int first_row, tokens, position, length;  // of the first token; of the sequence
  int begin, end;                           // tiles of keys; none at the end of all work
};

struct Launch {
  CUtensorMap query, keys, values;
  AttentionArgs args;
  int pack, tile_tokens;  // heads in a tile, tokens in a tile
  int box_keys;           // keys that one copy brings: what divides a block and a tile
  int head_units;         // kv heads x tiles of heads that share one
  bool only_prefill;      // AttentionShare::prefill
};

template <class C>
struct alignas(1024) Shared {
  uint16_t query[C::kHalves][C::kRows][64];
  uint16_t keys[C::kStages][C::kHalves][C::kKeys][64];
  uint16_t values[C::kStages][C::kHalves][C::kKeys][64];
  Barrier query_full, query_empty;
  Barrier keys_full[C::kStages], keys_empty[C::kStages];
  Barrier values_full[C::kStages], values_empty[C::kStages];
  Barrier item_full[2], item_empty[2];
  Item items[2];
};

// A place in a ring of Count slots and the parity to wait for.
template <int Count>
struct Slot {
  int index = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++index == Count) {
      index = 0;
      parity ^= 1;
    }
  }
};

// ---------------------------------------------------------------- which tile is whose

// Tiles of keys that a tile of queries reads are its level. All tiles are ordered by falling level; block b
// takes the ranks b, 2 n - 1 - b, 2 n + b, ... of n blocks, so that long and short tiles add up alike. What
// the host does not know, the lengths, one warp counts: tiles of a level or above are a closed form of each
// sequence.
template <class C>
struct Order {
  const Launch& launch;
  int lane;

  struct Lengths {
    int num_queries, length;
  };
  __device__ __forceinline__ Lengths lengths(int index) const {
    if (index >= launch.args.num_seqs) return {0, 0};
    const Sequence s = sequence_of(launch.args, index);
    const int group = int(launch.args.num_heads / launch.args.num_kv_heads);
    if (launch.only_prefill && attention_decodes(s.num_queries, group)) return {0, 0};
    return {s.num_queries, s.length};
  }
  // The tiles of a sequence whose level is `level` (1 or more) or above; they are its last.
  __device__ __forceinline__ int tiles(Lengths s, int level) const {
    const int below = (level - 1) * C::kKeys;
    if (s.num_queries == 0 || s.length <= below) return 0;
    return ceil_div(s.num_queries, launch.tile_tokens) -
           max(0, below - (s.length - s.num_queries)) / launch.tile_tokens;
  }
  __device__ __forceinline__ int count(int level) const {
    int sum = 0;
    for (int s = lane; s < launch.args.num_seqs; s += kWarp) sum += tiles(lengths(s), level);
    return __reduce_add_sync(kAllLanes, sum);
  }

  // The tile of this rank, for all lanes; `high` is a level above it before, and its own + 1 after.
  __device__ Item find(int64_t rank, int& high) const {
    const AttentionArgs& a = launch.args;
    const int tile_rank = int(rank / launch.head_units), unit = int(rank % launch.head_units);
    int low = 0, above = 0;  // count(low) > tile_rank >= count(high); `above` is count(high)
    while (high - low > 1) {
      const int middle = (low + high) / 2, found = count(middle);
      if (found > tile_rank) {
        low = middle;
      } else {
        high = middle;
        above = found;
      }
    }
    Item item{};
    if (low == 0) return item;  // no such tile
    if (above == 0) above = count(high);
    int left = tile_rank - above;
    for (int first = 0;; first += kWarp) {
      const Lengths s = lengths(first + lane);
      const int higher = tiles(s, high), own = tiles(s, low) - higher;
      int until = own;
#pragma unroll
      for (int step = 1; step < kWarp; step *= 2) {
        const int other = __shfl_up_sync(kAllLanes, until, step, kWarp);
        if (lane >= step) until += other;
      }
      const unsigned holders = __ballot_sync(kAllLanes, until > left);
      if (holders == 0) {
        left -= shuffle(until, kWarp - 1);
        continue;
      }
      const int holder = __ffs(int(holders)) - 1;
      const int tile = ceil_div(s.num_queries, launch.tile_tokens) - 1 - higher - (left - (until - own));
      const int token = shuffle(tile, holder) * launch.tile_tokens;
      const int num_queries = shuffle(s.num_queries, holder);
      item.sequence = first + holder;
      item.length = shuffle(s.length, holder);
      item.tokens = min(launch.tile_tokens, num_queries - token);
      item.first_row = a.query_start_loc[item.sequence] + token;
      item.position = item.length - num_queries + token;
      break;
    }
    const int group = int(a.num_heads / a.num_kv_heads), parts = group / launch.pack;
    item.kv_head = unit / parts;
    item.first_head = item.kv_head * group + unit % parts * launch.pack;
    item.begin = first_visible(a, item.position) / C::kKeys;
    item.end = low;
    return item;
  }
};

template <class C>
__device__ void choose_items(const Launch& launch, Shared<C>& shared, int lane) {
  const Order<C> order{launch, lane};
  int high = int(ceil_div<int64_t>(launch.args.max_blocks * launch.args.block_size, C::kKeys)) + 1;
  Slot<2> slot;
  for (int64_t round = 0;; ++round) {
    const int64_t place = round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
    const Item item = order.find(round * gridDim.x + place, high);
    shared.item_empty[slot.index].wait(slot.parity ^ 1);
    if (lane == 0) {
      shared.items[slot.index] = item;
      shared.item_full[slot.index].arrive();
    }
    if (item.end == 0) return;
    slot.next();
  }
}

// The next item, for a warp that calls it.
template <class C>
__device__ __forceinline__ Item next_item(Shared<C>& shared, Slot<2>& slot, int lane) {
  shared.item_full[slot.index].wait(slot.parity);
  const Item item = shared.items[slot.index];
  __syncwarp();
  if (lane == 0) shared.item_empty[slot.index].arrive();
  slot.next();
  return item;
}

// ---------------------------------------------------------------- copies

// Brings the keys (with the queries before them) or the values of all items, the last tile of an item first.
template <class C, bool kAreKeys>
__device__ void copy_tiles(const Launch& launch, Shared<C>& shared, int lane) {
  const AttentionArgs& a = launch.args;
  const CUtensorMap& map = kAreKeys ? launch.keys : launch.values;
  Barrier* full = kAreKeys ? shared.keys_full : shared.values_full;
  Barrier* empty = kAreKeys ? shared.keys_empty : shared.values_empty;
  auto& stages = kAreKeys ? shared.keys : shared.values;
  const int box = launch.box_keys, boxes = C::kKeys / box, block_size = int(a.block_size);
  Slot<C::kStages> slot;
  Slot<1> query;
  for (Slot<2> item_slot;;) {
    const Item item = next_item<C>(shared, item_slot, lane);
    if (item.end == 0) return;
    const int32_t* table = a.block_tables + item.sequence * a.block_table_stride;
    // Lane b has box b of a tile. What lies past the sequence's end, or in no block of the cache, becomes
    // zero.
    const auto block_of = [&](int tile) {
      const int key = tile * C::kKeys + lane * box;
      return lane < boxes && tile >= item.begin && key < item.length ? table[key / block_size] : -1;
    };
    if constexpr (kAreKeys) {
      shared.query_empty.wait(query.parity ^ 1);
      query.next();
      if (lane == 0) {
        shared.query_full.arrive_and_expect(C::kHalves * launch.tile_tokens * launch.pack * 128);
        for (int half = 0; half < C::kHalves; ++half) {
          copy_box(shared.query[half], launch.query, shared.query_full, half * 64, item.first_head,
                   item.first_row);
        }
      }
    }
    int block = block_of(item.end - 1);
    for (int tile = item.end - 1; tile >= item.begin; --tile) {
      const int next_block = block_of(tile - 1);
      empty[slot.index].wait(slot.parity ^ 1);
      if (lane == 0) full[slot.index].arrive_and_expect(C::kHalves * C::kKeys * 128);
      __syncwarp();
      if (lane < boxes) {
        const int row = (tile * C::kKeys + lane * box) % block_size;
#pragma unroll
        for (int half = 0; half < C::kHalves; ++half) {
          copy_box(stages[slot.index][half][lane * box], map, full[slot.index], half * 64, row, item.kv_head,
                   block);
        }
      }
      block = next_block;
      slot.next();
    }
  }
}

// ---------------------------------------------------------------- softmax

// The running softmax of a thread's two rows, in units where 2^x is the weight.
struct Softmax {
  float scale_log2;
  float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};

  // Scores become weights; `keep` is what results so far are worth then.
  template <int N>
  __device__ __forceinline__ void weigh(float (&s)[N], float (&keep)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float m = maximum[r];
#pragma unroll
      for (int i = 2 * r; i < N; i += 4) m = fmaxf(m, fmaxf(s[i], s[i + 1]));
      m = fmaxf(m, shuffle_xor(m, 1));
      m = fmaxf(m, shuffle_xor(m, 2));
      const float base = m == -INFINITY ? 0 : m * scale_log2;  // a row may have seen no key yet
      keep[r] = exp2_fast(maximum[r] * scale_log2 - base);
      maximum[r] = m;
      float total[2] = {sum[r] * keep[r], 0};
#pragma unroll
      for (int i = 2 * r; i < N; i += 4) {
        s[i] = exp2_fast(s[i] * scale_log2 - base);
        s[i + 1] = exp2_fast(s[i + 1] * scale_log2 - base);
        total[0] += s[i];
        total[1] += s[i + 1];
      }
      sum[r] = total[0] + total[1];
    }
  }
};

// Hides the keys that rows at these positions do not see. Column i of the tile is the key first_key + i.
template <class C>
__device__ __forceinline__ void mask(float (&s)[C::kKeys / 2], int first_key, const Item& item,
                                     const int (&position)[2], int window, int lane) {
  const int column = first_key + lane % 4 * 2;
  if (first_key + C::kKeys - 1 > item.position) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int last = position[r] - column;
#pragma unroll
      for (int i = 0; i < C::kKeys / 8; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (8 * i + e > last) s[4 * i + 2 * r + e] = -INFINITY;
        }
      }
    }
  }
  if (window > 0 && first_key <= item.position + item.tokens - 1 - window) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int first = position[r] - window + 1 - column;
#pragma unroll
      for (int i = 0; i < C::kKeys / 8; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (8 * i + e < first) s[4 * i + 2 * r + e] = -INFINITY;
        }
      }
    }
  }
}

// Four registers of each of four neighbouring lanes, transposed.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], int lane) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool odd = lane & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t got = shuffle_xor(odd ? w[i] : w[i + step], step);
      (odd ? w[i] : w[i + step]) = got;
    }
  }
}

// ---------------------------------------------------------------- products

// What a consumer warpgroup does with all items.
template <class C, class T, bool kSoftCap>
__device__ void attend(const Launch& launch, Shared<C>& shared, int warpgroup) {
  constexpr int kHalfBytes = C::kKeys * 128, kStageBytes = C::kHalves * kHalfBytes;
  constexpr int kQueryHalfBytes = C::kRows * 128;
  const AttentionArgs& a = launch.args;
  const int thread = threadIdx.x % kWarpgroup, lane = thread % kWarp;
  const int own_turn = 1 + warpgroup, next_turn = 1 + (warpgroup + 1) % C::kWarpgroups;
  const int own_barrier = 1 + C::kWarpgroups + warpgroup;
  const int window = int(min(a.sliding_window, int64_t(1) << 30));
  const uint64_t query_tile = tile_descriptor(shared.query[0][64 * warpgroup]);
  const uint64_t key_tiles = tile_descriptor(shared.keys);
  const uint64_t value_tiles = tile_descriptor(shared.values, kHalfBytes);
  // Rows of this thread in the tile: heads of a token are neighbours.
  int row_token[2], row_head[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 64 * warpgroup + thread / kWarp * 16 + lane / 4 + 8 * r;
    row_token[r] = row / launch.pack;
    row_head[r] = row % launch.pack;
  }

  Slot<C::kStages> key_slot, value_slot;
  float s[C::kKeys / 2], o[C::kHeadSize / 2];
  uint32_t p[C::kKeys / 4];  // the weights as A of the second product

  const auto multiply_keys = [&](int stage) {
#pragma unroll
    for (int k = 0; k < C::kHeadSize / 16; ++k) {
      product_shared<T>(s, descriptor_at(query_tile, k / 4 * kQueryHalfBytes + k % 4 * 32),
                        descriptor_at(key_tiles, stage * kStageBytes + k / 4 * kHalfBytes + k % 4 * 32),
                        k > 0);
    }
    product_commit();
  };
  const auto multiply_values = [&](int stage) {
#pragma unroll
    for (int k = 0; k < C::kKeys / 16; ++k) {
      product_registers<T>(o, p + 4 * k, descriptor_at(value_tiles, stage * kStageBytes + k * 2048));
    }
    product_commit();
  };
  const auto pack_weights = [&] {
#pragma unroll
    for (int i = 0; i < C::kKeys / 4; ++i) p[i] = pack2<T>(s[2 * i], s[2 * i + 1]);
  };
  const auto wait_for_keys = [&](bool more) {
    if (more) shared.keys_full[key_slot.index].wait(key_slot.parity);
  };
  const auto release = [&](Barrier& barrier) {
    if (lane == 0) barrier.arrive();
  };

  Slot<1> query_slot;
  if (C::kTurns && warpgroup == 0) named_arrive(own_turn, 2 * kWarpgroup);

  for (Slot<2> item_slot;;) {
    const Item item = next_item<C>(shared, item_slot, lane);
    if (item.end == 0) break;
    const int position[2] = {item.position + row_token[0], item.position + row_token[1]};
    Softmax softmax{kSoftCap ? a.soft_cap * kLog2e : a.scale * kLog2e};
    float keep[2];
    const auto weigh = [&](int tile) {
      if constexpr (kSoftCap) {  // tanh(x) = 1 - 2 / (e^2x + 1)
        const float inner = 2 * kLog2e * a.scale / a.soft_cap;
#pragma unroll
        for (int i = 0; i < C::kKeys / 2; ++i) s[i] = 1 - __fdividef(2, exp2_fast(s[i] * inner) + 1);
      }
      mask<C>(s, tile * C::kKeys, item, position, window, lane);
      softmax.weigh(s, keep);
    };

    shared.query_full.wait(query_slot.parity);
    query_slot.next();
    shared.keys_full[key_slot.index].wait(key_slot.parity);
    product_fence();
    multiply_keys(key_slot.index);
    product_wait<0>();
    pin(s);
    release(shared.keys_empty[key_slot.index]);
    key_slot.next();
    weigh(item.end - 1);
    pack_weights();
#pragma unroll
    for (int i = 0; i < C::kHeadSize / 2; ++i) o[i] = 0;
    // A weight of zero does not hide what is not finite: values past the sequence's end are set to zero. (The
    // boxes past the last block are zero already.)
    if (item.end * C::kKeys > item.length) {
      shared.values_full[value_slot.index].wait(value_slot.parity);
      const int first = item.length - (item.end - 1) * C::kKeys;
      const int rows = ceil_div(first, launch.box_keys) * launch.box_keys - first;
      for (int i = thread; i < rows * 8 * C::kHalves; i += kWarpgroup) {
        const int half = i % C::kHalves, row = first + i / C::kHalves / 8, part = i / C::kHalves % 8;
        *reinterpret_cast<uint4*>(&shared.values[value_slot.index][half][row][8 * part]) = uint4{};
      }
      fence_shared_stores();
      named_sync(own_barrier, kWarpgroup);
    }

    wait_for_keys(item.end - 1 > item.begin);
    for (int tile = item.end - 2; tile >= item.begin; --tile) {
      if constexpr (C::kTurns) named_sync(own_turn, 2 * kWarpgroup);
      pin(o);
      pin(p);
      pin(s);
      product_fence();
      multiply_keys(key_slot.index);
      shared.values_full[value_slot.index].wait(value_slot.parity);
      multiply_values(value_slot.index);
      if constexpr (C::kTurns) named_arrive(next_turn, 2 * kWarpgroup);
      product_wait<1>();
      pin(s);
      release(shared.keys_empty[key_slot.index]);
      key_slot.next();
      weigh(tile);
      pin(s);
      wait_for_keys(tile > item.begin);  // a branch that keeps the compiler from waiting before the softmax
      product_wait<0>();
      pin(o);
      pin(p);
      release(shared.values_empty[value_slot.index]);
      value_slot.next();
      pack_weights();
#pragma unroll
      for (int i = 0; i < C::kHeadSize / 2; ++i) o[i] *= keep[i / 2 % 2];
    }
    release(shared.query_empty);
    shared.values_full[value_slot.index].wait(value_slot.parity);
    pin(o);
    pin(p);
    product_fence();
    multiply_values(value_slot.index);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      softmax.sum[r] += shuffle_xor(softmax.sum[r], 1);
      softmax.sum[r] += shuffle_xor(softmax.sum[r], 2);
    }
    product_wait<0>();
    pin(o);
    release(shared.values_empty[value_slot.index]);
    value_slot.next();

#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float factor = softmax.sum[r] == 0 ? 0 : 1 / softmax.sum[r];
      const bool writes = row_token[r] < item.tokens;
      T* out = static_cast<T*>(a.out) + (item.first_row + row_token[r]) * a.out_token_stride +
               (item.first_head + row_head[r]) * a.out_head_stride;
#pragma unroll
      for (int group = 0; group < C::kHeadSize / 8; group += 4) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 4 * (group + i) + 2 * r;
          w[i] = pack2<T>(o[at] * factor, o[at + 1] * factor);
        }
        transpose_quad(w, lane);
        if (writes) *reinterpret_cast<uint4*>(out + 8 * (group + lane % 4)) = uint4{w[0], w[1], w[2], w[3]};
      }
    }
  }
  // The last turn that was given to the first is still open: nobody waits for it, and the block's barriers
  // end with it.
  if (C::kTurns && warpgroup == 0) named_sync(own_turn, 2 * kWarpgroup);
}

template <class C, class T, bool kSoftCap>
__global__ void __launch_bounds__(C::kThreads, 1) prefill_kernel(const __grid_constant__ Launch launch) {
  Shared<C>& shared = *dynamic_shared<Shared<C>>();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4 * C::kWarpgroups;
    shared.query_full.init(1);
    shared.query_empty.init(kWarps);
    for (int i = 0; i < C::kStages; ++i) {
      shared.keys_full[i].init(1);
      shared.values_full[i].init(1);
      shared.keys_empty[i].init(kWarps);
      shared.values_empty[i].init(kWarps);
    }
    for (int i = 0; i < 2; ++i) {
      shared.item_full[i].init(1);
      shared.item_empty[i].init(kWarps + 2);
    }
    fence_barrier_init();
    prefetch_map(launch.query);
    prefetch_map(launch.keys);
    prefetch_map(launch.values);
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    release_registers<C::kProducerRegisters>();
    if (warp == 0) {
      copy_tiles<C, true>(launch, shared, lane);
    } else if (warp == 1) {
      copy_tiles<C, false>(launch, shared, lane);
    } else if (warp == 2) {
      choose_items<C>(launch, shared, lane);
    }
  } else {
    take_registers<C::kConsumerRegisters>();
    attend<C, T, kSoftCap>(launch, shared, threadIdx.x / kWarpgroup - 1);
  }
}

// ---------------------------------------------------------------- launch

// The most heads of a group that fill a tile to nine tenths.
inline int heads_in_tile(int group, int rows) {
  for (int pack = group; pack > 1; --pack) {
    if (group % pack == 0 && pack <= rows && rows / pack * pack * 10 >= rows * 9) return pack;
  }
  return 1;
}

inline int greatest_divisor(int a, int b) { return b == 0 ? a : greatest_divisor(b, a % b); }

template <class C, class T, bool kSoftCap>
int launch(const AttentionArgs& a, AttentionShare share, cudaStream_t stream) {
  Launch launch{};
  launch.args = a;
  const int group = int(a.num_heads / a.num_kv_heads);
  launch.pack = heads_in_tile(group, C::kRows);
  launch.tile_tokens = C::kRows / launch.pack;
  launch.box_keys = greatest_divisor(int(a.block_size), C::kKeys);
  launch.head_units = int(a.num_heads / launch.pack);
  launch.only_prefill = share == AttentionShare::prefill;
  const auto u64 = [](int64_t n) { return uint64_t(n); };
  int error = encode_map<3>(launch.query, T::is_bf16, a.query,
                            {u64(a.head_size), u64(a.num_heads), u64(a.num_tokens)},
                            {u64(2 * a.query_head_stride), u64(2 * a.query_token_stride)},
                            {64, uint32_t(launch.pack), uint32_t(launch.tile_tokens)});
  for (auto [map, cache] : {std::pair{&launch.keys, a.key_cache}, std::pair{&launch.values, a.value_cache}}) {
    if (error != 0) return error;
    const int64_t row = 2 * a.head_size, head = row * a.block_size, block = head * a.num_kv_heads;
    error = encode_map<4>(*map, T::is_bf16, cache,
                          {u64(a.head_size), u64(a.block_size), u64(a.num_kv_heads), u64(a.num_blocks)},
                          {u64(row), u64(head), u64(block)}, {64, uint32_t(launch.box_keys), 1, 1});
  }
  if (error != 0) return error;
  const auto kernel = prefill_kernel<C, T, kSoftCap>;
  constexpr int kBytes = int(sizeof(Shared<C>));
  static_assert(kBytes <= 227 * 1024);
  error = allow_shared_memory(kernel, kBytes);
  if (error != 0) return error;
  const int64_t tiles = (a.num_tokens / launch.tile_tokens + a.num_seqs) * launch.head_units;
  const int grid = int(std::min<int64_t>(tiles, device_properties().multiprocessors));
  kernel<<<grid, C::kThreads, kBytes, stream>>>(launch);
  return launch_result();
}

}  // namespace pelton::gpu::sm90
