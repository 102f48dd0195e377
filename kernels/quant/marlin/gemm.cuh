// Products with weights of 4 or 8 bits by matrix instructions of sm_80: out^T = W x^T, weights as A operand.
// Tiles of outputs x 64 inputs stand on one line, inputs fastest, which is cut into equal parts, one a block;
// a block's groups of warps take its tiles in turn, each through an asynchronous pipeline of its own. A tile
// of outputs that was cut leaves partial sums in the workspace; the last of its blocks to come puts them
// together, always in one order. Methods: Frantar et al., "MARLIN: Mixed-Precision Auto-Regressive Parallel
// Inference", 2024; the line of work: Osama et al., "Stream-K", 2023.
#pragma once
#include "../../common/dependent.cuh"
#include "../../common/gpu.cuh"
#include "../../common/mma.cuh"
#include "cutting.cuh"
#include "dequantize.cuh"
#include "marlin.h"

namespace pelton::gpu::marlin {

constexpr int kMaxStages = 8;

// line / divisor without a division: exact while divisor * line < 2^42 and line / divisor < 2^22.
struct Reciprocal {
  static constexpr int kShift = 42;
  uint64_t factor;

  explicit Reciprocal(int64_t divisor) : factor((uint64_t(1) << kShift) / uint64_t(divisor) + 1) {}
  __device__ __forceinline__ int divide(int line) const { return int(uint64_t(line) * factor >> kShift); }
};

// What a launch decides beside the arguments.
struct GemmPlan {
  Cutting cutting;  // of the line, row tiles x token tiles x input tiles, between the blocks
  Reciprocal per_input_tile, per_token_tile;
  int input_tiles, token_tiles;
  int splits, stages;  // groups of warps a block, tiles under way of each
  int group_shift;     // log2 of group_size, -1 when it is no power of two
  bool paired;         // outputs may be written two at a time
};

// RowWarps warps have WarpSlabs slabs (of 16 outputs) each, for 8 TokenBlocks tokens; MaxSplits such groups.
template <class T_, int Bits_, int WarpSlabs_, int RowWarps_, int TokenBlocks_, int MaxSplits_>
struct GemmShape {
  using T = T_;
  static constexpr int kBits = Bits_, kWarpSlabs = WarpSlabs_, kRowWarps = RowWarps_,
                       kTokenBlocks = TokenBlocks_, kMaxSplits = MaxSplits_;
  static constexpr int kRows = kSlab * kWarpSlabs * kRowWarps, kTokens = 8 * kTokenBlocks;
  static constexpr int kTiles = kRows / kTile;  // of weights
  static constexpr int kGroupThreads = kWarp * kRowWarps, kMaxThreads = kGroupThreads * kMaxSplits;
  // A stage: weights, tokens (64 inputs each), scales and zeros of up to two groups of inputs.
  static constexpr int kTileBytes = tile_bytes(kBits), kSlabBytes = slab_bytes(kBits);
  static constexpr int kTokensAt = kTiles * kTileBytes, kScalesAt = kTokensAt + kTokens * kTile * 2;
  static constexpr int kZerosAt = kScalesAt + 2 * kTiles * kTile * 2;
  static constexpr int kStageBytes = kZerosAt + 2 * kTiles * kTile;
  static constexpr int kFragments = kWarpSlabs * kRowWarps * kTokenBlocks;
  static constexpr int kSlotFloats = kFragments * kWarp * 4;
  static_assert(kRows % kTile == 0 && kTokens * 8 % kGroupThreads == 0);
};

// A block's tiles [first, end) of the line that have the same outputs and tokens; `start`: where these begin.
struct Piece {
  int first, end, start, row_tile, token_tile;

