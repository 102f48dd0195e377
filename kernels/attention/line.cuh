// The work of decode kernels on one line: the tiles of positions that all sequences and kv heads need, cut
// into parts, one a block. What is cut leaves partial results in the workspace, which a second kernel puts
// together, always in one order. Method: Osama et al., "Stream-K", 2023.
#pragma once
#include "../common/dependent.cuh"
#include "attention.h"
#include "scores.cuh"

namespace pelton::gpu::decode {

constexpr int kMergeThreads = 512;

// A row's partial result in the workspace is head_size sums, then maximum and weight.
__host__ __device__ constexpr int slot_floats(int head_size) { return kDecodeRows * (head_size + 2); }

// What the second kernel must know of a block whose last item goes on in the blocks behind it: rows
// `first_row` and after of the sequence whose first query is row `token` of the batch.
struct alignas(16) Cut {
  int pieces, token, kv_head, first_row, rows;  // pieces 0: nothing was cut
};

// Two elements of an output.
template <class T>
__device__ __forceinline__ void store2(T* out, float low, float high, float weight) {
  const float factor = weight == 0 ? 0 : 1 / weight;
  *reinterpret_cast<uint32_t*>(out) = pack2<T>(low * factor, high * factor);
}

// The line cut into at most `most` parts. Where its items may be of one length and little is lost by fewer
// parts, no part holds the end of one and the beginning of another: all are cut into equally many parts, or
// each part holds whole ones. Else the parts are equal, the first ones longer by one when the line does not
// divide.
struct Cutting {
  unsigned total, parts = 0;
  unsigned piece, parts_of_piece;  // the line as pieces of this many tiles
  unsigned each = 0, longer = 0;   // of the parts of a piece

  __device__ Cutting(unsigned total, unsigned items, unsigned most)
      : total(total), piece(total), parts_of_piece(most) {
    if (total == 0) return;
    parts = most;
    // Beyond these sizes a twentieth of the parts is worth more than what putting parts together costs.
    constexpr unsigned kMostTilesEach = 256, kMostItemsEach = 4;
    if (total % items == 0) {
      const unsigned items_each = ceil_div(items, most);
      if (items_each == 1 && total / most < kMostTilesEach) {
        piece = total / items;
        parts_of_piece = min(most / items, piece);
        parts = items * parts_of_piece;
      } else if (items_each > 1 && items_each <= kMostItemsEach &&
                 ceil_div(items, items_each) >= most - most / 16) {
        parts = parts_of_piece = ceil_div(items, items_each);
        each = total / items * items_each;
        return;
      }
    }
    each = piece / parts_of_piece;
    longer = piece % parts_of_piece;
  }
  __device__ int first(unsigned part) const {
    unsigned start = 0;
    if (piece < total) {
      start = part / parts_of_piece * piece;
      part %= parts_of_piece;
    }
    return int(min(start + part * each + min(part, longer), total));
  }
  __device__ int part_of(unsigned tile) const {
    const unsigned before = piece < total ? tile / piece * parts_of_piece : 0;
    if (piece < total) tile %= piece;
    const unsigned in_longer = longer * (each + 1);
    return int(before + (tile < in_longer ? tile / (each + 1) : longer + (tile - in_longer) / each));
  }
};

// One kv head of a sequence and a tile of its rows: tiles first_tile ... of positions, [start, end) on the
// line.
template <int Positions, int Rows>
struct Item {
  int start, end;
  int index, kv_head, row_tile, row_tiles, first_tile, tiles;
  int first_position;  // that any of the queries sees
  Sequence sequence;

