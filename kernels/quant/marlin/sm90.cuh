// Products with weights of 4 or 8 bits by wgmma and TMA of sm_90a: out^T = W x^T, where the weights are the A
// operand in registers and the tokens the B operand in shared memory. One warpgroup copies tokens (TMA),
// weights, scales and zeros (bulk copies) into a ring of stages; the other warpgroups turn the weights of 64
// outputs a tile into fragments, rounded to the dtype as a dequantized weight is, while the products of the
// tile before run. A block takes whole tiles of outputs in turn, or, where there are too few, an equal part
// of the line of all tiles of inputs; the last of the blocks that share a tile of outputs to come puts their
// sums together, always in one order. Methods: Frantar et al., "MARLIN", 2024; Osama et al., "Stream-K",
// 2023.
#pragma once
#include "../../common/gpu.cuh"
#include "../../common/hopper.cuh"
#include "cutting.cuh"
#include "dequantize.cuh"
#include "marlin.h"

namespace pelton::gpu::marlin_sm90 {

using namespace pelton::marlin;

constexpr int kMaxStages = 8;
constexpr int kSharedBytes = 227 * 1024;  // that a block may ask for
constexpr int kAtom = 1024;               // bytes: where swizzled tiles must be aligned

// Warpgroups that have RowTiles tiles of 64 outputs each, for Tokens tokens.
template <class T_, int Bits_, int Warpgroups_, int RowTiles_, int Tokens_>
struct Shape {
  using T = T_;
  static constexpr int kBits = Bits_, kWarpgroups = Warpgroups_, kRowTiles = RowTiles_, kTokens = Tokens_;
  static constexpr int kTiles = kWarpgroups * kRowTiles, kRows = kTiles * kTile;
  static constexpr int kThreads = kWarpgroup * (kWarpgroups + 1), kConsumers = kWarpgroup * kWarpgroups;
  // A stage: tokens (64 inputs each), weights, scales and zeros of up to two groups of inputs.
  static constexpr int kTileBytes = tile_bytes(kBits), kSlabBytes = slab_bytes(kBits);
  static constexpr int kScaleBytes = kTile * 2, kZeroBytes = kTile;  // of a group
  static constexpr int kTokenBytes = kTokens * kTile * 2, kWeightsAt = kTokenBytes;
  static constexpr int kScalesAt = kWeightsAt + kTiles * kTileBytes;
  static constexpr int kZerosAt = kScalesAt + kTiles * 2 * kScaleBytes;
  static constexpr int kStageBytes = ceil_div(kZerosAt + kTiles * 2 * kZeroBytes, kAtom) * kAtom;
  static constexpr int kFit = (kSharedBytes - 2 * kAtom) / kStageBytes,
                       kStages = kFit < kMaxStages ? kFit : kMaxStages;
  static constexpr int kSums = kTokens / 2;  // of a thread and a tile of outputs
  static constexpr int kSlotFloats = kRows * kTokens;
  static constexpr int kShared = kStages * kStageBytes + 2 * kAtom;
};

struct Plan {
  int input_tiles, row_tiles, token_tiles, band;  // band: token tiles beside each other, before the next rows
  int tiles_a_group;                              // of inputs; 0: two groups a tile
  uint32_t nothing;                               // 0, which the compiler does not know
  bool whole, in_fours;  // blocks take whole tiles of outputs; outputs may be written four at a time

  // Of the scales that tile `k` of the inputs needs.
  __device__ __forceinline__ int groups_of(int k, const MarlinGemmArgs& a) const {
    return tiles_a_group > 0 || 2 * k + 1 >= int(a.groups) ? 1 : 2;
  }
};

// A run of input tiles [first, end) of one tile of outputs.
struct Piece {
  int column, row_tile, token_tile, first, end;
};

// The pieces of a block, which its producers and its consumers go through alike.
struct Pieces {
  const Plan& plan;
  gpu::marlin::Cutting cutting;  // of the line between the blocks
  int line, last;                // whole: a column and their number

