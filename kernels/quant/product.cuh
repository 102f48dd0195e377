// Products with quantized weights, for every format that has a description like Gptq or Awq here.
// The weights are the rows of A, the tokens the columns of B: few tokens waste little of an instruction, and
// a lane unpacks just what it brings. A sum over inputs does not depend on their order, so each lane takes
// consecutive inputs and reads weights and activations by 16 bytes, without shared memory. The warps of a
// block split the inputs; their sums are added in a fixed order. Products of a group are summed as small
// integers, and scaled in fp32.
#pragma once
#include "../common/amd_mma.cuh"
#include "../common/gpu.cuh"
#include "../common/mma.cuh"
#include "product.h"

namespace pelton::gpu {

// --- pairs of weights ---

// What is subtracted from quantized weights, ready for pair_of.
template <class T, int Bits>
struct Zero {
#ifdef PELTON_CUDA
  static constexpr bool kPacked = Bits == 4 || !T::is_bf16;
#elif defined(__HIP_PLATFORM_AMD__) && !defined(PELTON_EMULATION)
  static constexpr bool kPacked = !T::is_bf16;
#else
  static constexpr bool kPacked = false;
#endif
  // 1024 or 128, whose last places are the units, in both halves.
  static constexpr uint32_t kUnits = T::is_bf16 ? 0x43004300u : 0x64006400u;
  // 2^23 in fp32.
  static constexpr uint32_t kWideUnits = 0x4b000000u;

  uint32_t bits;

  __device__ __forceinline__ void set(uint32_t zero) {
    bits = kPacked ? kUnits | zero << 16 | zero : kWideUnits | zero;
  }

  // (q - zero) of two quantized weights, which stand in the low bits of both halves. Exact.
  __device__ __forceinline__ uint32_t pair_of(uint32_t q) const {
    if constexpr (kPacked) {
      const uint32_t value = q | kUnits;
#ifdef PELTON_CUDA
      using Pair = std::conditional_t<T::is_bf16, __nv_bfloat162, __half2>;
      Pair a, b;
      memcpy(&a, &value, 4);
      memcpy(&b, &bits, 4);
      const Pair difference = __hsub2(a, b);
      uint32_t result;
      memcpy(&result, &difference, 4);
      return result;
#elif defined(__HIP_PLATFORM_AMD__) && !defined(PELTON_EMULATION)
      using Pair = _Float16 __attribute__((ext_vector_type(2)));
      return __builtin_bit_cast(uint32_t, __builtin_bit_cast(Pair, value) - __builtin_bit_cast(Pair, bits));
#endif
    }
    const float zero = from_bits(bits);
    const float low = from_bits((q & 0xffffu) | kWideUnits) - zero;
    const float high = from_bits(q >> 16 | kWideUnits) - zero;
    if constexpr (T::is_bf16) {  // no bit is lost
      return to_bits(low) >> 16 | (to_bits(high) & 0xffff0000u);
    } else {
      return pack2<T>(low, high);
    }
  }

 private:
  static __device__ __forceinline__ float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
  }
  static __device__ __forceinline__ uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
  }
};

__device__ __forceinline__ uint32_t low_halves(uint32_t a, uint32_t b) { return (a & 0xffffu) | b << 16; }
__device__ __forceinline__ uint32_t high_halves(uint32_t a, uint32_t b) {
  return a >> 16 | (b & 0xffff0000u);
}

// --- formats ---

// GPTQ: a word holds consecutive inputs of an output.
template <int Bits>
struct Gptq {
  static constexpr int kBits = Bits, kColumns = 4;  // outputs that a lane has
  static constexpr int kFields = 32 / Bits;         // of a word
  static constexpr int kWordRows = kFields, kWordColumns = 1;
  static constexpr uint32_t kMask = Bits == 4 ? 15 : 255;

  static __device__ constexpr int field(int column) { return column; }  // see Awq

  // Weights of 8 inputs from `row` on, for a lane's outputs from `column` on.
  struct Octet {
    Vector<uint32_t, 4> words[8 / kFields];