  __device__ __forceinline__ void open(const GemmPlan& plan, int line, int last) {
    const int column = plan.per_input_tile.divide(line);
    first = line;
    start = column * plan.input_tiles;
    end = min(start + plan.input_tiles, last);
    row_tile = plan.per_token_tile.divide(column);
    token_tile = column - row_tile * plan.token_tiles;
  }
};

// The copies of one group of warps, `stages` tiles ahead of their use. What the thread copies of a piece is
// found once; its tiles are equal steps from there.
template <class S>
struct Loader {
  using T = typename S::T;
  static constexpr int kThreads = S::kGroupThreads;
  static constexpr int kTilePieces = S::kTileBytes / 16;  // of 16 bytes
  static constexpr int kTilesAtOnce = kThreads <= kTilePieces ? 1 : kThreads / kTilePieces;
  static constexpr int kRowsAtOnce = kThreads / 8, kRowBytes = kTile * 2;  // of tokens
  static constexpr int kScalePieces = kTile * 2 / 16, kZeroPieces = kTile / 16;
  static_assert(S::kTiles * kScalePieces <= kThreads && S::kTiles % kTilesAtOnce == 0);

  const MarlinGemmArgs& a;
  const GemmPlan& plan;
  unsigned char* ring;
  int thread, split;  // of the group's threads; the group
  int last;           // end of the block's part
  int line;           // of the block's next tiles, one a group
  int stage = 0;
  Piece piece{};
  const unsigned char* weight = nullptr;
  const T *x = nullptr, *scales = nullptr;
  const uint8_t* zeros = nullptr;
  int tokens_here = 0, tiles_here = 0;

  __device__ __forceinline__ int group_of(int input) const {
    return plan.group_shift >= 0 ? input >> plan.group_shift : input / a.group_size;
  }

  __device__ __forceinline__ void open() {
    piece.open(plan, line, last);
    const int64_t first_tile = int64_t(piece.row_tile) * S::kTiles,
                  token = int64_t(piece.token_tile) * S::kTokens;
    tiles_here = int(tiles(a.n) - first_tile);
    tokens_here = int(a.m - token) - thread / 8;
    weight = static_cast<const unsigned char*>(a.weight) +
             (first_tile + thread / kTilePieces) * plan.input_tiles * S::kTileBytes +
             thread % kTilePieces * 16;
    const int64_t scale_tile = first_tile + min(thread / kScalePieces, tiles_here - 1);
    scales = static_cast<const T*>(a.scales) + scale_tile * a.groups * kTile + thread % kScalePieces * 8;
    const int64_t zero_tile = first_tile + min(thread / kZeroPieces, tiles_here - 1);
    zeros = a.zeros + zero_tile * a.groups * kTile + thread % kZeroPieces * 16;
    x = static_cast<const T*>(a.x) + (token + thread / 8) * a.x_stride + thread % 8 * 8;
  }

  // Starts the copies of the next tile; also without one a group of copies is closed, so that all count
  // alike.
  __device__ __forceinline__ void next(bool by_half) {
    if (line < last) {
      if (line >= piece.end) open();
      const int tile = line + split;
      if (tile < piece.end) copy(tile - piece.start, by_half);
      line = min(line + plan.splits, piece.end);
    }
    stage = stage + 1 == plan.stages ? 0 : stage + 1;
    copy_async_commit();
  }