  __device__ explicit Pieces(const Plan& plan) : plan(plan) {
    const int columns = plan.row_tiles * plan.token_tiles;
    if (plan.whole) {
      line = blockIdx.x;
      last = columns;
    } else {
      cutting = {unsigned(columns * plan.input_tiles), gridDim.x};
      line = cutting.first(blockIdx.x);
      last = cutting.first(blockIdx.x + 1);
    }
  }
  __device__ bool next(Piece& piece) {
    if (line >= last) return false;
    if (plan.whole) {
      piece.column = line;
      piece.first = 0;
      piece.end = plan.input_tiles;
      line += gridDim.x;
    } else {
      piece.column = line / plan.input_tiles;
      piece.first = line - piece.column * plan.input_tiles;
      piece.end = min(plan.input_tiles, piece.first + last - line);
      line += piece.end - piece.first;
    }
    const int of_band = plan.band * plan.row_tiles, band = piece.column / of_band,
              in_band = piece.column % of_band, width = min(plan.band, plan.token_tiles - band * plan.band);
    piece.row_tile = in_band / width;
    piece.token_tile = band * plan.band + in_band % width;
    return true;
  }
};

// The place in the ring.
template <int Stages>
struct Turn {
  int stage = 0, parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == Stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <class S>
struct Barriers {
  Barrier full[S::kStages], empty[S::kStages];
};

// The copies, each by one thread of a warp that does nothing but what lies between two of them: it is a chain
// of dependent instructions, and as slow as these.
template <class S>
__device__ __forceinline__ void produce_tokens(const MarlinGemmArgs& a, const Plan& plan,
                                               const CUtensorMap& x, unsigned char* ring,
                                               Barriers<S>& barriers) {
  Pieces pieces(plan);
  Turn<S::kStages> turn;
  constexpr int kBytes = S::kTokenBytes + S::kTiles * S::kTileBytes;
  const int of_group = S::kTiles * (S::kScaleBytes + (a.zeros == nullptr ? 0 : S::kZeroBytes));
  for (Piece piece; pieces.next(piece);) {
#pragma unroll 1
    for (int k = piece.first; k < piece.end; ++k) {
      barriers.empty[turn.stage].wait(turn.parity ^ 1);
      Barrier& full = barriers.full[turn.stage];
      full.arrive_and_expect(kBytes + of_group * plan.groups_of(k, a));
      copy_box(ring + turn.stage * S::kStageBytes, x, full, k * kTile, piece.token_tile * S::kTokens, 0);
      turn.next();
    }
  }
}

// The Part-th third of the weights', scales' and zeros' copies. The last tile stands in for those past the
// end.
template <class S, int Part>
__device__ __forceinline__ void produce_weights(const MarlinGemmArgs& a, const Plan& plan,
                                                unsigned char* ring, Barriers<S>& barriers) {
  constexpr auto mine = [](int copy) { return copy % 3 == Part; };
  Pieces pieces(plan);
  Turn<S::kStages> turn;
  for (Piece piece; pieces.next(piece);) {
    const int64_t first_tile = int64_t(piece.row_tile) * S::kTiles, last_tile = tiles(a.n) - 1;
    const int group = plan.tiles_a_group > 0 ? piece.first / plan.tiles_a_group : 2 * piece.first;
    int left = plan.tiles_a_group > 0 ? plan.tiles_a_group - piece.first % plan.tiles_a_group : 1;
    const unsigned char *weight[S::kTiles], *scales[S::kTiles], *zeros[S::kTiles];
#pragma unroll
    for (int t = 0; t < S::kTiles; ++t) {
      const int64_t tile = min(first_tile + t, last_tile), of_groups = tile * a.groups + group;
      weight[t] = static_cast<const unsigned char*>(a.weight) +
                  (tile * plan.input_tiles + piece.first) * S::kTileBytes;
      scales[t] = static_cast<const unsigned char*>(a.scales) + of_groups * S::kScaleBytes;
      zeros[t] = a.zeros + of_groups * S::kZeroBytes;
    }
#pragma unroll 1
    for (int k = piece.first; k < piece.end; ++k) {
      Barrier& full = barriers.full[turn.stage];
      unsigned char* const stage = ring + turn.stage * S::kStageBytes;
      const int groups = plan.groups_of(k, a);
      barriers.empty[turn.stage].wait(turn.parity ^ 1);
      const bool next_group = --left == 0;
      if (next_group) left = plan.tiles_a_group > 0 ? plan.tiles_a_group : 1;
      const int steps = next_group ? groups : 0;
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t) {
        if (mine(t)) {
          copy_bulk(stage + S::kWeightsAt + t * S::kTileBytes, weight[t], S::kTileBytes, full);
          weight[t] += S::kTileBytes;
        }
        if (mine(S::kTiles + t)) {
          copy_bulk(stage + S::kScalesAt + t * 2 * S::kScaleBytes, scales[t], groups * S::kScaleBytes, full);
          scales[t] += steps * S::kScaleBytes;
        }
        if (mine(2 * S::kTiles + t)) {
          if (a.zeros != nullptr) {
            copy_bulk(stage + S::kZerosAt + t * 2 * S::kZeroBytes, zeros[t], groups * S::kZeroBytes, full);
            zeros[t] += steps * S::kZeroBytes;
          }
        }
      }
      turn.next();
    }
  }
}

template <class S>
__device__ __forceinline__ void produce(const MarlinGemmArgs& a, const Plan& plan, const CUtensorMap& x,
                                        unsigned char* ring, Barriers<S>& barriers, int warp) {
  if (warp == 0) return produce_tokens<S>(a, plan, x, ring, barriers);
  if (warp == 1) return produce_weights<S, 0>(a, plan, ring, barriers);
  if (warp == 2) return produce_weights<S, 1>(a, plan, ring, barriers);
  produce_weights<S, 2>(a, plan, ring, barriers);
}

// Writes a warp's sums of 16 outputs and Tokens tokens.
template <class T, int Sums>
__device__ __forceinline__ void write_outputs(const MarlinGemmArgs& a, bool in_fours, float (&d)[Sums],
                                              int64_t first_row, int64_t first_token, int lane) {
  float bias[2] = {};
  if (a.bias != nullptr) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t row = first_row + lane / 4 + 8 * i;
      if (row < a.n) bias[i] = to_float(static_cast<const T*>(a.bias)[row]);
    }
  }
  // Of the 16 outputs of a token four lanes have two pairs each, which become four in a row.
  const bool odd = lane % 2 != 0;
  const int64_t row = first_row + (odd ? 8 : 0) + 2 * (lane % 4 & 2);
