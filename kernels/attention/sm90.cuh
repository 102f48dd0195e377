// Prefill attention on Hopper: a tile is kRows rows of queries x heads of one kv head (heads that share keys
// are packed into rows), its keys come in tiles of kKeys. A persistent block has a producer warpgroup, whose
// warps choose the work and copy queries, keys and values by TMA, box by box as the block table says, and
// kWarpgroups consumers of 64 rows each. While tensor cores multiply, the other units do a softmax: another
// consumer's, when they take turns, or the same one's, whose next scores are then multiplied before it.
// Source: Shah et al., "FlashAttention-3", 2024; the lazy maximum is FlashAttention-4's.
#pragma once
#include <algorithm>
#include <climits>
#include <utility>

#include "../common/dependent.cuh"
#include "../common/hopper.cuh"
#include "batch.cuh"

namespace pelton::gpu::sm90 {

// Tile sizes and depth of the pipeline. kTurns: consumers take turns at issuing products, which pays where
// the softmax is as long as the products; else the queries stay in registers, which saves shared memory's
// bandwidth.
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
  int group;              // heads that share a kv head
  int pack, tile_tokens;  // heads in a tile, tokens in a tile
  unsigned tile_inverse;  // 2^32 / tile_tokens, rounded up
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
  // A sequence's queries, positions and tiles.
  struct Work {
    int num_queries = 0, length = 0, tiles = 0;
  };

  const Launch& launch;
  int lane;
  Work first;  // of this lane's first sequence, which is mostly its only one

  __device__ __forceinline__ Order(const Launch& l, int in_warp) : launch(l), lane(in_warp) {
    first = load(lane);
  }

  __device__ __forceinline__ int tiles_of(int tokens) const {  // rounded down
    return launch.tile_tokens == 1 ? tokens : int(__umulhi(unsigned(tokens), launch.tile_inverse));
  }
  __device__ __forceinline__ Work load(int index) const {
    if (index >= launch.args.num_seqs) return {};
    const Sequence s = sequence_of(launch.args, index);
    if (launch.only_prefill && attention_decodes(s.num_queries, launch.group)) return {};
    return {s.num_queries, s.length, tiles_of(s.num_queries + launch.tile_tokens - 1)};
  }
  __device__ __forceinline__ Work work(int index) const { return index == lane ? first : load(index); }

  __device__ __forceinline__ int top() const {
    int longest = 0;
    for (int s = lane; s < launch.args.num_seqs; s += kWarp) longest = max(longest, work(s).length);
    return ceil_div(__reduce_max_sync(kAllLanes, longest), C::kKeys);
  }
  // The tiles of a sequence whose level is `level` (1 or more) or above; they are its last.
  __device__ __forceinline__ int tiles(const Work& w, int level) const {
    const int below = (level - 1) * C::kKeys;
    return w.length <= below ? 0 : w.tiles - tiles_of(max(0, below - (w.length - w.num_queries)));
  }
  __device__ __forceinline__ int count(int level) const {
    int sum = tiles(first, level);
    for (int s = lane + kWarp; s < launch.args.num_seqs; s += kWarp) sum += tiles(load(s), level);
    return __reduce_add_sync(kAllLanes, sum);
  }

