// out = x W^T + bias with weights of 4 or 8 bits and a scale, perhaps a zero point, for groups of inputs.
// A task is a block of rows, converted once, times a run of panels. Few rows take the weights from registers
// as they are read; more rows share a piece of a panel that is unpacked into the first cache.
// Many rows of bfloat16 go through AMX where the CPU has it: products with weights less their middle are
// exact there. Method: x in int8 with a scale for each 32 inputs as in llama.cpp's Q8_0, or in fp32; tiles as
// in linear.
#include <algorithm>
#include <cstring>

#include "../../common/amx.h"
#include "../../common/scratch.h"
#include "../../common/tile.h"
#include "bytes.h"
#include "quant_linear.h"

namespace pelton::cpu {
namespace {

constexpr bool kWide = Vec::width == 16;
constexpr int kVectors = 2;  // of a panel
constexpr int64_t kPanel = kVectors * Vec::width;
constexpr int64_t kBlock = kQuantBlock;
constexpr int64_t kStepBytes = kPanel * 4;
constexpr int64_t kDepth = kWide ? 256 : 384;  // inputs of a piece that is unpacked to floats
constexpr int64_t kDepthStride = kDepth + 16;  // rows of x start in different sets of the cache
constexpr int64_t kByteDepth = 512;            // inputs of a piece that is unpacked to bytes
constexpr int kDotRows = kWide ? 6 : 4;        // of a register tile of dot products
constexpr int kDirectRows = 4;                 // in fp32 that are worth unpacking in registers
constexpr int64_t kAhead =
    8 << 10;  // bytes that few rows have on their way from memory: more than the core fetches
constexpr int64_t kBlockRows = 96;
[[maybe_unused]] constexpr int64_t kAmxRows = 8;     // that are worth a tile of 16
[[maybe_unused]] constexpr int64_t kAmxBlocks = 16;  // of a piece of a panel that is unpacked for AMX
constexpr int64_t kAmxInputBytes = 1 << 20;
constexpr int64_t kAmxSpeed = 4;          // against the other ways, for the size of tasks
constexpr int64_t kTasksPerThread = 4;    // so that a thread that is held up does less
constexpr int64_t kTaskWork = 128 << 10;  // multiplications that are worth a task; half of it for one row
constexpr int64_t kTaskPanels = 6;        // that make up for converting x once more

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Range {
  int64_t first, last;
  int64_t size() const { return last - first; }
};
// Part `i` of `parts` parts of [0, n), whose sizes differ by at most one.
constexpr Range part(int64_t n, int64_t parts, int64_t i) { return {i * n / parts, (i + 1) * n / parts}; }

struct Buffers {
  Scratch row, input, scales, sums, weight;
  uint64_t call = 0;  // whose rows are in `input`
  int64_t first_row = 0;
};
Buffers& buffers() {
  thread_local Buffers b;
  return b;
}

// ---- x ----

// One row of x as fp32, in the weight's order of inputs and with zeros up to whole blocks.
template <class X>
void widen_row(const QuantLinearArgs& a, int64_t row, float* to) {
  const X* x = static_cast<const X*>(a.x) + row * a.x_stride;
  const int64_t padded = a.blocks * kBlock;
  float* wide = a.order ? to + padded : to;
  for_each_vector(a.in_features, [&](int64_t i, int n, auto full) {
    store_step(wide + i, load_step(x + i, n, full), n, full);
  });
  if (!a.order) {
    std::fill(to + a.in_features, to + padded, 0.f);
    return;
  }
  for (int64_t i = 0; i < padded; ++i) {
    const bool there = uint64_t(a.order[i]) < uint64_t(a.in_features);
    to[i] = there ? wide[a.order[i]] : 0.f;
  }
}

// Rows of x in int8: x = scale * value in each block.
struct ByteRows {
  int8_t* values;   // [rows][stride]
  float* scales;    // [rows][blocks]: the scale
  float* sums;      // [rows][blocks]: scale times the sum of the values
  int32_t* starts;  // [rows][blocks]: minus the middle of the weights' range, times the sum of the values
  int64_t stride, blocks;

