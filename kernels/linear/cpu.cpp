// out = x W^T + bias with weights packed into panels, [panels][in_features][panel width], sums in fp32.
// A task is a block of rows, widened once, times a run of panels, each read once, by register tiles; bfloat16
// times bfloat16 by AMX, where the CPU has it. Method: Goto and van de Geijn, 2008, with B packed ahead of
// time and A a task at a time.
#include <algorithm>

#include "../common/amx.h"
#include "../common/scratch.h"
#include "../common/tile.h"
#include "linear.h"

namespace pelton::cpu {
namespace {

// Sizes in elements or bytes, for the caches of the machines that have the instruction set.
constexpr bool kWide = Vec::width == 16;
constexpr int64_t kPanel = 2 * Vec::width;
constexpr int64_t kDepth = kWide ? 256 : 384;  // of the piece of a panel that stays in the first cache
constexpr int64_t kStreamDepth = 4096;         // of a piece that is used once
// Rows of x lie so that they start in different sets of the cache.
constexpr int64_t kDepthStride = kDepth + 16, kStreamStride = kStreamDepth + 16;
constexpr int64_t kBlockRows = kTileRows * (kWide ? 12 : 16);
constexpr int64_t kInputBytes = 512 << 10;                    // of x, which stays in the second cache
constexpr int64_t kSumBytes = kWide ? 512 << 10 : 128 << 10;  // of sums that wait for the next piece of x
constexpr int64_t kTasksPerThread = 4;                        // so that a thread that is held up does less
constexpr int64_t kTaskWork = 64 << 10;  // multiplications that are worth a task; half of it for one row
constexpr int64_t kTaskPanels = 6;       // that make up for widening x once more

constexpr int64_t kAmxRows = 8;                      // that are worth a tile of 16
[[maybe_unused]] constexpr int64_t kAmxDepth = 512;  // of a piece of a panel whose rows are paired for AMX
constexpr int64_t kAmxInputBytes = 1 << 20;
constexpr int64_t kAmxSpeed = 8;                         // against FMA, for the size of tasks
[[maybe_unused]] constexpr int64_t kAmxAhead = 8 << 10;  // bytes that are fetched ahead while rows are paired

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Range {
  int64_t first, last;
  int64_t size() const { return last - first; }
};
// Part `i` of `parts` parts of [0, n), whose sizes differ by at most one.
constexpr Range part(int64_t n, int64_t parts, int64_t i) { return {i * n / parts, (i + 1) * n / parts}; }

// How a task cuts its sums over in_features: pieces of x and of a panel that are multiplied at a time,
// and how many pieces of x are widened at a time.
struct Cut {
  int64_t pieces, pieces_at_once, stride;
};
Cut cut_depth(int64_t rows, int64_t in_features) {
  const bool stream = rows <= kTileRows;
  const int64_t stride = stream ? kStreamStride : kDepthStride;
  const int64_t pieces = std::max<int64_t>(1, ceil_div(in_features, stream ? kStreamDepth : kDepth));
  const int64_t piece_bytes = rows * stride * int64_t(sizeof(float));
  return {pieces, std::clamp<int64_t>(kInputBytes / piece_bytes, 1, pieces), stride};
}

struct Buffers {
  Scratch input, sums, pairs;
};
Buffers& buffers() {
  thread_local Buffers b;
  return b;
}

// Rows of x, the pieces `pieces` of them, to fp32 [piece][row][stride].
template <class X>
void widen_input(const X* x, int64_t x_stride, int64_t rows, int64_t in_features, int64_t num_pieces,
                 Range pieces, float* to, int64_t stride) {
  for (int64_t p = pieces.first; p < pieces.last; ++p) {
    const Range k = part(in_features, num_pieces, p);
    for (int64_t r = 0; r < rows; ++r, to += stride) {
      const X* from = x + r * x_stride + k.first;
      for_each_vector(k.size(), [&](int64_t i, int n, auto full) {
        store_step(to + i, load_step(from + i, n, full), n, full);
      });
    }
  }
}

// sums [rows][kPanel] (+)= one piece of x times the same piece of a panel. One tile: the weights go by once.
template <class W>
void multiply_stream(const float* x, const W* weight, int64_t rows, int64_t depth, float* sums,
                     bool accumulate) {
  multiply_rows<2, Strides<kStreamStride, 1>, From::memory>(int(rows), x, weight, kPanel, sums, kPanel, depth,
                                                            accumulate);
}

// The same with several tiles, which find the weights in the cache; meanwhile the next ones come.
template <class W>
void multiply_block(const float* x, const W* weight, const W* next_weight, int64_t rows, int64_t depth,
                    float* sums, bool accumulate) {
  constexpr bool kNarrow = !std::is_same_v<W, float>;
  alignas(64) float buffer[kNarrow ? kDepth * kPanel : 1];
  const float* wide;
  if constexpr (!kNarrow) {
    wide = weight;
  } else {
    for (int64_t i = 0; i < depth * kPanel; i += Vec::width) store(buffer + i, load(weight + i));
    wide = buffer;
  }
  const int64_t ahead_step = ceil_div(kPanel * sizeof(W), num_tiles(rows));
  for_each_tile(rows, [&](int64_t tile, int64_t first, int count) {
    const Ahead ahead{(const char*)next_weight + tile * depth * ahead_step, ahead_step};
    multiply_rows<2, Strides<kDepthStride, 1>, From::cache_with_prefetch>(count, x + first * kDepthStride,
                                                                          wide, kPanel, sums + first * kPanel,
                                                                          kPanel, depth, accumulate, ahead);
  });
}

Vec load_bias(const LinearArgs& a, int64_t column, int n) {
  if (a.bias == nullptr) return Vec::zero();
  Vec v = Vec::zero();
  dispatch(a.bias_dtype,
           [&](auto t) { v = load_partial(static_cast<const decltype(t)*>(a.bias) + column, n); });
  return v;
}

// Brings the panel's columns of out closer before they are written: each row is a cache line of its own.
template <class X>
void fetch_panel(const LinearArgs& a, int64_t first_row, int64_t rows, int64_t panel) {
  const X* out = static_cast<const X*>(a.out) + first_row * a.out_stride + panel * kPanel;
  for (int64_t r = 0; r < rows; ++r) {
    const char* line = (const char*)(out + r * a.out_stride);
    for (int64_t i = 0; i < kPanel * int64_t(sizeof(X)); i += 64) _mm_prefetch(line + i, _MM_HINT_T0);
  }
}

// sums [rows][kPanel] + bias to the panel's columns of out.
template <class X>
void finish_panel(const LinearArgs& a, int64_t first_row, int64_t rows, int64_t panel, const float* sums) {
  const int64_t column = panel * kPanel;
  for_each_vector(std::min(kPanel, a.out_features - column), [&](int64_t i, int n, auto full) {
    const Vec bias = load_bias(a, column + i, n);
    X* out = static_cast<X*>(a.out) + first_row * a.out_stride + column + i;
    for (int64_t r = 0; r < rows; ++r) {
      store_step(out + r * a.out_stride, load(sums + r * kPanel + i) + bias, n, full);
    }
  });
}

template <class X, class W>
void linear_task(const LinearArgs& a, Range rows, Range panels) {
  const int64_t num_rows = rows.size();
  const Cut cut = cut_depth(num_rows, a.in_features);
  const int64_t piece_floats = num_rows * cut.stride;
  const bool keep_sums = cut.pieces_at_once < cut.pieces;
  float* input = buffers().input.floats(cut.pieces_at_once * piece_floats);
  float* sums = buffers().sums.floats((keep_sums ? panels.size() : 1) * num_rows * kPanel);
  const X* x = static_cast<const X*>(a.x) + rows.first * a.x_stride;

  for (int64_t first = 0; first < cut.pieces; first += cut.pieces_at_once) {
    const Range pieces{first, std::min(cut.pieces, first + cut.pieces_at_once)};
    widen_input(x, a.x_stride, num_rows, a.in_features, cut.pieces, pieces, input, cut.stride);
    const int64_t group_start = part(a.in_features, cut.pieces, pieces.first).first;
    for (int64_t panel = panels.first; panel < panels.last; ++panel) {
      const W* weight = static_cast<const W*>(a.weight) + panel * a.in_features * kPanel;
      const W* next_panel = weight + (a.in_features + group_start) * kPanel;
      float* panel_sums = keep_sums ? sums + (panel - panels.first) * num_rows * kPanel : sums;
      if (pieces.last == cut.pieces) fetch_panel<X>(a, rows.first, num_rows, panel);
      for (int64_t p = pieces.first; p < pieces.last; ++p) {
        const Range k = part(a.in_features, cut.pieces, p);
        const float* x_piece = input + (p - pieces.first) * piece_floats;
        const W* piece = weight + k.first * kPanel;
        if (num_rows <= kTileRows) {
          multiply_stream(x_piece, piece, num_rows, k.size(), panel_sums, p > 0);
        } else {
          const W* next = p + 1 < pieces.last ? weight + k.last * kPanel : next_panel;
          multiply_block(x_piece, piece, next, num_rows, k.size(), panel_sums, p > 0);
        }
      }
      if (pieces.last == cut.pieces) finish_panel<X>(a, rows.first, num_rows, panel, panel_sums);
    }
  }
}

bool use_amx(const LinearArgs& a) {
  return a.dtype == DType::bf16 && a.weight_dtype == DType::bf16 && a.rows >= kAmxRows && uses_amx();
}

#if defined(PELTON_AVX512)
void amx_task(const LinearArgs& a, Range rows, Range panels) {
  const int64_t num_rows = rows.size(), padded_rows = ceil_div(num_rows, kTileHeight) * kTileHeight;
  const int64_t depth = ceil_div(a.in_features, kTileDepth) * kTileDepth;
  const int64_t stride = depth + kTileDepth;  // rows start in different sets of the cache
  // x with zeros up to whole tiles; what stands beyond would be multiplied with zeros, but may be NaN.
  bf16* input = reinterpret_cast<bf16*>(buffers().input.floats(padded_rows * stride / 2));
  for (int64_t r = 0; r < padded_rows; ++r) {
    bf16* to = input + r * stride;
    const int64_t count = r < num_rows ? a.in_features : 0;
    if (count > 0) std::copy_n(static_cast<const bf16*>(a.x) + (rows.first + r) * a.x_stride, count, to);
    std::fill(to + count, to + depth, bf16{});
  }
  float* sums = buffers().sums.floats(padded_rows * kPanel);
  bf16* pairs = reinterpret_cast<bf16*>(buffers().pairs.floats(kAmxDepth * kPanel / 2));
  const Tiles tiles;
  for (int64_t panel = panels.first; panel < panels.last; ++panel) {
    const bf16* weight = static_cast<const bf16*>(a.weight) + panel * a.in_features * kPanel;
    if (depth == 0) std::fill_n(sums, padded_rows * kPanel, 0.f);
    for (int64_t first = 0; first < depth; first += kAmxDepth) {
      const int64_t last = std::min(depth, first + kAmxDepth);
      const bf16 zeros[kPanel] = {};
      for (int64_t k = first; k < last; k += 2) {
        const bf16* from = weight + k * kPanel;
        for (int64_t i = 0; i < 2 * kPanel * 2; i += 64)
          _mm_prefetch(reinterpret_cast<const char*>(from) + kAmxAhead + i, _MM_HINT_T0);
        pair_rows(k < a.in_features ? from : zeros, k + 1 < a.in_features ? from + kPanel : zeros,
                  pairs + (k - first) * kPanel);
      }
      // The next piece comes while this one is multiplied.
      const int64_t steps = (last - first) / kTileDepth,
                    tiles_of_rows = ceil_div(padded_rows, 2 * kTileHeight);
      const char* next = reinterpret_cast<const char*>(weight + last * kPanel);
      const int64_t step_bytes = ceil_div((last - first) * kPanel * 2, steps * tiles_of_rows * 64) * 64;
      for (int64_t r = 0; r < padded_rows; r += 2 * kTileHeight, next += steps * step_bytes) {
        const bf16* x = input + r * stride + first;
        float* to = sums + r * kPanel;
        if (r + 2 * kTileHeight <= padded_rows) {
          multiply_tiles<2>(x, stride, pairs, steps, to, first > 0, {next, step_bytes});
        } else {
          multiply_tiles<1>(x, stride, pairs, steps, to, first > 0, {next, step_bytes});
        }
      }
    }
    finish_panel<bf16>(a, rows.first, num_rows, panel, sums);
  }
}
#endif

template <class T>
void pack_panels(const PackArgs& a, int64_t first_panel, int64_t last_panel) {
  for (int64_t panel = first_panel; panel < last_panel; ++panel) {
    T* to = static_cast<T*>(a.packed) + panel * a.in_features * kPanel;
    const T* from = static_cast<const T*>(a.weight) + panel * kPanel * a.weight_stride;
    const int64_t columns = std::min(kPanel, a.out_features - panel * kPanel);
    for (int64_t k = 0; k < a.in_features; ++k, to += kPanel) {
      for (int64_t j = 0; j < columns; ++j) to[j] = from[j * a.weight_stride + k];
      for (int64_t j = columns; j < kPanel; ++j) to[j] = T{};
    }
  }
}

}  // namespace

int64_t linear_panel_width() { return kPanel; }

#if defined(PELTON_AVX512)
bool uses_amx() { return amx_usable(); }
void allow_amx(bool allow) { amx_allowed = allow; }
#else
bool uses_amx() { return false; }
void allow_amx(bool) {}
#endif

LinearPlan plan_linear(const LinearArgs& a, int64_t threads) {
  const int64_t panels = ceil_div(a.out_features, kPanel);
  const bool amx = use_amx(a);
  const int64_t amx_rows =
      std::clamp<int64_t>(kAmxInputBytes / 2 / std::max<int64_t>(1, a.in_features), 64, 256);
  const int64_t row_blocks = ceil_div(a.rows, amx ? amx_rows : kBlockRows);
  const int64_t rows = ceil_div(a.rows, row_blocks);
  const int64_t work = (rows == 1 ? 2 : rows) * a.in_features * panels * kPanel / (amx ? kAmxSpeed : 1);
  // Equal shares for all threads first, then smaller ones as far as they pay.
  const int64_t tasks = std::min(work / kTaskWork, panels * row_blocks / kTaskPanels);
  const int64_t shares = std::clamp<int64_t>(tasks / threads, 1, kTasksPerThread);
  int64_t panel_blocks =
      std::min(ceil_div(threads * shares, row_blocks), std::max<int64_t>(1, work / kTaskWork));
  const Cut cut = cut_depth(rows, a.in_features);
  if (!amx && cut.pieces_at_once < cut.pieces) {
    const int64_t panels_at_once = std::max<int64_t>(1, kSumBytes / (rows * kPanel * int64_t(sizeof(float))));
    panel_blocks = std::max(panel_blocks, ceil_div(panels, panels_at_once));
  }
  return {panels, row_blocks, std::clamp<int64_t>(panel_blocks, 1, panels)};
}

void linear(const LinearArgs& a, const LinearPlan& plan, int64_t task) {
  // Row blocks of the same panels follow each other, so that threads share the panels in the cache.
  const Range rows = part(a.rows, plan.row_blocks, task % plan.row_blocks);
  const Range panels = part(plan.panels, plan.panel_blocks, task / plan.row_blocks);
#if defined(PELTON_AVX512)
  if (use_amx(a)) return amx_task(a, rows, panels);
#endif
  dispatch(a.dtype, [&](auto x) {
    dispatch(a.weight_dtype, [&](auto w) { linear_task<decltype(x), decltype(w)>(a, rows, panels); });
  });
}

void pack_linear_weight(const PackArgs& a, int64_t first_panel, int64_t last_panel) {
  dispatch(a.dtype, [&](auto t) { pack_panels<decltype(t)>(a, first_panel, last_panel); });
}

}  // namespace pelton::cpu