    __device__ __forceinline__ void load(const QuantProductArgs& a, int64_t row, int64_t column) {
#pragma unroll
      for (int w = 0; w < 8 / kFields; ++w) {
        const int64_t at = row + w * kFields;
        words[w] = at < a.rows && column < a.columns
                       ? load_vector<uint32_t>(reinterpret_cast<const uint32_t*>(a.weight) +
                                               at / kFields * a.columns + column)
                       : Vector<uint32_t, 4>{};
      }
    }
    // Pair `i` of 4, of the inputs that order_pairs puts there.
    template <int Column>
    __device__ __forceinline__ uint32_t pair(int i) const {
      if constexpr (Bits == 4) {
        return words[0][Column] >> (4 * i) & 0x000f000fu;
      } else {
        return words[i / 2][Column] >> (8 * (i % 2)) & 0x00ff00ffu;
      }
    }
  };

  // 8 inputs of a token in their order, two a word, as pairs in the order of Octet's.
  static __device__ __forceinline__ void order_pairs(const uint32_t (&x)[4], uint32_t* pairs) {
    if constexpr (Bits == 4) {
      pairs[0] = low_halves(x[0], x[2]);
      pairs[1] = high_halves(x[0], x[2]);
      pairs[2] = low_halves(x[1], x[3]);
      pairs[3] = high_halves(x[1], x[3]);
    } else {
      pairs[0] = low_halves(x[0], x[1]);
      pairs[1] = high_halves(x[0], x[1]);
      pairs[2] = low_halves(x[2], x[3]);
      pairs[3] = high_halves(x[2], x[3]);
    }
  }

  // The fields of the zeros of a lane's outputs, and one of them.
  static __device__ __forceinline__ uint32_t zeros(const QuantProductArgs& a, int64_t group, int64_t column) {
    const auto word = uint32_t(a.zeros[group * (a.columns / kFields) + column / kFields]);
    return word >> (Bits * (column % kFields));
  }
  static __device__ __forceinline__ uint32_t zero(uint32_t fields, int column) {
    return fields >> (Bits * column) & kMask;
  }

  // One at a time, for what does not fit the rest.
  template <class Args>
  static __device__ __forceinline__ uint32_t weight_at(const Args& a, int64_t row, int64_t column) {
    return uint32_t(a.weight[row / kFields * a.columns + column]) >> (Bits * (row % kFields)) & kMask;
  }
  template <class Args>
  static __device__ __forceinline__ uint32_t zero_at(const Args& a, int64_t group, int64_t column) {
    if (a.zeros == nullptr) return 1u << (Bits - 1);
    return uint32_t(a.zeros[group * (a.columns / kFields) + column / kFields]) >>
               (Bits * (column % kFields)) &
           kMask;
  }
};

// AWQ: a word holds 8 outputs of an input, field i is output (0, 2, 4, 6, 1, 3, 5, 7)[i].
struct Awq {
  static constexpr int kBits = 4, kColumns = 8, kWordRows = 1, kWordColumns = 8;
  static constexpr uint32_t kMask = 15;

  // The field of an output. A lane's outputs are counted by fields everywhere but where they meet the rest.
  static __device__ constexpr int field(int column) { return column / 2 + column % 2 * 4; }

  struct Octet {
    uint32_t words[8];  // of an input each

    __device__ __forceinline__ void load(const QuantProductArgs& a, int64_t row, int64_t column) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        words[i] = row + i < a.rows && column < a.columns
                       ? uint32_t(a.weight[(row + i) * (a.columns / 8) + column / 8])
                       : 0;
      }
    }
    template <int Column>
    __device__ __forceinline__ uint32_t pair(int i) const {
      const uint32_t both =
          Column < 4 ? low_halves(words[i], words[i + 4]) : high_halves(words[i], words[i + 4]);
      return both >> (4 * (Column % 4)) & 0x000f000fu;
    }
  };

  static __device__ __forceinline__ void order_pairs(const uint32_t (&x)[4], uint32_t* pairs) {
    Gptq<4>::order_pairs(x, pairs);
  }
  static __device__ __forceinline__ uint32_t zeros(const QuantProductArgs& a, int64_t group, int64_t column) {
    return uint32_t(a.zeros[group * (a.columns / 8) + column / 8]);
  }
  static __device__ __forceinline__ uint32_t zero(uint32_t fields, int column) {
    return fields >> (4 * column) & 15;
  }

  template <class Args>
  static __device__ __forceinline__ uint32_t weight_at(const Args& a, int64_t row, int64_t column) {
    return uint32_t(a.weight[row * (a.columns / 8) + column / 8]) >> (4 * field(int(column % 8))) & 15;
  }
  template <class Args>
  static __device__ __forceinline__ uint32_t zero_at(const Args& a, int64_t group, int64_t column) {
    return uint32_t(a.zeros[group * (a.columns / 8) + column / 8]) >> (4 * field(int(column % 8))) & 15;
  }
};