  // The tile of this rank, for all lanes; `high` is a level above it before, and its own + 1 after.
  __device__ Item find(int rank, int& high) const {
    const AttentionArgs& a = launch.args;
    const int tile_rank = rank / launch.head_units, unit = rank % launch.head_units;
    // count(low) > tile_rank >= count(high): down in growing steps, then by halves
    int low = high, above = -1;
    for (int step = 1; low > 0; step *= 2) {
      low = max(0, high - step);
      const int found = low == 0 ? INT_MAX : count(low);
      if (found > tile_rank) break;
      high = low;
      above = found;
    }
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
    int left = tile_rank - (above < 0 ? count(high) : above);
    for (int from = 0;; from += kWarp) {
      const Work w = work(from + lane);
      const int higher = tiles(w, high), own = tiles(w, low) - higher;
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
      const int tile = w.tiles - 1 - higher - (left - (until - own));
      const int token = shuffle(tile, holder) * launch.tile_tokens;
      const int num_queries = shuffle(w.num_queries, holder);
      item.sequence = from + holder;
      item.length = shuffle(w.length, holder);
      item.tokens = min(launch.tile_tokens, num_queries - token);
      item.first_row = a.query_start_loc[item.sequence] + token;
      item.position = item.length - num_queries + token;
      break;
    }
    const int parts = launch.group / launch.pack;
    item.kv_head = unit / parts;
    item.first_head = item.kv_head * launch.group + unit % parts * launch.pack;
    item.begin = first_visible(a, item.position) / C::kKeys;
    item.end = low;
    return item;
  }
};