#pragma unroll
  for (int i = 0; i < Sums / 4; ++i) {
    const uint32_t low = transpose_matrix(pack2<T>(d[4 * i] + bias[0], d[4 * i + 1] + bias[0]));
    const uint32_t high = transpose_matrix(pack2<T>(d[4 * i + 2] + bias[1], d[4 * i + 3] + bias[1]));
    const uint32_t other = shuffle_xor(odd ? low : high, 1);
    const Vector<uint32_t, 2> four{odd ? other : low, odd ? high : other};
    const int64_t token = first_token + 8 * i + lane / 4;
    if (token >= a.m || row >= a.n) continue;
    T* const out = static_cast<T*>(a.out) + token * a.out_stride + row;
    if (in_fours) {
      store_vector(reinterpret_cast<uint32_t*>(out), four);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (row + e < a.n) out[e] = T{uint16_t(four[e / 2] >> (16 * (e % 2)))};
      }
    }
  }
}

// What a thread reads of a stage to make its fragments.
template <class S>
struct Parts {
  Vector<uint32_t, 4> words[S::kRowTiles][S::kBits / 4];
  uint32_t scales[S::kRowTiles][2], zeros[S::kRowTiles][2];  // of a lane's two rows, in the halves of a tile

  __device__ __forceinline__ void load(const unsigned char* stage, int first_tile, int slab, int lane,
                                       bool two_groups, bool with_zeros) {
#pragma unroll
    for (int r = 0; r < S::kRowTiles; ++r) {
      const int tile = first_tile + r;
#pragma unroll
      for (int i = 0; i < S::kBits / 4; ++i) {
        words[r][i] = load_vector<uint32_t>(reinterpret_cast<const uint32_t*>(
            stage + S::kWeightsAt + tile * S::kTileBytes + slab * S::kSlabBytes + (i * kWarp + lane) * 16));
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = (2 * tile + (half == 1 && two_groups ? 1 : 0)) * kTile + kSlab * slab + lane / 4 * 2;
        scales[r][half] = *reinterpret_cast<const uint32_t*>(stage + S::kScalesAt + at * 2);
        zeros[r][half] = S::kBits == 4 ? 0x0808u : 0x8080u;
        if (with_zeros) zeros[r][half] = *reinterpret_cast<const uint16_t*>(stage + S::kZerosAt + at);
      }
    }
  }
  // The A fragment of 16 inputs of a tile of outputs, scaled.
  __device__ __forceinline__ void fragment(uint32_t* to, int r, int step) const {
    using T = typename S::T;
    const int half = step / (kSteps / 2);
    const uint32_t scale[2] = {__byte_perm(scales[r][half], 0, 0x1010),
                               __byte_perm(scales[r][half], 0, 0x3232)};
    uint32_t w[4];
    gpu::marlin::dequantize<T, S::kBits>(w, words[r], step,
                                         gpu::marlin::slab_zeros<T, S::kBits>(zeros[r][half]));
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = multiply2<T>(w[i], scale[i % 2]);
  }
};