// --- matrix instructions, seen alike ---

// A lane has kRows rows of A for each instruction, row `own` and after, and of a step of 32 inputs kInputs,
// from kInputs * slot on. Two instructions take a step. Of D it has kOutputs outputs, as rows of A and
// tokens; kOutRows of the rows are different ones.
#if defined(PELTON_CUDA) || defined(PELTON_EMULATION)
struct MmaRows {
  static constexpr bool kExists = true;
  static constexpr int kWave = 32, kGroups = 8, kRows = 2, kTokens = 8, kInputs = 8, kPairs = 2, kSums = 4;
  static constexpr int kOutputs = 2, kOutRows = 1;

  static __device__ __forceinline__ int own(int lane) { return lane / 4; }
  static __device__ __forceinline__ int slot(int lane) { return lane % 4; }
  static __device__ __forceinline__ int out_row(int lane, int) { return lane / 4; }
  static __device__ __forceinline__ int out_token(int lane, int o) { return 2 * (lane % 4) + o; }
  static __device__ constexpr int sum_tile(int column) { return column / 2; }
  static __device__ constexpr int sum_index(int column, int o) { return 2 * (column % 2) + o; }

  template <class T>
  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&w)[2][2],
                                                  const uint32_t (&x)[2]) {
    const uint32_t a[4] = {w[0][0], w[1][0], w[0][1], w[1][1]};
    mma_m16n8k16<T>(d, a, x);
  }
};
#endif
#if defined(__HIP_PLATFORM_AMD__) || defined(PELTON_EMULATION)
template <class Matrix>
struct AmdRows {
  static constexpr bool kExists = Matrix::kExists;
  static constexpr int kWave = Matrix::kWave, kGroups = 16, kRows = 1, kTokens = 16;
  static constexpr int kInputs = 32 / Matrix::kSlots, kPairs = Matrix::kPairs, kSums = Matrix::kSums;
  static constexpr int kOutputs = kSums, kOutRows = kSums;

  static __device__ __forceinline__ int own(int lane) { return lane % 16; }
  static __device__ __forceinline__ int slot(int lane) { return Matrix::slot(lane); }
  static __device__ __forceinline__ int out_row(int lane, int o) { return Matrix::row(lane, o); }
  static __device__ __forceinline__ int out_token(int lane, int) { return lane % 16; }
  static __device__ constexpr int sum_tile(int column) { return column; }
  static __device__ constexpr int sum_index(int, int o) { return o; }

  template <class T>
  static __device__ __forceinline__ void multiply(float (&d)[kSums], const uint32_t (&w)[1][kPairs],
                                                  const uint32_t (&x)[kPairs]) {
    Matrix::template multiply<T>(d, w[0], x);
  }
};
#endif

// Keeps clang for AMD from unpacking the weights of many instructions before the first of them.
__device__ __forceinline__ void keep_steps_apart() {
#if defined(__HIP_PLATFORM_AMD__) && !defined(PELTON_EMULATION)
  __builtin_amdgcn_sched_barrier(0);
#endif
}

// Calls f(integral constant 0) ... f(Count - 1).
template <int Count, class F>
__device__ __forceinline__ void unrolled(F&& f) {
  if constexpr (Count > 0) {
    unrolled<Count - 1>(f);
    f(std::integral_constant<int, Count - 1>{});
  }
}

// --- the kernel ---

constexpr int kStep = 32;  // inputs

__device__ __forceinline__ float scale_value(uint16_t bits, bool is_bf16) {
  return is_bf16 ? to_float(bf16{bits}) : to_float(f16{bits});
}