  __device__ __forceinline__ void copy(int input_tile, bool by_half) const {
    const SharedAddress to = shared_address(ring) + stage * S::kStageBytes;
    const unsigned char* const from = weight + int64_t(input_tile) * S::kTileBytes;
    const int64_t next_tile = int64_t(plan.input_tiles) * S::kTileBytes;
#pragma unroll
    for (int i = 0; i < S::kTiles * kTilePieces; i += kThreads) {
      const int tile = i / kTilePieces;
      const unsigned char* const piece_from = from + tile * next_tile + i % kTilePieces * 16;
      if constexpr (S::kTiles == 1) {
        copy_async16(to + (i + thread) * 16, piece_from);
      } else {
        const bool valid = tile + (kTilesAtOnce == 1 ? 0 : thread / kTilePieces) < tiles_here;
        copy_async16(to + (i + thread) * 16, valid ? piece_from : a.weight, valid);
      }
    }
    if (thread < S::kTiles * kScalePieces) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half == 1 && !by_half) break;
        const int group = min(group_of(input_tile * kTile + half * (kTile / 2)), int(a.groups) - 1) * kTile;
        copy_async16(to + S::kScalesAt + (half * S::kTiles * kScalePieces + thread) * 16, scales + group);
        if (a.zeros != nullptr && thread < S::kTiles * kZeroPieces) {
          copy_async16(to + S::kZerosAt + (half * S::kTiles * kZeroPieces + thread) * 16, zeros + group);
        }
      }
    }
    const bool inside = input_tile * kTile + thread % 8 * 8 < int(a.k);
    const int piece_at = thread / 8 * kRowBytes + (thread % 8 ^ (thread / 8 & 7)) * 16;
#pragma unroll
    for (int i = 0; i < S::kTokens; i += kRowsAtOnce) {
      const bool valid = inside && i < tokens_here;
      copy_async16(to + S::kTokensAt + i * kRowBytes + (piece_at ^ (i & 7) * 16),
                   valid ? x + i * a.x_stride + input_tile * kTile : static_cast<const T*>(a.x), valid);
    }
  }
};

// Adds the products of a tile. Those of one group of inputs are summed apart, because their scale comes last.
template <class S, bool ByHalf>
__device__ __forceinline__ void multiply_tile(float (&sums)[S::kWarpSlabs][S::kTokenBlocks][4],
                                              const unsigned char* stage, int row_warp, bool with_zeros,
                                              int lane) {
  using T = typename S::T;
  uint32_t b[S::kTokenBlocks][kSteps][2];
  const SharedAddress tokens = shared_address(stage + S::kTokensAt) + lane % 8 * (kTile * 2);
#pragma unroll
  for (int n = 0; n < S::kTokenBlocks; ++n) {
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      uint32_t r[4];
      load_matrix_x4<false>(r, tokens + n * (8 * kTile * 2) + (((2 * step + lane / 8) ^ lane % 8) * 16));
      b[n][step][0] = r[0], b[n][step][1] = r[1], b[n][step + 1][0] = r[2], b[n][step + 1][1] = r[3];
    }
  }
#pragma unroll
  for (int s = 0; s < S::kWarpSlabs; ++s) {
    const int slab_of_all = row_warp * S::kWarpSlabs + s, tile = slab_of_all / kSlabs,
              slab = slab_of_all % kSlabs;
    Vector<uint32_t, 4> words[S::kBits / 4];
#pragma unroll
    for (int i = 0; i < S::kBits / 4; ++i) {
      words[i] = load_vector<uint32_t>(reinterpret_cast<const uint32_t*>(
          stage + tile * S::kTileBytes + slab * S::kSlabBytes + (i * kWarp + lane) * 16));
    }
    float part[S::kTokenBlocks][4] = {};
    SlabZeros slab_zero{};
    float scale[2] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step == 0 || (ByHalf && step == kSteps / 2)) {
        const int half = step / (kSteps / 2),
                  at = (half * S::kTiles + tile) * kTile + slab * kSlab + lane / 4 * 2;
        uint32_t zeros = S::kBits == 4 ? 0x0808u : 0x8080u;
        if (with_zeros) zeros = *reinterpret_cast<const uint16_t*>(stage + S::kZerosAt + at);
        slab_zero = slab_zeros<T, S::kBits>(zeros);
        const uint32_t pair = *reinterpret_cast<const uint32_t*>(stage + S::kScalesAt + at * 2);
        scale[0] = to_float(T{uint16_t(pair)});
        scale[1] = to_float(T{uint16_t(pair >> 16)});
      }
      uint32_t a[4];
      dequantize<T, S::kBits>(a, words, step, slab_zero);