// Adds what the blocks of a tile of outputs have left in their slots, in their order, to sums of zero.
template <class S, class Slot>
__device__ __forceinline__ void put_together(float (&sums)[S::kRowTiles][S::kSums], int parts,
                                             const Slot& slot_of) {
  constexpr int kUnderWay = 8;  // loads: more take too many registers
#pragma unroll 1
  for (int part = 0; part < parts; ++part) {
    const float* const from = slot_of(part);
#pragma unroll
    for (int i = 0; i < S::kRowTiles * S::kSums / 4; ++i) {
      const auto four = load_vector<float>(from + i * 4 * S::kConsumers);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& sum = sums[i * 4 / S::kSums][i * 4 % S::kSums + e];
        sum = part == 0 ? four[e] : sum + four[e];
      }
      if (i % kUnderWay == kUnderWay - 1) asm volatile("" ::: "memory");
    }
  }
}

template <class S>
__device__ __forceinline__ void consume(const MarlinGemmArgs& a, const Plan& plan, const unsigned char* ring,
                                        Barriers<S>& barriers, bool* came_last) {
  using T = typename S::T;
  const int thread = int(threadIdx.x) - kWarpgroup, lane = thread % kWarp;
  const int warpgroup = thread / kWarpgroup, slab = thread / kWarp % kSlabs;
  uint32_t* const counters = reinterpret_cast<uint32_t*>(a.workspace);
  float* const slots = a.workspace + kMarlinCounters + thread * 4;
  const auto release = [&](int stage) {
    __syncwarp();
    if (lane == 0) barriers.empty[stage].arrive();
  };

  Pieces pieces(plan);
  Turn<S::kStages> turn;
  float sums[S::kRowTiles][S::kSums];
  // Of the tile of inputs whose products run, and of the next one.
  constexpr int kFragments = S::kRowTiles * kSteps * 4;
  uint32_t fragments[kFragments], next[kFragments];
  for (Piece piece; pieces.next(piece);) {
    const auto prepare = [&](int k) {
      barriers.full[turn.stage].wait(turn.parity);
      Parts<S> parts;
      parts.load(ring + turn.stage * S::kStageBytes, warpgroup * S::kRowTiles, slab, lane,
                 plan.groups_of(k, a) == 2, a.zeros != nullptr);
#pragma unroll
      for (int r = 0; r < S::kRowTiles; ++r) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) parts.fragment(&next[(r * kSteps + step) * 4], r, step);
      }
      pin(next);
    };
    prepare(piece.first);
#pragma unroll
    for (int i = 0; i < kFragments; ++i) fragments[i] = next[i];