  ByteRows at(int64_t row, int64_t block) const {
    const int64_t i = row * blocks + block;
    return {values + row * stride + block * kBlock, scales + i, sums + i, starts + i, stride, blocks};
  }
};

void quantize_block(const float* x, int middle, int8_t* values, float& scale, float& sum, int32_t& start) {
  constexpr int kParts = kBlock / Vec::width;
  Vec part[kParts];
  // Of floats without a sign the larger has the larger bits; infinity and NaN are the largest.
  Bytes largest = repeat_int(0);
  for (int i = 0; i < kParts; ++i) {
    part[i] = load(x + i * Vec::width);
    largest = max_ints(largest, float_bits(abs(part[i])));
  }
  const int32_t bits = max_ints(largest);
  float most;
  std::memcpy(&most, &bits, sizeof most);
  scale = most * (1.f / 127);
  const Vec inverse = Vec::set1(most > 1e-35f ? 127.f / most : 0.f);
  Bytes total = repeat_int(0);
  for (int i = 0; i < kParts; ++i) {
    const Bytes ints = floats_to_ints(part[i] * inverse);
    store_ints_as_bytes(values + i * Vec::width, ints);
    total = add_ints(total, ints);
  }
  const int32_t count = sum_ints(total);
  sum = scale * float(count);
  start = int32_t(-middle * int64_t(count));
}

ByteRows byte_rows(const QuantLinearArgs& a, int64_t rows) {
  // An odd number of cache lines: rows start in different sets.
  const int64_t stride = (a.blocks * kBlock + 63) / 64 * 64 + (a.blocks * kBlock / 64 % 2 ? 128 : 64);
  const int64_t count = rows * a.blocks;
  float* scales = buffers().scales.floats(3 * count);
  return {reinterpret_cast<int8_t*>(buffers().input.floats(rows * stride / 4)),
          scales,
          scales + count,
          reinterpret_cast<int32_t*>(scales + 2 * count),
          stride,
          a.blocks};
}

void quantize_row(const QuantLinearArgs& a, const float* wide, const ByteRows& to) {
  for (int64_t b = 0; b < a.blocks; ++b)
    quantize_block(wide + b * kBlock, 1 << (a.bits - 1), to.values + b * kBlock, to.scales[b], to.sums[b],
                   to.starts[b]);
}

// Where a step's word has inputs 0 .. 7 (4 bits) or 0 .. 3 (8 bits): field j, counted from the low end.
constexpr int input_of_field(int bits, int j) {
  return bits == 8 || j % 2 == 0 ? j / (bits == 8 ? 1 : 2) : 4 + j / 2;
}

// Rows of x in fp32 for weights that are masked but not shifted: each divided by its field's value.
// [rows][blocks * 32], and their sums over blocks without that factor.
struct FieldRows {
  float* values;
  float* sums;
  int64_t stride, blocks;
};
FieldRows field_rows(const QuantLinearArgs& a, int64_t rows) {
  return {buffers().input.floats(rows * a.blocks * kBlock), buffers().scales.floats(rows * a.blocks),
          a.blocks * kBlock, a.blocks};
}
void scale_fields(const QuantLinearArgs& a, const float* wide, float* values, float* sums) {
  const int fields = 32 / a.bits;
  alignas(64) float factor[Vec::width];
  for (int i = 0; i < Vec::width; i += fields) {
    for (int j = 0; j < fields; ++j) {
      factor[i + input_of_field(a.bits, j)] = j + 1 < fields ? std::ldexp(1.f, -a.bits * j) : 1.f;
    }
  }
  for (int64_t b = 0; b < a.blocks; ++b) {
    Vec total = Vec::zero();
    for (int64_t i = b * kBlock; i < (b + 1) * kBlock; i += Vec::width) {
      const Vec x = load(wide + i);
      total = total + x;
      store(values + i, x * load(factor));
    }
    sums[b] = sum(total);
  }
}

// ---- products ----

Vec load_scales(const QuantLinearArgs& a, int64_t index) {
  switch (a.scale_dtype) {
    case DType::f16:
      return load(static_cast<const f16*>(a.scales) + index);
    case DType::bf16:
      return load(static_cast<const bf16*>(a.scales) + index);
    default:
      return load(static_cast<const float*>(a.scales) + index);
  }
}

// Calls f(first block, blocks, group) for the runs of `blocks` that have one group.
template <class F>
inline void for_each_group(const QuantLinearArgs& a, Range blocks, F&& f) {
  for (int64_t b = blocks.first; b < blocks.last;) {
    const int64_t group = b / a.group_blocks;
    const int64_t last = std::min(blocks.last, (group + 1) * a.group_blocks);
    f(b, last - b, group);
    b = last;
  }
}

// What a group adds: sums += scale * (product - (zero - middle) * sum of x).
template <int MR, class SumOfX>
inline void add_group(const QuantLinearArgs& a, int64_t panel, int64_t group, float middle,
                      Vec (&product)[MR][kVectors], float* sums, SumOfX&& sum_of_x) {
  float of_x[MR] = {};
  if (a.zeros) sum_of_x(of_x);
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    const int64_t at = (panel * a.groups + group) * kPanel + v * Vec::width;
    const Vec scale = load_scales(a, at);
    if (a.zeros) {
      const Vec shift = Vec::set1(middle) - load_unsigned(a.zeros + at);
#pragma GCC unroll 8
      for (int r = 0; r < MR; ++r) product[r][v] = fma(shift, Vec::set1(of_x[r]), product[r][v]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
      float* to = sums + r * kPanel + v * Vec::width;
      store(to, fma(scale, product[r][v], load(to)));
    }
  }
}

// How weights come: as packed, or a piece of 4-bit weights unpacked to bytes.
enum class Weights { packed4, unpacked4, packed8 };

template <Weights W>
constexpr int64_t kBlockBytes = kPanel * kBlock / (W == Weights::packed4 ? 2 : 1);

// product (+)= rows of x times blocks of a panel.
template <int MR, Weights W, class Sum>
inline void dot_blocks(const ByteRows& x, const uint8_t* weight, int64_t blocks,
                       Vec (&product)[MR][kVectors]) {
  constexpr int kInputs = W == Weights::packed4 ? 8 : 4;  // of a step
  const Bytes half = repeat_byte(15);
  for (int64_t b = 0; b < blocks; ++b, weight += kBlockBytes<W>) {
    Sum sums[MR][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
      const Bytes start = repeat_int(x.starts[r * x.blocks + b]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[r][v].begin(start);
    }
#pragma GCC unroll 8
    for (int s = 0; s < kBlock / kInputs; ++s) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const uint8_t* from = weight + s * kStepBytes + v * Vec::width * 4;
        if constexpr (W == Weights::packed4) _mm_prefetch((const char*)from + kAhead, _MM_HINT_T0);
        const Bytes raw = load_bytes(from);
        const Bytes low = W == Weights::packed4 ? raw & half : raw;
        const Bytes high = W == Weights::packed4 ? shift_right_ints<4>(raw) & half : raw;
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
          int32_t four[2];
          std::memcpy(four, x.values + r * x.stride + b * kBlock + s * kInputs, kInputs);
          sums[r][v].add(low, repeat_int(four[0]));
          if constexpr (W == Weights::packed4) sums[r][v].add(high, repeat_int(four[1]));
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
      const Vec scale = Vec::set1(x.scales[r * x.blocks + b]);
      const Bytes start = repeat_int(x.starts[r * x.blocks + b]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
        product[r][v] = fma(ints_to_floats(sums[r][v].finish(start)), scale, product[r][v]);
    }
  }
}

// sums [MR][kPanel] += MR rows of x times `blocks` of a panel; `x` and `weight` point at the first of them.
template <int MR, Weights W, class Sum>
void dot_tile(const QuantLinearArgs& a, int64_t panel, Range blocks, const ByteRows& x, const uint8_t* weight,
              float* sums) {
  for_each_group(a, blocks, [&](int64_t first, int64_t count, int64_t group) {
    const ByteRows part = x.at(0, first - blocks.first);
    Vec product[MR][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) product[r][v] = Vec::zero();
    dot_blocks<MR, W, Sum>(part, weight + (first - blocks.first) * kBlockBytes<W>, count, product);
    add_group<MR>(a, panel, group, float(1 << (a.bits - 1)), product, sums, [&](float (&of_x)[MR]) {
      for (int r = 0; r < MR; ++r)
        for (int64_t b = 0; b < count; ++b) of_x[r] += part.sums[r * x.blocks + b];
    });
  });
}

// The same with the number of rows known at run time, 1 <= rows <= MR.
template <Weights W, class Sum, int MR = kDotRows>
void dot_rows(const QuantLinearArgs& a, int64_t rows, int64_t panel, Range blocks, const ByteRows& x,
              const uint8_t* weight, float* sums) {
  if constexpr (MR > 1) {
    if (rows < MR) return dot_rows<W, Sum, MR - 1>(a, rows, panel, blocks, x, weight, sums);
  }
  dot_tile<MR, W, Sum>(a, panel, blocks, x, weight, sums);
}

template <Weights W>
void dot(const QuantLinearArgs& a, int64_t rows, int64_t panel, Range blocks, const ByteRows& x,
         const uint8_t* weight, float* sums) {
  if (quant_uses_vnni()) return dot_rows<W, VnniSum>(a, rows, panel, blocks, x, weight, sums);
  using Sum = std::conditional_t<W == Weights::packed8, SplitSum, ShortSum>;
  dot_rows<W, Sum>(a, rows, panel, blocks, x, weight, sums);
}

void unpack_bytes(const uint8_t* weight, int64_t blocks, uint8_t* to) {
  const Bytes half = repeat_byte(15);
  for (int64_t s = 0; s < blocks * kBlock / 8; ++s, weight += kStepBytes, to += 2 * kStepBytes) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const Bytes raw = load_bytes(weight + v * Vec::width * 4);
      store_bytes(to + v * Vec::width * 4, raw & half);
      store_bytes(to + kStepBytes + v * Vec::width * 4, shift_right_ints<4>(raw) & half);
    }
  }
}

template <int Bits, int J>
inline Vec masked_field(Bytes raw) {
  constexpr int kFields = 32 / Bits;
  if constexpr (J + 1 == kFields) return ints_to_floats(shift_right_ints<Bits * J>(raw));
  return ints_to_floats(raw & repeat_int(int32_t(((1u << Bits) - 1) << (Bits * J))));
}
template <int Bits, int J>
inline Vec shifted_field(Bytes raw) {
  constexpr int kFields = 32 / Bits;
  if constexpr (J + 1 == kFields) return ints_to_floats(shift_right_ints<Bits * J>(raw));
  return ints_to_floats(shift_right_ints<Bits * J>(raw) & repeat_int((1 << Bits) - 1));
}
template <int N, class F>
inline void unrolled(F&& f) {
  [&]<int... I>(std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>{}), ...);
  }(std::make_integer_sequence<int, N>{});
}