template <class Rows_, class Format_, class T_, int Tiles_, int Threads_, int Depth_>
struct ProductShape {
  using Rows = Rows_;
  using Format = Format_;
  using T = T_;
  static constexpr int kTiles = Tiles_;      // of tokens, that a block has
  static constexpr int kThreads = Threads_;  // of a block
  // Steps whose weights are on their way. WMMA's lanes have four times the inputs in registers.
  static constexpr int kDepth = Rows::kInputs > 8 ? 1 : Depth_;
  static constexpr int kWaves = kThreads / Rows::kWave;
  static constexpr int kBlockColumns = Rows::kGroups * Format::kColumns;
  static constexpr int kBlockTokens = Rows::kTokens * kTiles;
};

template <class S>
struct ProductStep {
  using R = typename S::Rows;
  static constexpr int kOctets = R::kInputs / 8;

  typename S::Format::Octet weights[kOctets];
  uint32_t x[S::kTiles][kOctets][4];  // in their order

  // What of step `step` is this lane's: outputs from `column` on, tokens from `token` on.
  __device__ __forceinline__ void load(const QuantProductArgs& a, int64_t step, int64_t column, int64_t token,
                                       bool vectors) {
    using T = typename S::T;
    const int lane = threadIdx.x % R::kWave;
    const int64_t row = step * kStep + R::slot(lane) * R::kInputs;
#pragma unroll
    for (int o = 0; o < kOctets; ++o) weights[o].load(a, row + 8 * o, column);
#pragma unroll
    for (int t = 0; t < S::kTiles; ++t) {
      const int64_t own = token + t * R::kTokens;
      const T* const from = static_cast<const T*>(a.x) + own * a.x_stride;
#pragma unroll
      for (int o = 0; o < kOctets; ++o) {
        const int64_t first = row + 8 * o;
        if (own >= a.tokens) {
          for (int i = 0; i < 4; ++i) x[t][o][i] = 0;
        } else if (vectors && first + 8 <= a.rows) {
          const auto v = load_vector<uint32_t>(reinterpret_cast<const uint32_t*>(from + first));
#pragma unroll
          for (int i = 0; i < 4; ++i) x[t][o][i] = v[i];
        } else {
          const auto element = [&](int64_t k) -> uint32_t {
            if (k >= a.rows) return 0;
            const int64_t input = a.order == nullptr ? k : a.order[k];
            return input >= 0 && input < a.inputs ? from[input].bits : 0u;
          };
          for (int i = 0; i < 4; ++i) x[t][o][i] = element(first + 2 * i) | element(first + 2 * i + 1) << 16;
        }
      }
    }
  }
};

// Scales and zeros of a group, as they are stored.
template <class S>
struct ProductGroup {
  using R = typename S::Rows;
  using F = typename S::Format;

  using Scales = Vector<uint16_t, F::kColumns>;
  // Scales that would take too many registers until the end of the group are read there.
  static constexpr bool kLateScales = R::kOutRows * F::kColumns > 16;
  static constexpr int kScales = kLateScales ? 1 : R::kOutRows;

  Scales scales[kScales];
  uint32_t zeros;

  static __device__ __forceinline__ Scales scales_of(const QuantProductArgs& a, int64_t group,
                                                     int64_t column) {
    group = group < a.groups ? group : a.groups - 1;
    return column < a.columns ? load_vector<uint16_t, F::kColumns>(static_cast<const uint16_t*>(a.scales) +
                                                                   group * a.columns + column)
                              : Scales{};
  }

  __device__ __forceinline__ void load(const QuantProductArgs& a, int64_t group, int64_t block_column) {
    const int lane = threadIdx.x % R::kWave;
    group = group < a.groups ? group : a.groups - 1;
    if constexpr (!kLateScales) {
#pragma unroll
      for (int o = 0; o < kScales; ++o) {
        scales[o] = scales_of(a, group, block_column + R::out_row(lane, o) * F::kColumns);
      }
    }
    const int64_t column = block_column + R::own(lane) * F::kColumns;
    zeros = a.zeros != nullptr && column < a.columns ? F::zeros(a, group, column) : 0;
  }
};