#pragma unroll
      for (int n = 0; n < S::kTokenBlocks; ++n) mma_m16n8k16<T>(part[n], a, b[n][step]);
      if (step == kSteps - 1 || (ByHalf && step == kSteps / 2 - 1)) {
#pragma unroll
        for (int n = 0; n < S::kTokenBlocks; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sums[s][n][i] = fmaf(part[n][i], scale[i / 2], sums[s][n][i]);
            part[n][i] = 0;
          }
        }
      }
    }
  }
}

// The sum of what `count` places hold, in their order.
template <int N>
__device__ __forceinline__ Vector<float, N> sum_of_parts(const float* from, int64_t stride, int count) {
  Vector<float, N> sum = load_vector<float, N>(from);
#pragma unroll 8
  for (int i = 1; i < count; ++i) {
    const auto part = load_vector<float, N>(from + i * stride);
#pragma unroll
    for (int e = 0; e < N; ++e) sum[e] += part[e];
  }
  return sum;
}

// Writes the half of a fragment of sums that has outputs first_row ... + 7 of tokens first_token ... + 7.
template <class T>
__device__ __forceinline__ void write_half(const MarlinGemmArgs& a, bool paired, Vector<float, 2> d,
                                           int first_row, int first_token, int lane) {
  if (a.bias != nullptr && first_row + lane / 4 < a.n) {
    const float bias = to_float(static_cast<const T*>(a.bias)[first_row + lane / 4]);
    d[0] += bias;
    d[1] += bias;
  }
  const uint32_t pair = transpose_matrix(pack2<T>(d[0], d[1]));
  const int token = first_token + lane / 4, row = first_row + 2 * (lane % 4);
  if (token >= a.m || row >= a.n) return;
  T* const out = static_cast<T*>(a.out) + token * a.out_stride + row;
  if (paired) {
    *reinterpret_cast<uint32_t*>(out) = pair;
  } else {
    out[0] = T{uint16_t(pair)};
    if (row + 1 < a.n) out[1] = T{uint16_t(pair >> 16)};
  }
}

// The oldest copies of a group of warps are there: at most stages - 2 later ones are not.
__device__ __forceinline__ void wait_for_stage(int stages) {
  switch (stages) {
    case 2:
      return copy_async_wait<0>();
    case 3:
      return copy_async_wait<1>();
    case 4:
      return copy_async_wait<2>();
    case 5:
      return copy_async_wait<3>();
    case 6:
      return copy_async_wait<4>();
    case 7:
      return copy_async_wait<5>();
    default:
      return copy_async_wait<6>();
  }
}