// sums [MR][kPanel] += MR rows of x in fp32 times a whole panel.
template <int Bits, int MR>
void multiply_direct(const QuantLinearArgs& a, int64_t panel, const FieldRows& x, const uint8_t* weight,
                     float* sums) {
  constexpr int kFields = 32 / Bits;
  constexpr int kSteps = kBlock / kFields;
  constexpr int kCopies = MR == 1 ? 4 : MR == 2 ? 2 : 1;  // of sums, as FMA units are deep
  for_each_group(a, {0, a.blocks}, [&](int64_t first, int64_t count, int64_t group) {
    Vec parts[kCopies][MR][kVectors];
#pragma GCC unroll 8
    for (int c = 0; c < kCopies; ++c)
#pragma GCC unroll 8
      for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) parts[c][r][v] = Vec::zero();
    const uint8_t* w = weight + first * kSteps * kStepBytes;
    const float* from = x.values + first * kBlock;
    for (int64_t s = 0; s < count * kSteps; ++s, w += kStepBytes, from += kFields) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        _mm_prefetch((const char*)w + v * Vec::width * 4 + kAhead, _MM_HINT_T0);
        const Bytes raw = load_bytes(w + v * Vec::width * 4);
        unrolled<kFields>([&](auto j) __attribute__((always_inline)) {
          const Vec field = masked_field<Bits, j>(raw);
#pragma GCC unroll 8
          for (int r = 0; r < MR; ++r) {
            Vec& to = parts[j % kCopies][r][v];
            to = fma(Vec::set1(from[r * x.stride + input_of_field(Bits, j)]), field, to);
          }
        });
      }
    }
    Vec product[MR][kVectors];
    float of_x[MR] = {};
    for (int r = 0; r < MR; ++r)
      for (int64_t b = first; b < first + count; ++b) of_x[r] += x.sums[r * x.blocks + b];
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        product[r][v] = parts[0][r][v];
#pragma GCC unroll 8
        for (int c = 1; c < kCopies; ++c) product[r][v] = product[r][v] + parts[c][r][v];
        if (!a.zeros)
          product[r][v] = fma(Vec::set1(-float(1 << (Bits - 1))), Vec::set1(of_x[r]), product[r][v]);
      }
    }
    add_group<MR>(a, panel, group, 0.f, product, sums,
                  [&](float (&to)[MR]) { std::copy(of_x, of_x + MR, to); });
  });
}
template <int Bits, int MR = kDirectRows>
void multiply_direct_rows(const QuantLinearArgs& a, int64_t rows, int64_t panel, const FieldRows& x,
                          const uint8_t* weight, float* sums) {
  if constexpr (MR > 1) {
    if (rows < MR) return multiply_direct_rows<Bits, MR - 1>(a, rows, panel, x, weight, sums);
  }
  multiply_direct<Bits, MR>(a, panel, x, weight, sums);
}