// Columns and groups in whole vectors: see product_fits.
template <class S>
__device__ __forceinline__ void product_block(const QuantProductArgs& a) {
  using R = typename S::Rows;
  using F = typename S::Format;
  using T = typename S::T;
  constexpr int kSumTiles = F::kColumns / R::kRows;
  const int lane = threadIdx.x % R::kWave, wave = threadIdx.x / R::kWave;
  const int64_t token_blocks = ceil_div<int64_t>(a.tokens, S::kBlockTokens);
  const int64_t block_column = int64_t(blockIdx.x) / token_blocks * S::kBlockColumns;
  const int64_t first_token = int64_t(blockIdx.x) % token_blocks * S::kBlockTokens;
  const int64_t column = block_column + R::own(lane) * F::kColumns, token = first_token + R::own(lane);
  const bool vectors =
      a.order == nullptr && a.x_stride % 8 == 0 && reinterpret_cast<uintptr_t>(a.x) % 16 == 0;

  const int64_t steps = ceil_div<int64_t>(a.rows, kStep), each = ceil_div<int64_t>(steps, S::kWaves);
  const int64_t begin = wave * each, end = begin + each < steps ? begin + each : steps;
  const int64_t group_steps = a.group_size / kStep;  // at least steps where there is one group

  float sums[S::kTiles][kSumTiles][R::kSums] = {}, part[S::kTiles][kSumTiles][R::kSums] = {};
  ProductStep<S> ring[S::kDepth];
#pragma unroll
  for (int d = 0; d < S::kDepth; ++d) {
    if (begin + d < end) ring[d].load(a, begin + d, column, token, vectors);
  }
  int64_t group = begin / group_steps, next_group_at = (group + 1) * group_steps;
  ProductGroup<S> current, next;
  Zero<T, F::kBits> zeros[F::kColumns];
  const auto begin_group = [&] {
    current = next;
#pragma unroll
    for (int c = 0; c < F::kColumns; ++c) {
      zeros[c].set(a.zeros == nullptr ? 1u << (F::kBits - 1) : F::zero(current.zeros, c));
    }
    next.load(a, group + 1, block_column);
  };
  const auto end_group = [&] {
#pragma unroll
    for (int o = 0; o < R::kOutputs; ++o) {
      typename ProductGroup<S>::Scales scales;
      if constexpr (ProductGroup<S>::kLateScales) {
        scales = ProductGroup<S>::scales_of(a, group, block_column + R::out_row(lane, o) * F::kColumns);
      } else {
        scales = current.scales[R::kOutRows == 1 ? 0 : o];
      }
      unrolled<F::kColumns>([&](auto c) {
        constexpr int kColumn = decltype(c)::value;
        // Scales stand in the order of outputs, sums in that of fields.
        const float scale = scale_value(scales[kColumn], a.bf16_scales);
        constexpr int kField = F::field(kColumn);
#pragma unroll
        for (int t = 0; t < S::kTiles; ++t) {
          float& p = part[t][R::sum_tile(kField)][R::sum_index(kField, o)];
          float& sum = sums[t][R::sum_tile(kField)][R::sum_index(kField, o)];
          sum = fmaf(p, scale, sum);
          p = 0;
        }
      });
    }
  };
  next.load(a, group, block_column);
  begin_group();

  for (int64_t first = begin; first < end; first += S::kDepth) {
#pragma unroll
    for (int d = 0; d < S::kDepth; ++d) {
      const int64_t step = first + d;
      if (step >= end) break;
      if (step == next_group_at) {
        end_group();
        ++group;
        next_group_at += group_steps;
        begin_group();
      }
      ProductStep<S>& own = ring[d];
      uint32_t x[S::kTiles][4 * ProductStep<S>::kOctets];
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t) {
#pragma unroll
        for (int o = 0; o < ProductStep<S>::kOctets; ++o) F::order_pairs(own.x[t][o], &x[t][4 * o]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unrolled<kSumTiles>([&](auto index) {
          constexpr int kTile = decltype(index)::value;
          uint32_t w[R::kRows][R::kPairs];
          unrolled<R::kRows>([&](auto r) {
            constexpr int kField = kTile * R::kRows + decltype(r)::value;
#pragma unroll
            for (int i = 0; i < R::kPairs; ++i) {
              const int pair = half * R::kPairs + i;
              w[decltype(r)::value][i] =
                  zeros[kField].pair_of(own.weights[pair / 4].template pair<kField>(pair % 4));
            }
          });
#pragma unroll
          for (int t = 0; t < S::kTiles; ++t) {
            uint32_t b[R::kPairs];
#pragma unroll
            for (int i = 0; i < R::kPairs; ++i) b[i] = x[t][half * R::kPairs + i];
            R::template multiply<T>(part[t][kTile], w, b);
          }
          keep_steps_apart();
        });
      }
      if (step + S::kDepth < end) own.load(a, step + S::kDepth, column, token, vectors);
    }
  }
  end_group();

  // The upper half of the waves hands its sums to the lower half, until one wave has all of them.
  constexpr int kValues = S::kTiles * kSumTiles * R::kSums;
  __shared__ float shared[ceil_div(S::kWaves, 2)][kValues][R::kWave];
  float* const values = &sums[0][0][0];
#pragma unroll
  for (int half = S::kWaves / 2; half > 0; half /= 2) {
    if (wave >= half && wave < 2 * half) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) shared[wave - half][i][lane] = values[i];
    }
    __syncthreads();
    if (wave < half) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) values[i] += shared[wave][i][lane];
    }
    __syncthreads();
  }
  if (wave != 0) return;
  const T* const bias = static_cast<const T*>(a.bias);
  const bool aligned =
      a.out_stride % F::kColumns == 0 && reinterpret_cast<uintptr_t>(a.out) % (2 * F::kColumns) == 0;