#pragma unroll 1
    for (int k = piece.first; k < piece.end; ++k) {
      const int stage = turn.stage;
      const uint32_t tokens = tile_descriptor(ring + stage * S::kStageBytes);
      pin(fragments);
      product_fence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int r = 0; r < S::kRowTiles; ++r) {
          product_registers<T, false>(sums[r], &fragments[(r * kSteps + step) * 4],
                                      descriptor_at(tokens, step * 32), k > piece.first || step > 0);
        }
      }
      product_commit();
      turn.next();
      if (k + 1 < piece.end) prepare(k + 1);
      product_wait<0>();
#pragma unroll
      for (int r = 0; r < S::kRowTiles; ++r) pin(sums[r]);
      // The assembler takes the fragments' registers for free once the products are issued, although these
      // still read them: a use that needs a sum keeps them.
      const uint32_t nothing = __float_as_uint(sums[0][0]) & plan.nothing;
#pragma unroll
      for (int i = 0; i < kFragments; ++i) fragments[i] = next[i] ^ (fragments[i] & nothing);
      release(stage);
    }

    if (piece.first > 0 || piece.end < plan.input_tiles) {
      // The slots of these outputs are the second of the first block, then the others' first.
      const int start = piece.column * plan.input_tiles, from = pieces.cutting.part_of(start);
      const int parts = pieces.cutting.part_of(start + plan.input_tiles - 1) - from + 1;
      float* const slot = slots + (2 * int64_t(blockIdx.x) + (piece.first == 0)) * S::kSlotFloats;
#pragma unroll
      for (int r = 0; r < S::kRowTiles; ++r) {
#pragma unroll
        for (int i = 0; i < S::kSums; i += 4) {
          store_vector(slot + (r * S::kSums + i) * S::kConsumers,
                       Vector<float, 4>{sums[r][i], sums[r][i + 1], sums[r][i + 2], sums[r][i + 3]});
        }
      }
      __threadfence();
      named_sync(1, S::kConsumers);
      if (thread == 0) {
        const bool last = atomicAdd(&counters[from], 1u) == uint32_t(parts - 1);
        if (last) counters[from] = 0;
        *came_last = last;
      }
      named_sync(1, S::kConsumers);
      const bool last = *came_last;
      named_sync(1, S::kConsumers);  // before it is written again
      if (!last) continue;
      __threadfence();
      put_together<S>(sums, parts, [&](int part) {
        return slots + (2 * int64_t(from + part) + (part == 0)) * S::kSlotFloats;
      });
    }
    const int64_t first_row =
        (int64_t(piece.row_tile) * S::kTiles + warpgroup * S::kRowTiles) * kTile + slab * kSlab;
#pragma unroll
    for (int r = 0; r < S::kRowTiles; ++r) {
      write_outputs<T>(a, plan.in_fours, sums[r], first_row + r * kTile,
                       int64_t(piece.token_tile) * S::kTokens, lane);
    }
  }
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    wide_gemm_kernel(const __grid_constant__ MarlinGemmArgs a, const __grid_constant__ Plan plan,
                     const __grid_constant__ CUtensorMap x) {
  unsigned char* const shared = dynamic_shared<unsigned char>();
  unsigned char* const ring = shared + (kAtom - shared_address(shared) % kAtom) % kAtom;
  __shared__ Barriers<S> barriers;
  __shared__ bool came_last;
  if (threadIdx.x == 0) {
    prefetch_map(x);
    for (int i = 0; i < S::kStages; ++i) {
      barriers.full[i].init(1);
      barriers.empty[i].init(S::kConsumers / kWarp);
    }
    fence_barrier_init();
  }
  __syncthreads();
  // Of 65536: what the launch gives to every thread is dealt out anew.
  constexpr int kProducerRegisters = 40, kRegisters = S::kWarpgroups == 2 ? 232 : 152;
  if (threadIdx.x < kWarpgroup) {
    release_registers<kProducerRegisters>();
    if (threadIdx.x % kWarp == 0) produce<S>(a, plan, x, ring, barriers, int(threadIdx.x / kWarp));
  } else {
    take_registers<kRegisters>();
    consume<S>(a, plan, ring, barriers, &came_last);
  }
}

}  // namespace pelton::gpu::marlin_sm90