// Blocks of a panel as floats, to [inputs][kPanel].
template <int Bits>
void dequantize(const QuantLinearArgs& a, int64_t panel, Range blocks, const uint8_t* weight, float* to) {
  constexpr int kFields = 32 / Bits;
  constexpr int kSteps = kBlock / kFields;
  for_each_group(a, blocks, [&](int64_t, int64_t count, int64_t group) {
    Vec scale[kVectors], shift[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = (panel * a.groups + group) * kPanel + v * Vec::width;
      const Vec zero = a.zeros ? load_unsigned(a.zeros + at) : Vec::set1(float(1 << (Bits - 1)));
      scale[v] = load_scales(a, at);
      shift[v] = Vec::zero() - zero * scale[v];  // exact, as scales have at most 16 bits
    }
    for (int64_t s = 0; s < count * kSteps; ++s, weight += kStepBytes, to += kFields * kPanel) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const Bytes raw = load_bytes(weight + v * Vec::width * 4);
        unrolled<kFields>([&](auto j) __attribute__((always_inline)) {
          store(to + input_of_field(Bits, j) * kPanel + v * Vec::width,
                fma(shifted_field<Bits, j>(raw), scale[v], shift[v]));
        });
      }
    }
  });
}

// ---- tasks ----

Vec load_bias(const QuantLinearArgs& a, int64_t column, int n) {
  if (a.bias == nullptr) return Vec::zero();
  Vec v = Vec::zero();
  dispatch(a.bias_dtype,
           [&](auto t) { v = load_partial(static_cast<const decltype(t)*>(a.bias) + column, n); });
  return v;
}

