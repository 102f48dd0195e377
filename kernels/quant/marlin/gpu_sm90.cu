// Products for many tokens on sm_90a: the choice of the shape. sm90.cuh has the kernel.
#include "sm90.cuh"

namespace pelton::gpu {
namespace {

using namespace marlin_sm90;

// Shapes by number: outputs and tokens of a block, and the part of the matrix units' speed that it reaches.
struct Candidate {
  int rows, tokens;
  double efficiency;
};
constexpr Candidate kCandidates[] = {{256, 128, 0.9}, {128, 256, 0.9}, {128, 128, 0.8},
                                     {128, 64, 0.6},  {384, 64, 0.7},  {192, 128, 0.85}};

struct Choice {
  int shape;
  bool whole;
};

// The choice that should take least time: a model of the multiprocessors' cycles.
Choice choose(int64_t m, int64_t n, int64_t k) {
  constexpr double kMacs = 2048, kWholeCost = 2000, kSplitCost = 5000, kSplitBytes = 16;  // a cycle
  const int64_t blocks = device_properties().multiprocessors;
  Choice best{};
  double least = 0;
  for (int shape = 0; shape < int(std::size(kCandidates)); ++shape) {
    const Candidate& c = kCandidates[shape];
    const int64_t columns = ceil_div<int64_t>(n, c.rows) * ceil_div<int64_t>(m, c.tokens);
    const double tile = c.rows * c.tokens * double(kTile) / kMacs / c.efficiency;
    for (const bool whole : {true, false}) {
      const int64_t waves = ceil_div(columns, blocks);
      const double cost = whole ? waves * (tiles(k) * tile + kWholeCost)
                                : ceil_div(columns * tiles(k), blocks) * tile + kSplitCost +
                                      c.rows * c.tokens * 8 / kSplitBytes;
      if (least == 0 || cost < least) {
        least = cost;
        best = {shape, whole};
      }
    }
  }
  if (const char* forced = std::getenv("PELTON_SHAPE"))
    best = {std::atoi(forced) / 2, std::atoi(forced) % 2 != 0};
  return best;
}

template <class T, class F>
auto with_shape(int shape, F&& f) {
  switch (shape) {
    case 0:
      return f(Shape<T, 4, 2, 2, 128>{});
    case 1:
      return f(Shape<T, 4, 2, 1, 256>{});
    case 2:
      return f(Shape<T, 4, 2, 1, 128>{});
    case 3:
      return f(Shape<T, 4, 2, 1, 64>{});
    case 4:
      return f(Shape<T, 4, 3, 2, 64>{});
    default:
      return f(Shape<T, 4, 3, 1, 128>{});
  }
}

int64_t blocks_of(const Candidate& c, int64_t m, int64_t n, int64_t k, bool whole) {
  const int64_t columns = ceil_div<int64_t>(n, c.rows) * ceil_div<int64_t>(m, c.tokens);
  return std::min<int64_t>(device_properties().multiprocessors, whole ? columns : columns * tiles(k));
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
  if (const int error = allow_shared_memory(gemm_kernel<S>, S::kShared)) return error;
  gemm_kernel<S><<<unsigned(blocks), S::kThreads, S::kShared, stream>>>(a, plan, map);
  return launch_result();
}

}  // namespace

bool marlin_sm90_fits(const MarlinGemmArgs& a) {
  constexpr int64_t kMinTokens = 17, kMostTiles = 1 << 30;
  return a.bits == 4 && a.m >= kMinTokens &&
         (a.groups == 1 || a.group_size % kTile == 0 || a.group_size == kTile / 2) &&
         tiles(a.n) * ceil_div<int64_t>(a.m, 64) * tiles(a.k) < kMostTiles && is_aligned16(a.scales) &&
         is_aligned16(a.weight) && (a.zeros == nullptr || is_aligned16(a.zeros));
}

int64_t marlin_workspace_size_sm90(int64_t m, int64_t n, int64_t k) {
  const Choice choice = choose(m, n, k);
  const Candidate& c = kCandidates[choice.shape];
  if (choice.whole) return kMarlinCounters;
  return kMarlinCounters + 2 * blocks_of(c, m, n, k, false) * c.rows * c.tokens;
}

int marlin_gemm_sm90(const MarlinGemmArgs& a, void* stream) {
  const Choice choice = choose(a.m, a.n, a.k);
  const int64_t blocks = blocks_of(kCandidates[choice.shape], a.m, a.n, a.k, choice.whole);
  const auto run = [&](auto zero) {
    return with_shape<decltype(zero)>(choice.shape, [&](auto shape) {
      return start<decltype(shape)>(a, choice.whole, blocks, cudaStream_t(stream));
    });
  };
  return a.dtype == DType::f16 ? run(f16{}) : run(bf16{});
}

}  // namespace pelton::gpu