template <class S>
__global__ void __launch_bounds__(S::kMaxThreads, 1)
    gemm_kernel(const __grid_constant__ MarlinGemmArgs a, const __grid_constant__ GemmPlan plan) {
  using T = typename S::T;
  const int lane = threadIdx.x % kWarp, warp = shuffle(int(threadIdx.x / kWarp), 0);
  const int split = warp / S::kRowWarps, row_warp = warp % S::kRowWarps;
  const int warps = S::kRowWarps * plan.splits;
  // What the groups exchange, then each one's stages.
  float* const exchange = dynamic_shared<float>();
  unsigned char* const ring = reinterpret_cast<unsigned char*>(exchange + plan.splits * S::kSlotFloats) +
                              split * plan.stages * S::kStageBytes;
  uint32_t* const counters = reinterpret_cast<uint32_t*>(a.workspace);
  float* const slots = a.workspace + kMarlinCounters;
  __shared__ bool came_last;

  const bool by_half = a.group_size % kTile != 0;
  const int first = plan.cutting.first(blockIdx.x), last = plan.cutting.first(blockIdx.x + 1);
  Loader<S> loader{.a = a,
                   .plan = plan,
                   .ring = ring,
                   .thread = int(threadIdx.x) - split * S::kGroupThreads,
                   .split = split,
                   .last = last,
                   .line = first};
  const auto sync_group = [] {
    if constexpr (S::kRowWarps == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  };
  Piece piece;
  piece.open(plan, first, last);
  float sums[S::kWarpSlabs][S::kTokenBlocks][4] = {};
  int line = first, stage = 0;
  int ahead = 1 - plan.stages;  // tiles under way, less those that fill the pipeline
#pragma unroll 1
  for (;;) {
    if (ahead == 0) {
      wait_for_stage(plan.stages);
      sync_group();  // all see the stage, and are done with the one before it
    }
    loader.next(by_half);
    if (ahead < 0) {
      ++ahead;
      continue;
    }
    if (line + split < piece.end) {
      const unsigned char* const at = ring + stage * S::kStageBytes;
      if (by_half) {
        multiply_tile<S, true>(sums, at, row_warp, a.zeros != nullptr, lane);
      } else {
        multiply_tile<S, false>(sums, at, row_warp, a.zeros != nullptr, lane);
      }
    }
    stage = stage + 1 == plan.stages ? 0 : stage + 1;
    line += plan.splits;
    if (line < piece.end) continue;

    __syncthreads();  // the exchange of the last piece has been read
#pragma unroll
    for (int s = 0; s < S::kWarpSlabs; ++s) {
#pragma unroll
      for (int n = 0; n < S::kTokenBlocks; ++n) {
        const int fragment = (row_warp * S::kWarpSlabs + s) * S::kTokenBlocks + n;
        store_vector(exchange + ((split * S::kFragments + fragment) * kWarp + lane) * 4,
                     Vector<float, 4>{sums[s][n][0], sums[s][n][1], sums[s][n][2], sums[s][n][3]});
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[s][n][i] = 0;
      }
    }
    __syncthreads();
    const bool begins = piece.first == piece.start, ends = piece.end == piece.start + plan.input_tiles;
    const int first_row = piece.row_tile * S::kRows, first_token = piece.token_tile * S::kTokens;
    const auto write = [&](Vector<float, 4> sum, int fragment) {
      const int row = first_row + fragment / S::kTokenBlocks * kSlab;
      const int token = first_token + fragment % S::kTokenBlocks * 8;
      write_half<T>(a, plan.paired, {sum[0], sum[1]}, row, token, lane);
      write_half<T>(a, plan.paired, {sum[2], sum[3]}, row + 8, token, lane);
    };
    float* const slot = slots + (2 * int64_t(blockIdx.x) + (begins ? 1 : 0)) * S::kSlotFloats;
#pragma unroll 1
    for (int fragment = warp; fragment < S::kFragments; fragment += warps) {
      const auto sum = sum_of_parts<4>(exchange + (fragment * kWarp + lane) * 4, S::kSlotFloats, plan.splits);
      if (begins && ends) {
        write(sum, fragment);
      } else {
        store_vector(slot + (fragment * kWarp + lane) * 4, sum);
      }
    }
    if (!begins || !ends) {
      // The blocks of these outputs: their slots are the second of the first block, then the others' first.
      const int from = plan.cutting.part_of(piece.start);
      const int pieces = plan.cutting.part_of(piece.start + plan.input_tiles - 1) - from + 1;
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) {
        came_last = atomicAdd(&counters[from], 1u) == uint32_t(pieces - 1);
        if (came_last) counters[from] = 0;
      }
      __syncthreads();
      if (came_last) {
        __threadfence();
        const float* const of_first = slots + (2 * int64_t(from) + 1) * S::kSlotFloats;
#pragma unroll 1
        for (int fragment = warp; fragment < S::kFragments; fragment += warps) {
          const float* const part = of_first + (fragment * kWarp + lane) * 4;
          Vector<float, 4> sum = load_vector<float>(part);
          if (pieces > 1) {
            const auto rest = sum_of_parts<4>(part + S::kSlotFloats, 2 * S::kSlotFloats, pieces - 1);
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[e] += rest[e];
          }
          write(sum, fragment);
        }
      }
    }
    if (piece.end >= last) break;
    line = piece.end;
    piece.open(plan, line, last);
  }
  copy_async_wait<0>();
}