// sums [rows][kPanel] + bias to the panel's columns of out.
template <class X>
void finish_panel(const QuantLinearArgs& a, Range rows, int64_t panel, const float* sums) {
  const int64_t column = panel * kPanel;
  for_each_vector(std::min(kPanel, a.out_features - column), [&](int64_t i, int n, auto full) {
    const Vec bias = load_bias(a, column + i, n);
    X* out = static_cast<X*>(a.out) + rows.first * a.out_stride + column + i;
    for (int64_t r = 0; r < rows.size(); ++r) {
      store_step(out + r * a.out_stride, load(sums + r * kPanel + i) + bias, n, full);
    }
  });
}

// Whether `input` must be filled with these rows first.
bool take_input(uint64_t call, int64_t first_row) {
  Buffers& b = buffers();
  if (b.call == call && b.first_row == first_row) return false;
  b.call = call;
  b.first_row = first_row;
  return true;
}

int64_t panel_bytes(const QuantLinearArgs& a) { return a.blocks * kBlock * kPanel * a.bits / 8; }

template <class X>
void byte_task(const QuantLinearArgs& a, Range rows, Range panels, uint64_t call) {
  const int64_t num_rows = rows.size();
  const ByteRows x = byte_rows(a, num_rows);
  if (take_input(call, rows.first)) {
    float* wide = buffers().row.floats(2 * a.blocks * kBlock + a.in_features);
    for (int64_t r = 0; r < num_rows; ++r) {
      widen_row<X>(a, rows.first + r, wide);
      quantize_row(a, wide, x.at(r, 0));
    }
  }
  float* sums = buffers().sums.floats(num_rows * kPanel);
  for (int64_t panel = panels.first; panel < panels.last; ++panel) {
    const uint8_t* weight = a.weight + panel * panel_bytes(a);
    std::fill(sums, sums + num_rows * kPanel, 0.f);
    if (num_rows <= kDotRows) {
      if (a.bits == 4) dot<Weights::packed4>(a, num_rows, panel, {0, a.blocks}, x, weight, sums);
      if (a.bits == 8) dot<Weights::packed8>(a, num_rows, panel, {0, a.blocks}, x, weight, sums);
    } else {
      uint8_t* bytes = reinterpret_cast<uint8_t*>(buffers().weight.floats(kByteDepth * kPanel / 4));
      for (int64_t first = 0; first < a.blocks; first += kByteDepth / kBlock) {
        const Range blocks{first, std::min(a.blocks, first + kByteDepth / kBlock)};
        const uint8_t* piece = weight + first * kBlock * kPanel * a.bits / 8;
        if (a.bits == 4) unpack_bytes(piece, blocks.size(), bytes);
        for (int64_t r = 0; r < num_rows; r += kDotRows) {
          const int64_t count = std::min<int64_t>(kDotRows, num_rows - r);
          const ByteRows part = x.at(r, first);
          float* to = sums + r * kPanel;
          if (a.bits == 4) dot<Weights::unpacked4>(a, count, panel, blocks, part, bytes, to);
          if (a.bits == 8) dot<Weights::packed8>(a, count, panel, blocks, part, piece, to);
        }
      }
    }
    finish_panel<X>(a, rows, panel, sums);
  }
}