template <class C>
__device__ void choose_items(const Launch& launch, Shared<C>& shared, int lane) {
  const Order<C> order{launch, lane};
  int high = order.top() + 1;
  Slot<2> slot;
  for (int round = 0;; ++round) {
    const int place = int(round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
    const Item item = order.find(round * int(gridDim.x) + place, high);
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

  // Scores become weights; `keep` is what results so far are worth then. Lazy: the maximum stays until it has
  // grown by 8, so that `keep` is mostly 1: weights are then up to 2^8, which costs no precision.
  template <bool Lazy, int N>
  __device__ __forceinline__ void weigh(float (&s)[N], float (&keep)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float m = maximum[r];
#pragma unroll
      for (int i = 2 * r; i < N; i += 4) m = fmaxf(m, fmaxf(s[i], s[i + 1]));
      m = fmaxf(m, shuffle_xor(m, 1));
      m = fmaxf(m, shuffle_xor(m, 2));
      if (Lazy && (m - maximum[r]) * scale_log2 <= 8) m = maximum[r];
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

// One row again, by a warp, key after key. A weight of zero does not hide a value that is not finite, so rows
// that the products left not finite come here: what they do not see must have no part in them.
template <class T, int kHeadSize>
__device__ void attend_row(const AttentionArgs& a, const Item& item, int token, int head, int lane) {
  constexpr int kElements = kHeadSize / kWarp;  // of the head, a lane
  const T* query = static_cast<const T*>(a.query) + (item.first_row + token) * a.query_token_stride +
                   head * a.query_head_stride;
  const int32_t* table = a.block_tables + item.sequence * a.block_table_stride;
  const int last = item.position + token;
  float maximum = -INFINITY, weight = 0, sums[kElements] = {};
  for (int key = first_visible(a, last); key <= last; ++key) {
    const int64_t block = table[key / a.block_size];
    const bool known = block >= 0 && block < a.num_blocks;  // else it reads as zeros
    const int64_t offset =
        ((block * a.num_kv_heads + item.kv_head) * a.block_size + key % a.block_size) * kHeadSize + lane;
    float score = 0;
    if (known) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        score += to_float(query[lane + e * kWarp]) *
                 to_float(static_cast<const T*>(a.key_cache)[offset + e * kWarp]);
      }
    }
    score = warp_sum(score) * a.scale;
    if (a.soft_cap > 0) score = a.soft_cap * tanhf(score / a.soft_cap);
    const float new_maximum = fmaxf(maximum, score);
    const float keep = maximum == new_maximum ? 1 : expf(maximum - new_maximum),
                p = expf(score - new_maximum);
    maximum = new_maximum;
    weight = weight * keep + p;
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const float value = known ? to_float(static_cast<const T*>(a.value_cache)[offset + e * kWarp]) : 0;
      sums[e] = sums[e] * keep + p * value;
    }
  }
  T* out = static_cast<T*>(a.out) + (item.first_row + token) * a.out_token_stride + head * a.out_head_stride;
#pragma unroll
  for (int e = 0; e < kElements; ++e) out[lane + e * kWarp] = from_float<T>(sums[e] / weight);
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
  constexpr int kAllConsumers = 1 + C::kWarpgroups, kConsumers = C::kWarpgroups * kWarpgroup;
  const int window = int(min(a.sliding_window, int64_t(1) << 30));
  const uint32_t query_tile = tile_descriptor(shared.query[0][64 * warpgroup]);
  const uint32_t key_tiles = tile_descriptor(shared.keys);
  const uint32_t value_tiles = tile_descriptor(shared.values, kHalfBytes);
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
  uint32_t q[C::kTurns ? 4 : C::kHeadSize / 4], p[C::kKeys / 4];  // queries and weights as A of a product

  const auto multiply_keys = [&](int stage) {
#pragma unroll
    for (int k = 0; k < C::kHeadSize / 16; ++k) {
      const uint32_t keys =
          descriptor_at(key_tiles + stage * (kStageBytes >> 4), k / 4 * kHalfBytes + k % 4 * 32);
      if constexpr (C::kTurns) {
        product_shared<T>(s, descriptor_at(query_tile, k / 4 * kQueryHalfBytes + k % 4 * 32), keys, k > 0);
      } else {
        product_registers<T, false>(s, q + 4 * k, keys, k > 0);
      }
    }
    product_commit();
  };
  const auto multiply_values = [&](int stage) {
#pragma unroll
    for (int k = 0; k < C::kKeys / 16; ++k) {
      product_registers<T, true>(o, p + 4 * k,
                                 descriptor_at(value_tiles + stage * (kStageBytes >> 4), k * 2048), true);
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
      softmax.weigh<!C::kTurns>(s, keep);
    };

    shared.query_full.wait(query_slot.parity);
    query_slot.next();
    if constexpr (!C::kTurns) {
      // The last row stands in for those past the tile's, which have not been written.
      const int row =
          min(64 * warpgroup + thread / kWarp * 16 + lane % 16, launch.pack * launch.tile_tokens - 1);
#pragma unroll
      for (int k = 0; k < C::kHeadSize / 16; ++k) {  // 16 bytes of a row lie where its number, modulo 8, says
        const int part = (k % 4 * 2 + lane / 16) ^ row % 8;
        uint32_t a[4];
        load_matrix_x4<false>(a, &shared.query[0][row][part * 8] + k / 4 * (kQueryHalfBytes / 2));
#pragma unroll
        for (int i = 0; i < 4; ++i) q[4 * k + i] = a[i];
      }
      __syncwarp();
      release(shared.query_empty);
      pin(q);
    }
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
      for (int i = warpgroup * kWarpgroup + thread; i < rows * 8 * C::kHalves; i += kConsumers) {
        const int half = i % C::kHalves, row = first + i / C::kHalves / 8, part = i / C::kHalves % 8;
        store_vector(reinterpret_cast<uint32_t*>(&shared.values[value_slot.index][half][row][8 * part]),
                     Vector<uint32_t, 4>{});
      }
      fence_shared_stores();
      named_sync(kAllConsumers, kConsumers);
    }

    if (!C::kTurns) wait_for_keys(item.end - 1 > item.begin);
    for (int tile = item.end - 2; tile >= item.begin; --tile) {
      if (C::kTurns) wait_for_keys(true);
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
      // This branch also keeps the compiler from waiting for the second product before the softmax.
      if (!C::kTurns) wait_for_keys(tile > item.begin);
      product_wait<0>();
      pin(o);
      pin(p);
      release(shared.values_empty[value_slot.index]);
      value_slot.next();
      pack_weights();
      if (C::kTurns || __any_sync(kAllLanes, keep[0] != 1 || keep[1] != 1)) {
#pragma unroll
        for (int i = 0; i < C::kHeadSize / 2; ++i) o[i] *= keep[i / 2 % 2];
      }
    }
    if (C::kTurns) release(shared.query_empty);
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

    uint64_t again = 0;  // rows of this warp that are not finite, one bit a quad
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float factor = softmax.sum[r] == 0 ? 0 : 1 / softmax.sum[r];
      const bool writes = row_token[r] < item.tokens;
      float finite = 0;  // or NaN
      T* out = static_cast<T*>(a.out) + (item.first_row + row_token[r]) * a.out_token_stride +
               (item.first_head + row_head[r]) * a.out_head_stride;
#pragma unroll
      for (int group = 0; group < C::kHeadSize / 8; group += 4) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 4 * (group + i) + 2 * r;
          const float x = o[at] * factor, y = o[at + 1] * factor;
          finite += 0 * x + 0 * y;
          w[i] = pack2<T>(x, y);
        }
        transpose_quad(w, lane);
        if (writes) {
          store_vector(reinterpret_cast<uint32_t*>(out + 8 * (group + lane % 4)),
                       Vector<uint32_t, 4>{w[0], w[1], w[2], w[3]});
        }
      }
      finite += shuffle_xor(finite, 1);
      finite += shuffle_xor(finite, 2);
      again |= uint64_t(__ballot_sync(kAllLanes, writes && finite != 0 && lane % 4 == 0)) << (kWarp * r);
    }
    if (again != 0) __syncwarp();  // other lanes write over what was just written
    for (; again != 0; again &= again - 1) {
      const int bit = __ffsll(int64_t(again)) - 1, r = bit / kWarp;
      attend_row<T, C::kHeadSize>(a, item, shuffle(r == 0 ? row_token[0] : row_token[1], bit % kWarp),
                                  item.first_head + shuffle(r == 0 ? row_head[0] : row_head[1], bit % kWarp),
                                  lane);
    }
  }
  // The last turn that was given to the first is still open: nobody waits for it, and the block's barriers
  // end with it.
  if (C::kTurns && warpgroup == 0) named_sync(own_turn, 2 * kWarpgroup);
}