#pragma unroll
  for (int t = 0; t < S::kTiles; ++t) {
#pragma unroll
    for (int o = 0; o < R::kOutputs; ++o) {
      const int64_t row = first_token + t * R::kTokens + R::out_token(lane, o);
      const int64_t at = block_column + R::out_row(lane, o) * F::kColumns;
      if (row >= a.tokens || at >= a.columns) continue;
      Vector<T, F::kColumns> result;
      unrolled<F::kColumns>([&](auto c) {
        constexpr int kColumn = decltype(c)::value, kField = F::field(kColumn);
        const float sum = sums[t][R::sum_tile(kField)][R::sum_index(kField, o)];
        result[kColumn] = from_float<T>(bias == nullptr ? sum : sum + to_float(bias[at + kColumn]));
      });
      T* const out = static_cast<T*>(a.out) + row * a.out_stride + at;
      if (aligned) {
        store_vector(out, result);
      } else {
        for (int c = 0; c < F::kColumns; ++c) out[c] = result[c];
      }
    }
  }
}

// --- everything else ---

constexpr int kPlainColumns = 32, kPlainSlices = 8, kPlainTokens = 4;

template <class Args>
__device__ __forceinline__ int64_t group_at(const Args& a, int64_t row) {
  return a.g_idx == nullptr ? row / a.group_size : a.g_idx[row];
}

// (q - zero) * scale; zero for a row without a group.
template <class Format, class Args>
__device__ __forceinline__ float weight_value(const Args& a, int64_t row, int64_t column) {
  const int64_t group = group_at(a, row);
  if (group < 0 || group >= a.groups) return 0;
  const int q = int(Format::weight_at(a, row, column)) - int(Format::zero_at(a, group, column));
  return float(q) *
         scale_value(static_cast<const uint16_t*>(a.scales)[group * a.columns + column], a.bf16_scales);
}