template <class X, int Bits>
void direct_task(const QuantLinearArgs& a, Range rows, Range panels, uint64_t call) {
  const int64_t num_rows = rows.size();
  const FieldRows x = field_rows(a, num_rows);
  if (take_input(call, rows.first)) {
    float* wide = buffers().row.floats(2 * a.blocks * kBlock + a.in_features);
    for (int64_t r = 0; r < num_rows; ++r) {
      widen_row<X>(a, rows.first + r, wide);
      scale_fields(a, wide, x.values + r * x.stride, x.sums + r * x.blocks);
    }
  }
  float* sums = buffers().sums.floats(num_rows * kPanel);
  for (int64_t panel = panels.first; panel < panels.last; ++panel) {
    std::fill(sums, sums + num_rows * kPanel, 0.f);
    multiply_direct_rows<Bits>(a, num_rows, panel, x, a.weight + panel * panel_bytes(a), sums);
    finish_panel<X>(a, rows, panel, sums);
  }
}

template <class X, int Bits>
void float_task(const QuantLinearArgs& a, Range rows, Range panels, uint64_t call) {
  constexpr int64_t kPieceBlocks = kDepth / kBlock;
  const int64_t num_rows = rows.size();
  const int64_t pieces = std::max<int64_t>(1, ceil_div(a.blocks, kPieceBlocks));
  // x lies [piece][row][kDepthStride].
  float* input = buffers().input.floats(pieces * num_rows * kDepthStride);
  if (take_input(call, rows.first)) {
    float* wide = buffers().row.floats(2 * a.blocks * kBlock + a.in_features);
    for (int64_t r = 0; r < num_rows; ++r) {
      widen_row<X>(a, rows.first + r, wide);
      for (int64_t p = 0; p < pieces; ++p) {
        const int64_t last = std::min(a.blocks * kBlock, (p + 1) * kDepth);
        std::copy(wide + p * kDepth, wide + last, input + (p * num_rows + r) * kDepthStride);
      }
    }
  }
  float* sums = buffers().sums.floats(num_rows * kPanel);
  float* floats = buffers().weight.floats(kDepth * kPanel);
  for (int64_t panel = panels.first; panel < panels.last; ++panel) {
    const uint8_t* weight = a.weight + panel * panel_bytes(a);
    for (int64_t p = 0; p < pieces; ++p) {
      const Range blocks{p * kPieceBlocks, std::min(a.blocks, (p + 1) * kPieceBlocks)};
      dequantize<Bits>(a, panel, blocks, weight + blocks.first * kBlock * kPanel * Bits / 8, floats);
      const float* x = input + p * num_rows * kDepthStride;
      for_each_tile(num_rows, [&](int64_t, int64_t first, int count) {
        multiply_rows<2, Strides<kDepthStride, 1>, From::cache>(count, x + first * kDepthStride, floats,
                                                                kPanel, sums + first * kPanel, kPanel,
                                                                blocks.size() * kBlock, p > 0);
      });
    }
    finish_panel<X>(a, rows, panel, sums);
  }
}

#if defined(PELTON_AVX512)
bool use_amx(const QuantLinearArgs& a) {
  return a.dtype == DType::bf16 && a.rows >= kAmxRows && amx_usable();
}

// Calls f(first block, blocks, group, index) for the runs of blocks that are of one piece and of one group.
template <class F>
inline void for_each_run(const QuantLinearArgs& a, Range blocks, int64_t index, F&& f) {
  for_each_group(a, blocks,
                 [&](int64_t first, int64_t count, int64_t group) { f(first, count, group, index++); });
}