  // Looks at a sequence; returns its tiles on the line.
  __device__ int open(const AttentionArgs& a, int group, AttentionShare share, int s) {
    index = s;
    kv_head = row_tile = tiles = 0;
    sequence = sequence_of(a, s);
    if (sequence.num_queries == 0) return 0;
    if (share == AttentionShare::decode && !attention_decodes(sequence.num_queries, group)) return 0;
    row_tiles = ceil_div(sequence.num_queries * group, Rows);
    first_position = first_visible(a, sequence.position(0));
    first_tile = first_position / Positions;
    tiles = ceil_div(sequence.length, Positions) - first_tile;
    return tiles * row_tiles * int(a.num_kv_heads);
  }
  // To the item at `line`, of a sequence that begins at `sequence_start`.
  __device__ void seek(int sequence_start, int line) {
    const int item = (line - sequence_start) / tiles;
    kv_head = item / row_tiles;
    row_tile = item % row_tiles;
    start = sequence_start + item * tiles;
    end = start + tiles;
  }
  // To the next item; there must be one.
  __device__ void advance(const AttentionArgs& a, int group, AttentionShare share) {
    start = end;
    if (++row_tile == row_tiles) {
      row_tile = 0;
      if (++kv_head == int(a.num_kv_heads)) {
#pragma unroll 1
        while (index + 1 < int(a.num_seqs) && open(a, group, share, index + 1) == 0) {
        }
      }
    }
    end = start + tiles;
  }
};

// Makes `item` the one at `line`, in all threads. `count` has left each thread's item at its last sequence,
// and the thread that finds the item has looked at its.
template <class Item, class Scan, class Count>
__device__ __forceinline__ void find_item(Scan& scan, const Count& count, int line, Item& item) {
  __shared__ Item found;
  __shared__ int found_start;
  scan.find(line, count, [&](int, int start) {
    found = item;
    found_start = start;
  });
  item = found;
  item.seek(found_start, line);
}

// One block a cut. A warp takes 32 elements of a row's head at a time: 8 lanes of 4 elements, of 4 pieces at
// once, several of which are under way together. The lanes keep sums of their own, which are put together
// last.
template <class T, int HeadSize>
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const __grid_constant__ AttentionArgs a) {
  constexpr int kElements = 4, kSlice = 32, kLanes = kSlice / kElements, kAtOnce = kWarp / kLanes;
  constexpr int kUnderWay = 5;
  const int lane = threadIdx.x % kWarp, at_once = lane / kLanes;
  const int group = int(a.num_heads / a.num_kv_heads), head_size = HeadSize ? HeadSize : int(a.head_size);
  const int slot = slot_floats(head_size), slices = ceil_div(head_size, kSlice);
  // The first piece is the last of its block; the other blocks begin with theirs.
  const float* const pieces = a.workspace + gridDim.x * (sizeof(Cut) / 4) + 2 * int64_t(blockIdx.x) * slot;
  // Without pieces first, while the first kernel ends: its instructions come from memory, too.
  Cut cut{0, 0, 0, 0, 1};
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    if (pass == 1) {
      wait_for_previous();
      cut = reinterpret_cast<const Cut*>(a.workspace)[blockIdx.x];
      if (cut.pieces == 0) return;
    }
#pragma unroll 1
    for (int task = shuffle(int(threadIdx.x / kWarp), 0); task < cut.rows * slices;
         task += kMergeThreads / kWarp) {
      const int row = task / slices, d = task % slices * kSlice + lane % kLanes * kElements;
      const bool inside = d < head_size;
      const float* const sums_of = pieces + row * head_size + d;
      const float* const statistics_of = pieces + int(kDecodeRows) * head_size + 2 * row;
      float maximum = -INFINITY, weight = 0, sums[kElements] = {};
      const auto scale = [&](float to) {  // to a maximum not below this lane's
        const float factor = exp2_fast(maximum - (to == -INFINITY ? 0 : to));
        maximum = to;
        weight *= factor;
#pragma unroll
        for (int e = 0; e < kElements; ++e) sums[e] *= factor;
      };
#pragma unroll 1
      for (int first = 0; first < max(cut.pieces, 1); first += kUnderWay * kAtOnce) {
        Vector<float, 2> statistics[kUnderWay];
        Vector<float, kElements> part[kUnderWay];
        float highest = maximum;
#pragma unroll
        for (int k = 0; k < kUnderWay; ++k) {
          const int i = first + k * kAtOnce + at_once, at = (i == 0 ? 1 : 2 * i) * slot;
          statistics[k] = {{-INFINITY, 0}};
          part[k] = {};
          if (i < cut.pieces) statistics[k] = load_vector<float, 2>(statistics_of + at);
          if (i < cut.pieces && inside) part[k] = load_vector<float>(sums_of + at);
        }
#pragma unroll
        for (int k = 0; k < kUnderWay; ++k) highest = fmaxf(highest, statistics[k][0]);
        scale(highest);
        const float origin = highest == -INFINITY ? 0 : highest;
#pragma unroll
        for (int k = 0; k < kUnderWay; ++k) {
          const float factor = exp2_fast(statistics[k][0] - origin);
          weight += statistics[k][1] * factor;
#pragma unroll
          for (int e = 0; e < kElements; ++e) sums[e] += part[k][e] * factor;
        }
      }
      float highest = maximum;
#pragma unroll
      for (int mask = kLanes; mask < kWarp; mask *= 2) highest = fmaxf(highest, shuffle_xor(highest, mask));
      scale(highest);
#pragma unroll
      for (int mask = kLanes; mask < kWarp; mask *= 2) {
        weight += shuffle_xor(weight, mask);
#pragma unroll
        for (int e = 0; e < kElements; ++e) sums[e] += shuffle_xor(sums[e], mask);
      }
      if (at_once == 0 && inside && cut.pieces > 0) {
        const int full_row = cut.first_row + row;
        T* const out = static_cast<T*>(a.out) + (cut.token + full_row / group) * a.out_token_stride +
                       (cut.kv_head * group + full_row % group) * a.out_head_stride + d;
        store2(out, sums[0], sums[1], weight);
        store2(out + 2, sums[2], sums[3], weight);
      }
    }
  }
}

}  // namespace pelton::gpu::decode
