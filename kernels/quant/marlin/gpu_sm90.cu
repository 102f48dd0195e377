// Products for many tokens on sm_90a: the choice of the shape. sm90.cuh has the kernel.
#include "sm90.cuh"

namespace pelton::gpu {
namespace {

using namespace marlin_sm90;

// Shapes by number: outputs and tokens of a block, and microseconds that it takes for a tile of inputs,
// measured on an H200.
struct Candidate {
  int rows, tokens;
  double tile;
};
constexpr Candidate kCandidates[] = {
    {128, 64, 0.34}, {384, 64, 0.83}, {128, 128, 0.45}, {192, 128, 0.62}, {128, 256, 0.72}};

template <class T, class F>
int with_shape(int shape, F&& f) {
  switch (shape) {
    case 0:
      return f(Shape<T, 4, 2, 1, 64>{});
    case 1:
      return f(Shape<T, 4, 3, 2, 64>{});
    case 2:
      return f(Shape<T, 4, 2, 1, 128>{});
    case 3:
      return f(Shape<T, 4, 3, 1, 128>{});
    default:
      return f(Shape<T, 4, 2, 1, 256>{});
  }
}

struct Choice {
  int shape;
  bool whole;
  int64_t blocks;
};

int64_t multiprocessors() { return std::min<int64_t>(device_properties().multiprocessors, kMarlinCounters); }
int64_t columns_of(const Candidate& c, int64_t m, int64_t n) {
  return ceil_div<int64_t>(n, c.rows) * ceil_div<int64_t>(m, c.tokens);
}

// The choice that should take least time: whole tiles of outputs in waves of blocks, or equal parts of the
// line and then the time to put them together.
Choice choose(int64_t m, int64_t n, int64_t k) {
  constexpr double kWave = 1, kSplit = 3.5, kSplitElement = 3.8e-4;
  Choice best{};
  double least = 0;
  for (int shape = 0; shape < int(std::size(kCandidates)); ++shape) {
    const Candidate& c = kCandidates[shape];
    const int64_t columns = columns_of(c, m, n);
    for (const bool whole : {true, false}) {
      const int64_t work = whole ? columns : columns * tiles(k), blocks = std::min(multiprocessors(), work);
      const double each = double(ceil_div(work, blocks));
      const double time = whole ? each * (double(tiles(k)) * c.tile + kWave)
                                : each * c.tile + kSplit + kSplitElement * c.rows * c.tokens;
      if (least == 0 || time < least) {
        least = time;
        best = {shape, whole, blocks};
      }
    }
  }
  return best;
}

template <class S>
int start(const MarlinGemmArgs& a, bool whole, int64_t blocks, cudaStream_t stream) {
  CUtensorMap map;
  const uint64_t stride = uint64_t(a.x_stride) * 2;
  if (const int error = encode_map<3>(map, S::T::is_bf16, a.x, {uint64_t(a.k), uint64_t(a.m), 1},
                                      {stride, stride * uint64_t(a.m)}, {kTile, S::kTokens, 1})) {
    return error;
  }
  constexpr int kBand = 16;
  const int token_tiles = int(ceil_div<int64_t>(a.m, S::kTokens));
  const Plan plan{.input_tiles = int(tiles(a.k)),
                  .row_tiles = int(ceil_div<int64_t>(a.n, S::kRows)),
                  .token_tiles = token_tiles,
                  .band = std::min(token_tiles, kBand),
                  .tiles_a_group = a.groups == 1 ? int(tiles(a.k)) : a.group_size / kTile,
                  .whole = whole,
                  .in_fours = access_bytes({address(a.out), a.n * 2, a.out_stride * 2}) >= 8};
  if (const int error = allow_shared_memory(wide_gemm_kernel<S>, S::kShared)) return error;
  wide_gemm_kernel<S><<<unsigned(blocks), S::kThreads, S::kShared, stream>>>(a, plan, map);
  return launch_result();
}

}  // namespace

bool marlin_sm90_fits(const MarlinGemmArgs& a) {
  // With fewer tokens the other kernel is faster; with more tiles their numbers would not be exact.
  constexpr int64_t kMinTokens = 33, kMostTiles = 1 << 30, kLeastTokens = 64;
  const bool groups = a.groups == 1 || a.group_size % kTile == 0 || a.group_size == kTile / 2;
  return a.bits == 4 && a.m >= kMinTokens && groups && is_aligned16(a.weight) && is_aligned16(a.scales) &&
         (a.zeros == nullptr || is_aligned16(a.zeros)) &&
         tiles(a.n) * ceil_div(a.m, kLeastTokens) * tiles(a.k) < kMostTiles;
}

// Of the shape that takes most, so that a workspace for many tokens does for fewer.
int64_t marlin_workspace_size_sm90(int64_t m, int64_t n, int64_t k) {
  int64_t slots = 0;
  for (const Candidate& c : kCandidates) {
    const int64_t blocks = std::min(multiprocessors(), columns_of(c, m, n) * tiles(k));
    slots = std::max(slots, 2 * blocks * c.rows * c.tokens);
  }
  return kMarlinCounters + slots;
}

int marlin_gemm_sm90(const MarlinGemmArgs& a, void* stream) {
  const Choice choice = choose(a.m, a.n, a.k);
  const auto run = [&](auto zero) {
    return with_shape<decltype(zero)>(choice.shape, [&](auto shape) {
      return start<decltype(shape)>(a, choice.whole, choice.blocks, cudaStream_t(stream));
    });
  };
  return a.dtype == DType::f16 ? run(f16{}) : run(bf16{});
}

}  // namespace pelton::gpu