template <int Bits>
void amx_task(const QuantLinearArgs& a, Range rows, Range panels, uint64_t call) {
  constexpr int64_t kFields = 32 / Bits, kSteps = kBlock / kFields, kTileRows2 = 2 * kTileHeight;
  static_assert(kPanel == 2 * kTileHeight && kBlock == kTileDepth);
  const int64_t num_rows = rows.size(), padded_rows = ceil_div(num_rows, kTileHeight) * kTileHeight;
  const int64_t stride = a.blocks * kBlock + kBlock;  // rows start in different sets of the cache
  const int64_t max_runs = a.groups + ceil_div(a.blocks, kAmxBlocks);
  bf16* input = reinterpret_cast<bf16*>(buffers().input.floats(padded_rows * stride / 2));
  float* sums_of_x = buffers().scales.floats(max_runs * padded_rows);  // [run][row]
  if (take_input(call, rows.first)) {
    float* wide = buffers().row.floats(2 * a.blocks * kBlock + a.in_features);
    for (int64_t r = 0; r < padded_rows; ++r) {
      if (r < num_rows) {
        widen_row<bf16>(a, rows.first + r, wide);
      } else {
        std::fill_n(wide, a.blocks * kBlock, 0.f);
      }
      for (int64_t k = 0; k < a.blocks * kBlock; k += Vec::width)
        store(input + r * stride + k, load(wide + k));
      int64_t index = 0;
      for (int64_t first = 0; a.zeros && first < a.blocks; first += kAmxBlocks) {
        const Range piece{first, std::min(a.blocks, first + kAmxBlocks)};
        for_each_run(a, piece, index, [&](int64_t from, int64_t count, int64_t, int64_t run) {
          Vec total = Vec::zero();
          for (int64_t k = from * kBlock; k < (from + count) * kBlock; k += Vec::width)
            total = total + load(wide + k);
          sums_of_x[run * padded_rows + r] = sum(total);
          index = run + 1;
        });
      }
    }
  }
  float* sums = buffers().sums.floats(padded_rows * kPanel);
  bf16* pairs = reinterpret_cast<bf16*>(buffers().weight.floats(kAmxBlocks * kBlock * kPanel / 2));
  alignas(64) float product[kTileRows2 * kPanel];
  const Tiles tiles;
  for (int64_t panel = panels.first; panel < panels.last; ++panel) {
    const uint8_t* weight = a.weight + panel * panel_bytes(a);
    std::fill_n(sums, padded_rows * kPanel, 0.f);
    int64_t index = 0;
    for (int64_t first = 0; first < a.blocks; first += kAmxBlocks) {
      const Range piece{first, std::min(a.blocks, first + kAmxBlocks)};
      bf16* to = pairs;
      for (int64_t s = 0; s < piece.size() * kSteps; ++s, weight += kStepBytes, to += kFields * kPanel) {
        for (int v = 0; v < kVectors; ++v) {
          const uint8_t* from = weight + v * Vec::width * 4;
          _mm_prefetch(reinterpret_cast<const char*>(from) + kAhead, _MM_HINT_T0);
          step_to_bf16_pairs<Bits>(from, to + v * 2 * Vec::width, 2 * kPanel);
        }
      }
      for_each_run(a, piece, index, [&](int64_t from, int64_t count, int64_t group, int64_t run) {
        Vec scale[kVectors], shift[kVectors];
        for (int v = 0; v < kVectors; ++v) {
          const int64_t at = (panel * a.groups + group) * kPanel + v * Vec::width;
          scale[v] = load_scales(a, at);
          if (a.zeros)
            shift[v] = scale[v] * (Vec::set1(float(1 << (Bits - 1))) - load_unsigned(a.zeros + at));
        }
        const bf16* part = pairs + (from - first) * kBlock * kPanel;
        for (int64_t r = 0; r < padded_rows; r += kTileRows2) {
          const bf16* x = input + r * stride + from * kBlock;
          const int64_t height = std::min(kTileRows2, padded_rows - r);
          if (height == kTileRows2) {
            multiply_tiles<2>(x, stride, part, count, product, false);
          } else {
            multiply_tiles<1>(x, stride, part, count, product, false);
          }
          float* tile_sums = sums + r * kPanel;
          for (int64_t i = 0; i < height; ++i) {
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) {
              const int64_t at = i * kPanel + v * Vec::width;
              Vec total = fma(scale[v], load(product + at), load(tile_sums + at));
              if (a.zeros) total = fma(shift[v], Vec::set1(sums_of_x[run * padded_rows + r + i]), total);
              store(tile_sums + at, total);
            }
          }
        }
        index = run + 1;
      });
    }
    finish_panel<bf16>(a, rows, panel, sums);
  }
}
#else
bool use_amx(const QuantLinearArgs&) { return false; }
#endif