// Any mapping of inputs to groups, any sizes: a thread has one output of four tokens, the warps split the
// inputs.
template <class Format, class T>
__device__ __forceinline__ void plain_block(const QuantProductArgs& a, int64_t block_column,
                                            int64_t first_token) {
  __shared__ float shared[kPlainSlices][kPlainTokens][kPlainColumns];
  const int within = threadIdx.x % kPlainColumns, slice = threadIdx.x / kPlainColumns;
  const int64_t column = block_column + within;
  float sums[kPlainTokens] = {};
  if (column < a.columns) {
    const int64_t each = ceil_div<int64_t>(a.rows, kPlainSlices);
    const int64_t end = (slice + 1) * each < a.rows ? (slice + 1) * each : a.rows;
    for (int64_t row = slice * each; row < end; ++row) {
      const int64_t input = a.order == nullptr ? row : a.order[row];
      if (input < 0 || input >= a.inputs) continue;
      const float w = weight_value<Format>(a, row, column);
#pragma unroll
      for (int t = 0; t < kPlainTokens; ++t) {
        if (first_token + t < a.tokens) {
          const T x = static_cast<const T*>(a.x)[(first_token + t) * a.x_stride + input];
          sums[t] = fmaf(to_float(x), w, sums[t]);
        }
      }
    }
  }
  __syncthreads();  // those of a block before may still be read
#pragma unroll
  for (int t = 0; t < kPlainTokens; ++t) shared[slice][t][within] = sums[t];
  __syncthreads();
  if (slice >= kPlainTokens || column >= a.columns || first_token + slice >= a.tokens) return;
  float sum = a.bias == nullptr ? 0 : to_float(static_cast<const T*>(a.bias)[column]);
  for (int s = 0; s < kPlainSlices; ++s) sum += shared[s][slice][within];
  static_cast<T*>(a.out)[(first_token + slice) * a.out_stride + column] = from_float<T>(sum);
}

template <class Format, class T>
__global__ void __launch_bounds__(kPlainColumns* kPlainSlices)
    plain_product_kernel(const QuantProductArgs a) {
  const int64_t token_blocks = ceil_div<int64_t>(a.tokens, kPlainTokens);
  plain_block<Format, T>(a, int64_t(blockIdx.x) / token_blocks * kPlainColumns,
                         int64_t(blockIdx.x) % token_blocks * kPlainTokens);
}

// A thread has a word: consecutive inputs of an output in GPTQ's layout, consecutive outputs of an input in
// AWQ's.
template <class Format, class T>
__global__ void __launch_bounds__(256) dequantize_kernel(const DequantizeArgs a) {
  constexpr int kRows = Format::kWordRows, kColumns = Format::kWordColumns;
  const int64_t column = (int64_t(blockIdx.x) * 256 + threadIdx.x) * kColumns;
  if (column >= a.columns) return;
  const bool one_group = a.g_idx == nullptr && (a.group_size % kRows == 0 || a.group_size >= a.rows);
  const bool vectors = reinterpret_cast<uintptr_t>(a.out) % (sizeof(T) * kColumns) == 0;
  for (int64_t first = int64_t(blockIdx.y) * kRows; first < a.rows; first += int64_t(gridDim.y) * kRows) {
    uint32_t word = uint32_t(a.weight[first / kRows * (a.columns / kColumns) + column / kColumns]);
    int64_t group = group_at(a, first);
    bool known = group >= 0 && group < a.groups;
    float zeros[kColumns], scales[kColumns];
    const auto begin_group = [&] {
      known = group >= 0 && group < a.groups;
      const int64_t from = known ? group : 0;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        zeros[c] = float(Format::zero_at(a, from, column + c));
        scales[c] =
            scale_value(static_cast<const uint16_t*>(a.scales)[from * a.columns + column + c], a.bf16_scales);
      }
    };
    begin_group();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = first + r;
      if (!one_group && r > 0) {
        group = group_at(a, row);
        begin_group();
      }
      Vector<T, kColumns> values;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const uint32_t q = word >> (Format::kBits * (kRows > 1 ? r : Format::field(c))) & Format::kMask;
        values[c] = from_float<T>(known ? (float(q) - zeros[c]) * scales[c] : 0.0f);
      }
      const int64_t input = a.order == nullptr ? row : a.order[row];
      if (input < 0 || input >= a.inputs) continue;
      T* const out = static_cast<T*>(a.out) + input * a.columns + column;
      if (vectors) {
        store_vector(out, values);
      } else {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) out[c] = values[c];
      }
    }
  }
}

template <class S>
__global__ void __launch_bounds__(S::kThreads) product_kernel(const QuantProductArgs a) {
  if constexpr (S::Rows::kExists) {
    product_block<S>(a);
  } else {  // an arch without matrix instructions, in a library for several
    static_assert(S::kThreads == kPlainColumns * kPlainSlices);
    const int64_t token_blocks = ceil_div<int64_t>(a.tokens, S::kBlockTokens);
    const int64_t first_column = int64_t(blockIdx.x) / token_blocks * S::kBlockColumns;
    const int64_t first_token = int64_t(blockIdx.x) % token_blocks * S::kBlockTokens;
    for (int c = 0; c < S::kBlockColumns; c += kPlainColumns) {
      for (int t = 0; t < S::kBlockTokens; t += kPlainTokens) {
        plain_block<typename S::Format, typename S::T>(a, first_column + c, first_token + t);
      }
    }
  }
}