// Blocks of a launch: one a multiprocessor, but none with fewer tiles than groups of warps.
inline int64_t gemm_blocks(int64_t line, int splits) {
  const int64_t most = std::min<int64_t>(device_properties().multiprocessors, kMarlinCounters);
  return std::max<int64_t>(1, std::min(most, ceil_div<int64_t>(line, splits)));
}

template <class S>
int64_t gemm_workspace(int64_t m, int64_t n, int64_t k) {
  const int64_t line = ceil_div<int64_t>(n, S::kRows) * ceil_div<int64_t>(m, S::kTokens) * tiles(k);
  return kMarlinCounters + 2 * gemm_blocks(line, 1) * S::kSlotFloats;
}

template <class S>
int start_gemm(const MarlinGemmArgs& a, cudaStream_t stream) {
  const DeviceProperties& device = device_properties();
  const int64_t row_tiles = ceil_div<int64_t>(a.n, S::kRows),
                token_tiles = ceil_div<int64_t>(a.m, S::kTokens);
  const int64_t line = row_tiles * token_tiles * tiles(a.k);
  constexpr int64_t kMostColumns = 1 << 21;  // Reciprocal's limit
  if (line > kMaxBlocks || row_tiles * token_tiles > kMostColumns) return int(cudaErrorInvalidValue);
  // As many groups of warps as there is shared memory for three stages each.
  constexpr int kStaticBytes = 1024, kWantedStages = 3;
  const int room = device.shared_memory_per_block - kStaticBytes;
  const auto split_bytes = [](int stages) { return S::kSlotFloats * 4 + stages * S::kStageBytes; };
  const int splits = std::max(1, std::min(S::kMaxSplits, room / split_bytes(kWantedStages)));
  const int stages = std::min(kMaxStages, (room / splits - S::kSlotFloats * 4) / S::kStageBytes);
  if (stages < 2) return int(cudaErrorInvalidConfiguration);
  const int shared = splits * split_bytes(stages);
  const bool power_of_two = (a.group_size & (a.group_size - 1)) == 0;
  int shift = 0;
  while (shift < 30 && 1 << shift < a.group_size) ++shift;
  const int64_t blocks = gemm_blocks(line, splits);
  const GemmPlan plan{.cutting = Cutting(unsigned(line), unsigned(blocks)),
                      .per_input_tile = Reciprocal(tiles(a.k)),
                      .per_token_tile = Reciprocal(token_tiles),
                      .input_tiles = int(tiles(a.k)),
                      .token_tiles = int(token_tiles),
                      .splits = splits,
                      .stages = stages,
                      .group_shift = a.groups == 1  ? 30
                                     : power_of_two ? shift
                                                    : -1,
                      .paired = access_bytes({address(a.out), a.n * 2, a.out_stride * 2}) >= 4};
  if (const int error = allow_shared_memory(gemm_kernel<S>, shared)) return error;
  gemm_kernel<S><<<unsigned(blocks), S::kGroupThreads * splits, shared, stream>>>(a, plan);
  return launch_result();
}

// The shapes, by the number of tokens. The last one needs more shared memory than some devices have.
template <class T, int Bits, class F>
auto with_shape(int64_t m, F&& f) {
  constexpr int kRoom = 128 * 1024;
  if (m <= 16) return f(GemmShape<T, Bits, 4, 1, 2, 8>{});
  if (m <= 32 || device_properties().shared_memory_per_block < kRoom) {
    return f(GemmShape<T, Bits, 4, 2, 4, 4>{});
  }
  return f(GemmShape<T, Bits, 2, 4, 8, 2>{});
}

}  // namespace pelton::gpu::marlin