template <class X>
void task_of(const QuantLinearArgs& a, Range rows, Range panels, uint64_t call) {
#if defined(PELTON_AVX512)
  if (use_amx(a))
    return a.bits == 4 ? amx_task<4>(a, rows, panels, call) : amx_task<8>(a, rows, panels, call);
#endif
  if (a.int8) return byte_task<X>(a, rows, panels, call);
  if (rows.size() <= kDirectRows) {
    if (a.bits == 4) return direct_task<X, 4>(a, rows, panels, call);
    return direct_task<X, 8>(a, rows, panels, call);
  }
  if (a.bits == 4) return float_task<X, 4>(a, rows, panels, call);
  return float_task<X, 8>(a, rows, panels, call);
}

bool allow_vnni = true;

}  // namespace

int64_t quant_panel_width() { return kPanel; }

bool quant_uses_vnni() {
  static const bool has = cpu_has_vnni();
  return has && allow_vnni;
}
void quant_allow_vnni(bool allow) { allow_vnni = allow; }

QuantLinearPlan plan_quant_linear(const QuantLinearArgs& a, int64_t threads) {
  const int64_t panels = ceil_div(a.out_features, kPanel);
  const bool amx = use_amx(a);
  const int64_t amx_rows =
      std::clamp<int64_t>(kAmxInputBytes / (2 * kBlock) / std::max<int64_t>(1, a.blocks), 64, 256);
  const int64_t row_blocks = ceil_div(a.rows, amx ? amx_rows : kBlockRows);
  const int64_t rows = ceil_div(a.rows, row_blocks);
  const int64_t work = (rows == 1 ? 2 : rows) * a.blocks * kBlock * panels * kPanel / (amx ? kAmxSpeed : 1);
  // Equal shares for all threads first, then smaller ones as far as they pay.
  const int64_t tasks = std::min(work / kTaskWork, panels * row_blocks / kTaskPanels);
  const int64_t shares = std::clamp<int64_t>(tasks / threads, 1, kTasksPerThread);
  const int64_t panel_blocks =
      std::min(ceil_div(threads * shares, row_blocks), std::max<int64_t>(1, work / kTaskWork));
  return {panels, row_blocks, std::clamp<int64_t>(panel_blocks, 1, panels)};
}

void quant_linear(const QuantLinearArgs& a, const QuantLinearPlan& plan, int64_t task, uint64_t call) {
  // Tasks of the same rows follow each other, so that a thread converts them once.
  const Range rows = part(a.rows, plan.row_blocks, task / plan.panel_blocks);
  const Range panels = part(plan.panels, plan.panel_blocks, task % plan.panel_blocks);
  dispatch(a.dtype, [&](auto x) { task_of<decltype(x)>(a, rows, panels, call); });
}

void pack_quant_weight(const QuantPackArgs& a, int64_t first_panel, int64_t last_panel) {
  const int inputs = 32 / a.bits;  // of a step
  const uint8_t middle = uint8_t(1 << (a.bits - 1));
  uint8_t* to = a.packed + first_panel * a.blocks * kBlock * kPanel * a.bits / 8;
  const auto value = [&](int64_t n, int64_t i) {
    const int64_t k = a.order ? a.order[i] : i;
    if (n >= a.out_features || uint64_t(k) >= uint64_t(a.in_features)) return middle;
    return a.q[n * a.row_stride + k * a.column_stride];
  };
  for (int64_t panel = first_panel; panel < last_panel; ++panel) {
    for (int64_t i = 0; i < a.blocks * kBlock; i += inputs) {
      for (int64_t n = panel * kPanel; n < (panel + 1) * kPanel; ++n) {
        for (int b = 0; b < 4; ++b, ++to) {
          *to = a.bits == 8 ? value(n, i + b) : uint8_t((value(n, i + b) & 15) | value(n, i + 4 + b) << 4);
        }
      }
    }
  }
}

}  // namespace pelton::cpu