// Brings what the first items will look up nearer, while the block prepares itself.
__device__ __forceinline__ void prefetch_batch(const AttentionArgs& a, int lane) {
  if (lane < a.num_seqs) {
    prefetch_line(a.seq_lens + lane);
    prefetch_line(a.query_start_loc + lane);
  }
  const int64_t entry = (int64_t(blockIdx.x) * kWarp + lane) * 32,
                entries = a.num_seqs * a.block_table_stride;
  if (entry < entries - a.block_table_stride + a.max_blocks) prefetch_line(a.block_tables + entry);
}

template <class C, class T, bool kSoftCap>
__global__ void __launch_bounds__(C::kThreads, 1) prefill_kernel(const __grid_constant__ Launch launch) {
  Shared<C>& shared = *dynamic_shared<Shared<C>>();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  let_next_start();  // the decode kernel, with the sequences that are not for this one
  if (warp == 2) prefetch_batch(launch.args, lane);
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
  launch.group = int(a.num_heads / a.num_kv_heads);
  launch.pack = heads_in_tile(launch.group, C::kRows);
  launch.tile_tokens = C::kRows / launch.pack;
  launch.tile_inverse = unsigned(((uint64_t(1) << 32) + launch.tile_tokens - 1) / launch.tile_tokens);
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

// The same for the dtype and the soft cap that are wanted.
template <class C>
int launch_of(const AttentionArgs& a, AttentionShare share, cudaStream_t stream) {
  const bool cap = a.soft_cap > 0;
  if (a.dtype == DType::f16) {
    return cap ? launch<C, f16, true>(a, share, stream) : launch<C, f16, false>(a, share, stream);
  }
  return cap ? launch<C, bf16, true>(a, share, stream) : launch<C, bf16, false>(a, share, stream);
}

// Head sizes have files of their own, which compile side by side.
int launch_64(const AttentionArgs& a, AttentionShare share, cudaStream_t stream);
int launch_96(const AttentionArgs& a, AttentionShare share, cudaStream_t stream);
int launch_192(const AttentionArgs& a, AttentionShare share, cudaStream_t stream);
int launch_256(const AttentionArgs& a, AttentionShare share, cudaStream_t stream);

}  // namespace pelton::gpu::sm90