// --- launchers ---

// Whether matrix instructions can do it: whole vectors of outputs, groups of whole steps, one after another.
template <class Format>
bool product_fits(const QuantProductArgs& a) {
  return a.g_idx == nullptr && a.rows > 0 && a.columns % Format::kColumns == 0 &&
         (a.group_size % kStep == 0 || a.group_size >= a.rows) && is_aligned16(a.weight) &&
         access_bytes({address(a.scales), a.columns * 2}) >= 2 * Format::kColumns;
}

template <class Format, class T>
int start_plain_product(const QuantProductArgs& a, cudaStream_t stream) {
  const int64_t blocks =
      ceil_div<int64_t>(a.columns, kPlainColumns) * ceil_div<int64_t>(a.tokens, kPlainTokens);
  plain_product_kernel<Format, T><<<grid_size(blocks), kPlainColumns * kPlainSlices, 0, stream>>>(a);
  return launch_result();
}

template <class S>
int start_product(QuantProductArgs a, cudaStream_t stream) {
  if (a.group_size >= a.rows) a.group_size = ceil_div<int64_t>(a.rows, kStep) * kStep;
  const int64_t blocks =
      ceil_div<int64_t>(a.columns, S::kBlockColumns) * ceil_div<int64_t>(a.tokens, S::kBlockTokens);
  product_kernel<S><<<grid_size(blocks), S::kThreads, 0, stream>>>(a);
  return launch_result();
}

template <class Format, class T>
int choose_product(const QuantProductArgs& a, cudaStream_t stream) {
  if (!product_fits<Format>(a)) return start_plain_product<Format, T>(a, stream);
#if defined(__HIP_PLATFORM_AMD__) || defined(PELTON_EMULATION)
  int error = 0;
  const auto on_amd = [&](auto matrix) {
    error = start_product<ProductShape<AmdRows<decltype(matrix)>, Format, T, 1, 256, 2>>(a, stream);
  };
  if (with_amd_matrix(on_amd)) return error;
#endif
#if defined(PELTON_CUDA) || defined(PELTON_EMULATION)
  // More tokens a block are fewer weights to unpack, and registers of more sums; a lane has twice the outputs
  // of AWQ.
  constexpr bool kNarrow = Format::kColumns == 4;
  if (a.tokens <= 8)
    return start_product<ProductShape<MmaRows, Format, T, 1, 512, kNarrow ? 4 : 2>>(a, stream);
  if constexpr (kNarrow) {
    if (a.tokens > 16) return start_product<ProductShape<MmaRows, Format, T, 4, 256, 2>>(a, stream);
  }
  return start_product<ProductShape<MmaRows, Format, T, 2, 256, kNarrow ? 4 : 2>>(a, stream);
#else
  return error;
#endif
}

template <class Format>
int run_product(const QuantProductArgs& a, void* stream) {
  if (a.tokens == 0 || a.columns == 0) return 0;
  return a.dtype == DType::f16 ? choose_product<Format, f16>(a, cudaStream_t(stream))
                               : choose_product<Format, bf16>(a, cudaStream_t(stream));
}

template <class Format>
int run_dequantize(const DequantizeArgs& a, void* stream) {
  if (a.rows == 0 || a.columns == 0) return 0;
  const int64_t words = ceil_div<int64_t>(a.columns / Format::kWordColumns, 256);
  const int64_t rows = a.rows / Format::kWordRows;
  const dim3 grid(grid_size(words), unsigned(rows < 65535 ? rows : 65535));
  if (a.dtype == DType::f16) {
    dequantize_kernel<Format, f16><<<grid, 256, 0, cudaStream_t(stream)>>>(a);
  } else {
    dequantize_kernel<Format, bf16><<<grid, 256, 0, cudaStream_t(stream)>>>(a);
  }
  return launch_result();
}

}  // namespace pelton::gpu
