// Attention of a tile of rows (queries x heads of a group) of one kv head with AMD's matrix instructions, for
// the kernels of gpu_prefill_amd.cu and gpu_decode_amd.cu. A block goes over the positions tile by tile: keys
// and then values come through registers into the one tile of shared memory, each on its way while the other
// is used. Scores are K Q^T and outputs V^T P^T, so that a lane has the scores of a single row, as many of
// them as the next product wants of it, and scales its sums by numbers of its own. Method: Dao,
// "FlashAttention-2", 2023.
#pragma once
#include "../common/amd_mma.cuh"
#include "portable.cuh"
#include "scores.cuh"

#if defined(__HIP_PLATFORM_AMD__) || defined(PELTON_EMULATION)
namespace pelton::gpu::amd {

constexpr int kAtOnce = 16;  // rows, positions, or elements of the head of one matrix

// M: the instructions. RowTiles: of 16 rows, a block. Waves beyond that number share rows and take parts of
// each tile of positions.
template <class M_, class T_, int D_, int RowTiles, int Positions, int Threads>
struct TileShape {
  using M = M_;
  using T = T_;
  static constexpr int D = D_, kPositions = Positions, kThreads = Threads, kRows = kAtOnce * RowTiles;
  static constexpr int kWaves = Threads / M::kWave, kRowWaves = kWaves < RowTiles ? kWaves : RowTiles;
  static constexpr int kRowBlocks = RowTiles / kRowWaves, kWaveRows = kAtOnce * kRowBlocks;
  static constexpr int kSplits = kWaves / kRowWaves, kBlocks = kPositions / kSplits / kAtOnce;
  static constexpr int kSums = M::kSums, kSteps = D / kAtOnce;

  // Of the head a lane reads 16 bytes of queries and keys at once at least: registers, and such units a row.
  static constexpr int kUnit = M::kPairs < 4 ? 4 : M::kPairs, kUnits = D / (2 * kUnit * M::kSlots);
  // Of values a lane reads this many elements of the head. Element Width r + j belongs to row r of operand j.
  static constexpr int kWidth = D % 64 != 0 || (M::kPairs == 8 && D > 128) ? 2
                                : D % 128 == 0 && M::kSlots > 1            ? 8
                                                                           : 4;
  static constexpr int kSections = D / (kAtOnce * kWidth);

  // Where a lane's queries would take too many registers, or all waves have the same, they stay in shared
  // memory.
  static constexpr bool kQueriesShared = M::kPairs == 8 && (D > 128 || RowTiles == 1);
  static constexpr int kStride = D + 8;  // elements: rows begin in different banks
  // A tile is brought in pieces of 16 bytes: of a row at once by as many threads as a power of two, several
  // times where there are three times as many.
  static constexpr int kPieces = D / 8, kTimes = kPieces % 3 == 0 ? 3 : 1, kAcross = kPieces / kTimes;
  static constexpr int kDown = kThreads / kAcross, kFetchRows = kPositions / kDown;
  // What is on its way while a tile is used takes registers: of those there are too few for some.
  static constexpr bool kKeysAhead = kFetchRows * kTimes <= 8;
  static constexpr bool kValuesAhead = kKeysAhead || M::kPairs < 8;

  static_assert(kRowWaves * kRowBlocks == RowTiles && kRowWaves * kSplits == kWaves);
  static_assert(kBlocks * kSplits * kAtOnce == kPositions && kPositions <= kThreads);
  static_assert(kFetchRows * kDown == kPositions && kAcross * kDown == kThreads &&
                kSections * kAtOnce * kWidth == D);
};

template <class S>
struct TileShared {
  // What waves with parts of the same rows hand on: as many steps of their sums at a time as have room.
  static constexpr int kStepFloats = S::kWaves * S::kRowBlocks * S::kSums * S::M::kWave;
  static constexpr int kStepsAtOnce = [] {
    const int room = S::kPositions * S::kStride / 2 / kStepFloats;
    return room < 1 ? 1 : room < S::kSteps ? room : S::kSteps;
  }();
  union {
    alignas(16) typename S::T tile[S::kPositions * S::kStride];
    float exchange[S::kSplits > 1 ? kStepsAtOnce * kStepFloats : 1];
    PortableShared<S::kThreads / kWarp> portable;  // where there are no such instructions
  };
  alignas(16) typename S::T queries[S::kQueriesShared ? S::kRows * S::kStride : 8];
  int64_t offsets[2][S::kPositions];
  float maximum[S::kWaves][S::kWaveRows], weight[S::kWaves][S::kWaveRows];
  int not_finite[S::kWaves];
};

template <class M, class V>
__device__ __forceinline__ V wave_shuffle(V v, int lane) {
  return __shfl(v, lane, M::kWave);
}
template <class M, class V>
__device__ __forceinline__ V wave_xor(V v, int mask) {
  return __shfl_xor(v, mask, M::kWave);
}

// Rows of D = M(...) that lanes of one column have: row r is sum sum_of(r) of the lane 16 group_of(r) +
// column.
template <class M>
__device__ __forceinline__ int sum_of(int row) {
  return M::kSlots > 1 ? row % 4 : row / 2;
}
template <class M>
__device__ __forceinline__ int group_of(int row) {
  return M::kSlots > 1 ? row / 4 : row % 2;
}

// What a lane has of D, rounded, as the B operand whose rows are D's.
template <class M, class T>
__device__ __forceinline__ void to_operand(const float (&d)[M::kSums], uint32_t (&b)[M::kPairs], int lane) {
  if constexpr (M::kPairs == M::kSums / 2) {
#pragma unroll
    for (int i = 0; i < M::kPairs; ++i) b[i] = pack2<T>(d[2 * i], d[2 * i + 1]);
  } else {  // of the rows in turn one is here and one in the other half of the wave
    const bool high_half = lane >= kAtOnce;
#pragma unroll
    for (int i = 0; i < M::kPairs / 2; ++i) {
      const uint32_t own = pack2<T>(d[2 * i], d[2 * i + 1]), other = wave_xor<M>(own, kAtOnce);
      const uint32_t even = high_half ? other : own, odd = high_half ? own : other;
      b[2 * i] = (even & 0xffffu) | odd << 16;
      b[2 * i + 1] = even >> 16 | (odd & 0xffff0000u);
    }
  }
}

// Ends what the compiler may mix: it would bring all of a tile's operands before the first product, and
// spill.
__device__ __forceinline__ void end_of_step() {
#ifndef PELTON_EMULATION
  __builtin_amdgcn_sched_barrier(0);
#endif
}

// The products are computed here and not where they are first used, with all their operands waiting until
// then.
template <int Count>
__device__ __forceinline__ void compute_here(float (&d)[Count]) {
#ifndef PELTON_EMULATION
  using Values = float __attribute__((ext_vector_type(Count)));
  Values values;
  __builtin_memcpy(&values, d, sizeof values);
  asm volatile("" : "+v"(values));
  __builtin_memcpy(d, &values, sizeof values);
#endif
}

// Registers of 8 elements from shared memory.
template <int Count>
__device__ __forceinline__ void load_unit(uint32_t (&to)[Count], const void* from) {
#pragma unroll
  for (int i = 0; i < Count; i += 4) {
    const auto part = load_vector<uint32_t, 4>(static_cast<const uint32_t*>(from) + i);
#pragma unroll
    for (int j = 0; j < 4; ++j) to[i + j] = part[j];
  }
}

// A operands of V^T: `from` is this lane's first position, of which it takes S::kWidth elements.
template <class S>
__device__ __forceinline__ void load_columns(uint32_t (&a)[S::kWidth][S::M::kPairs], const void* from) {
  constexpr int kWords = S::kWidth / 2;
#pragma unroll
  for (int i = 0; i < S::M::kPairs; ++i) {
    const uint32_t* const row = static_cast<const uint32_t*>(from) + i * S::kStride;  // two positions on
    const auto first = load_vector<uint32_t, kWords>(row);
    const auto second = load_vector<uint32_t, kWords>(row + S::kStride / 2);
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      a[2 * j][i] = (first[j] & 0xffffu) | second[j] << 16;
      a[2 * j + 1][i] = first[j] >> 16 | (second[j] & 0xffff0000u);
    }
  }
}

// A row's 8 elements of the head from `d` on, zeros behind its end. A row behind the last one is as a row
// before it, and nobody looks at it.
template <class T>
__device__ __forceinline__ Vector<uint32_t, 4> load_query(const AttentionArgs& a, const RowTile& rows,
                                                          int row, int d) {
  const bool inside = d < int(a.head_size);
  const T* const from = static_cast<const T*>(a.query) +
                        (rows.sequence.first_row + rows.query(row)) * a.query_token_stride +
                        rows.head(row) * a.query_head_stride + (inside ? d : 0);
  Vector<uint32_t, 4> v;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t word = reinterpret_cast<const uint32_t*>(from)[i];
    v[i] = inside ? word : 0;
  }
  return v;
}

// A wave's rows: a lane has row lane % 16 of each block of 16, and of its sums the elements of the head that
// element() gives.
template <class S>
struct TileRows {
  using M = typename S::M;
  using T = typename S::T;
  // Weights of fp16 are kept at this power of two: CDNA 2 takes what is below 2^-14 for zero.
  static constexpr float kScale = T::is_bf16 ? 0 : 14;

  int lane, row_wave, split;
  uint32_t q[S::kQueriesShared ? 1 : S::kRowBlocks][S::kQueriesShared ? 1 : S::kUnits][S::kUnit];
  float sums[S::kRowBlocks][S::kSteps][S::kSums], maximum[S::kRowBlocks], weight[S::kRowBlocks];
  int first[S::kRowBlocks], last[S::kRowBlocks];  // position that a row sees

  __device__ __forceinline__ int row_of(int m) const {
    return row_wave * S::kWaveRows + m * kAtOnce + lane % kAtOnce;
  }
  // Of the sums of step e = section kWidth + j; the elements of j = 0 to kWidth - 1 follow each other.
  __device__ __forceinline__ int element(int section, int i) const {
    return (section * kAtOnce + M::row(lane, i)) * S::kWidth;
  }

  // Begins with a tile of rows.
  __device__ void open(const AttentionArgs& a, const RowTile& rows, TileShared<S>& shared) {
    lane = threadIdx.x % M::kWave;
    const int wave = wave_shuffle<M>(int(threadIdx.x / M::kWave), 0);  // the same in all lanes
    row_wave = wave / S::kSplits;
    split = wave % S::kSplits;
#pragma unroll
    for (int m = 0; m < S::kRowBlocks; ++m) {
      maximum[m] = -INFINITY;
      weight[m] = 0;
      last[m] = rows.position(row_of(m));
      first[m] = first_visible(a, last[m]);
#pragma unroll
      for (int e = 0; e < S::kSteps; ++e) {
#pragma unroll
        for (int i = 0; i < S::kSums; ++i) sums[m][e][i] = 0;
      }
      if constexpr (!S::kQueriesShared) {
#pragma unroll
        for (int u = 0; u < S::kUnits; ++u) {
#pragma unroll
          for (int i = 0; i < S::kUnit; i += 4) {
            const int d = (u * M::kSlots + M::slot(lane)) * 2 * S::kUnit + 2 * i;
            const auto part = load_query<T>(a, rows, row_of(m), d);
#pragma unroll
            for (int j = 0; j < 4; ++j) q[m][u][i + j] = part[j];
          }
        }
      }
    }
    if constexpr (S::kQueriesShared) {
      for (int i = threadIdx.x; i < S::kRows * S::kPieces; i += S::kThreads) {
        const int row = i / S::kPieces, d = i % S::kPieces * 8;
        store_vector(reinterpret_cast<uint32_t*>(shared.queries + row * S::kStride + d),
                     load_query<T>(a, rows, row, d));
      }
    }
  }

  // Products of queries and the keys in the tile: of positions first_of_wave() + 16 b + M::row(lane, i).
  using Products = float[S::kRowBlocks][S::kBlocks][S::kSums];
  __device__ __forceinline__ int first_of_wave() const { return split * S::kBlocks * kAtOnce; }
  __device__ __forceinline__ void multiply_keys(Products& s, const TileShared<S>& shared) const {
    const int offset = M::slot(lane) * 2 * S::kUnit;
    const T* const keys = shared.tile + (first_of_wave() + lane % kAtOnce) * S::kStride + offset;
#pragma unroll
    for (int u = 0; u < S::kUnits; ++u) {
      const int at = u * M::kSlots * 2 * S::kUnit;
      uint32_t own[S::kRowBlocks][S::kUnit];
#pragma unroll
      for (int m = 0; m < S::kRowBlocks; ++m) {
        if constexpr (S::kQueriesShared) {
          load_unit(own[m], shared.queries + row_of(m) * S::kStride + offset + at);
        } else {
#pragma unroll
          for (int i = 0; i < S::kUnit; ++i) own[m][i] = q[m][u][i];
        }
      }
#pragma unroll
      for (int b = 0; b < S::kBlocks; ++b) {
        uint32_t k[S::kUnit];
        load_unit(k, keys + b * kAtOnce * S::kStride + at);
#pragma unroll
        for (int m = 0; m < S::kRowBlocks; ++m) {
#pragma unroll
          for (int part = 0; part < S::kUnit; part += M::kPairs) {
            uint32_t left[M::kPairs], right[M::kPairs];
#pragma unroll
            for (int i = 0; i < M::kPairs; ++i) {
              left[i] = k[part + i];
              right[i] = own[m][part + i];
            }
            M::template multiply<T>(s[m][b], left, right);
          }
        }
      }
      end_of_step();
    }
#pragma unroll
    for (int m = 0; m < S::kRowBlocks; ++m) {
#pragma unroll
      for (int b = 0; b < S::kBlocks; ++b) compute_here(s[m][b]);
    }
  }

  // Products become weights.
  __device__ __forceinline__ void weigh(Products& s, const Scores& score, int base, bool edge) {
#pragma unroll
    for (int m = 0; m < S::kRowBlocks; ++m) {
      if (!score.direct) {
#pragma unroll
        for (int b = 0; b < S::kBlocks; ++b) {
#pragma unroll
          for (int i = 0; i < S::kSums; ++i) s[m][b][i] = score(s[m][b][i]);
        }
      }
      if (edge) {
#pragma unroll
        for (int b = 0; b < S::kBlocks; ++b) {
#pragma unroll
          for (int i = 0; i < S::kSums; ++i) {
            const int position = base + first_of_wave() + b * kAtOnce + M::row(lane, i);
            if (position < first[m] || position > last[m]) s[m][b][i] = -INFINITY;
          }
        }
      }
      float highest = maximum[m];
#pragma unroll
      for (int b = 0; b < S::kBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < S::kSums; ++i) highest = fmaxf(highest, s[m][b][i]);
      }
#pragma unroll
      for (int mask = kAtOnce; mask < M::kWave; mask *= 2)
        highest = fmaxf(highest, wave_xor<M>(highest, mask));
      const float origin = highest == -INFINITY ? 0 : highest;
      const float keep = exp2_fast((maximum[m] - origin) * score.unit);
      maximum[m] = highest;
      float sum = 0;
#pragma unroll
      for (int b = 0; b < S::kBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < S::kSums; ++i) {
          s[m][b][i] = exp2_fast((s[m][b][i] - origin) * score.unit + kScale);
          sum += s[m][b][i];
        }
      }
      weight[m] = weight[m] * keep + sum;
#pragma unroll
      for (int e = 0; e < S::kSteps; ++e) {
#pragma unroll
        for (int i = 0; i < S::kSums; ++i) sums[m][e][i] *= keep;
      }
    }
  }

  // Sums of weights times the values in the tile.
  __device__ __forceinline__ void multiply_values(const Products& s, const TileShared<S>& shared) {
    const int first_position = first_of_wave() + M::slot(lane) * 2 * M::kPairs;
    const T* const values = shared.tile + first_position * S::kStride + lane % kAtOnce * S::kWidth;
#pragma unroll
    for (int b = 0; b < S::kBlocks; ++b) {
      uint32_t p[S::kRowBlocks][M::kPairs];
#pragma unroll
      for (int m = 0; m < S::kRowBlocks; ++m) to_operand<M, T>(s[m][b], p[m], lane);
#pragma unroll
      for (int section = 0; section < S::kSections; ++section) {
        uint32_t v[S::kWidth][M::kPairs];
        load_columns<S>(v, values + b * kAtOnce * S::kStride + section * kAtOnce * S::kWidth);
#pragma unroll
        for (int j = 0; j < S::kWidth; ++j) {
#pragma unroll
          for (int m = 0; m < S::kRowBlocks; ++m) {
            M::template multiply<T>(sums[m][section * S::kWidth + j], v[j], p[m]);
          }
        }
        end_of_step();
      }
    }
  }

  // The same without matrices, for values that are not finite and that some of the rows do not see: zero
  // times them would reach all rows.
  __device__ void add_visible_values(const Products& s, const TileShared<S>& shared, int base) {
#pragma unroll 1
    for (int at = 0; at < S::kBlocks * kAtOnce; ++at) {
      const int in_tile = first_of_wave() + at, position = base + in_tile;
      const T* const values = shared.tile + in_tile * S::kStride;
      const int b_at = at / kAtOnce, i_at = sum_of<M>(at % kAtOnce);
#pragma unroll
      for (int m = 0; m < S::kRowBlocks; ++m) {
        float p = 0;
#pragma unroll
        for (int b = 0; b < S::kBlocks; ++b) {
#pragma unroll
          for (int i = 0; i < S::kSums; ++i) {
            if (b == b_at && i == i_at) p = s[m][b][i];
          }
        }
        p = wave_shuffle<M>(p, group_of<M>(at % kAtOnce) * kAtOnce + lane % kAtOnce);
        if (position < first[m] || position > last[m]) continue;
#pragma unroll
        for (int e = 0; e < S::kSteps; ++e) {
#pragma unroll
          for (int i = 0; i < S::kSums; ++i) {
            sums[m][e][i] += p * to_float(values[element(e / S::kWidth, i) + e % S::kWidth]);
          }
          end_of_step();
        }
      }
    }
  }

  // Puts together what waves with the same rows have; those with split 0 have the result, with maxima for
  // weights exp2(maximum). All threads of the block together.
  __device__ void put_together(const Scores& score, TileShared<S>& shared) {
    const int wave = row_wave * S::kSplits + split;
#pragma unroll
    for (int m = 0; m < S::kRowBlocks; ++m) {
      maximum[m] *= score.unit;
#pragma unroll
      for (int mask = kAtOnce; mask < M::kWave; mask *= 2) weight[m] += wave_xor<M>(weight[m], mask);
    }
    if constexpr (S::kSplits > 1) {
#pragma unroll
      for (int m = 0; m < S::kRowBlocks; ++m) {
        if (lane < kAtOnce) {
          shared.maximum[wave][m * kAtOnce + lane] = maximum[m];
          shared.weight[wave][m * kAtOnce + lane] = weight[m];
        }
      }
      __syncthreads();  // and the tile has been used
#pragma unroll
      for (int m = 0; m < S::kRowBlocks; ++m) {
        const int row = m * kAtOnce + lane % kAtOnce, first_wave = row_wave * S::kSplits;
        float highest = -INFINITY;
        for (int w = 0; w < S::kSplits; ++w) highest = fmaxf(highest, shared.maximum[first_wave + w][row]);
        const float origin = highest == -INFINITY ? 0 : highest;
        weight[m] = 0;
        for (int w = 0; w < S::kSplits; ++w) {
          weight[m] +=
              shared.weight[first_wave + w][row] * exp2_fast(shared.maximum[first_wave + w][row] - origin);
        }
        const float factor = exp2_fast(maximum[m] - origin);
        maximum[m] = highest;
#pragma unroll
        for (int e = 0; e < S::kSteps; ++e) {
#pragma unroll
          for (int i = 0; i < S::kSums; ++i) sums[m][e][i] *= factor;
        }
      }
      constexpr int kSteps = TileShared<S>::kStepsAtOnce;
      const auto slot = [&](int w, int e, int m, int i) -> float& {
        return shared.exchange[(((w * kSteps + e) * S::kRowBlocks + m) * S::kSums + i) * M::kWave + lane];
      };
#pragma unroll
      for (int e0 = 0; e0 < S::kSteps; e0 += kSteps) {
        if (e0 > 0) __syncthreads();
        const auto each = [&](const auto& f) {
#pragma unroll
          for (int e = 0; e < kSteps && e0 + e < S::kSteps; ++e) {
#pragma unroll
            for (int m = 0; m < S::kRowBlocks; ++m) {
#pragma unroll
              for (int i = 0; i < S::kSums; ++i) f(e, m, i, sums[m][e0 + e][i]);
            }
          }
        };
        if (split > 0) each([&](int e, int m, int i, float& sum) { slot(wave, e, m, i) = sum; });
        __syncthreads();
        if (split == 0) {
#pragma unroll
          for (int w = 1; w < S::kSplits; ++w) {
            each([&](int e, int m, int i, float& sum) { sum += slot(wave + w, e, m, i); });
          }
        }
      }
    }
  }
};

// The part of a tile that a thread brings from the cache.
template <class S>
struct Staged {
  Vector<uint32_t, 4> pieces[S::kFetchRows][S::kTimes];
  unsigned valid;  // a bit for each; the others are zero

  static __device__ __forceinline__ int row_of(int r) { return threadIdx.x / S::kAcross + r * S::kDown; }
  static __device__ __forceinline__ int element_of(int k) {
    return (threadIdx.x % S::kAcross + k * S::kAcross) * 8;
  }

  // Begins to bring them from where the positions lie in the cache. Without branches: of what is nowhere,
  // something else is read.
  __device__ __forceinline__ void fetch(const void* cache, const int64_t* offsets, int head_size) {
    valid = 0;
#pragma unroll
    for (int r = 0; r < S::kFetchRows; ++r) {
      const int64_t offset = offsets[row_of(r)];
      const auto* const row = static_cast<const typename S::T*>(cache) + (offset >= 0 ? offset : 0);
#pragma unroll
      for (int k = 0; k < S::kTimes; ++k) {
        const int d = element_of(k);
        pieces[r][k] =
            load_vector<uint32_t, 4>(reinterpret_cast<const uint32_t*>(row + (d < head_size ? d : 0)));
        valid |= offset >= 0 && d < head_size ? 1u << (r * S::kTimes + k) : 0;
      }
      if (r % 4 == 3) end_of_step();
    }
  }
  __device__ __forceinline__ void store(TileShared<S>& shared) {
#pragma unroll
    for (int r = 0; r < S::kFetchRows; ++r) {
#pragma unroll
      for (int k = 0; k < S::kTimes; ++k) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          pieces[r][k][w] = valid >> (r * S::kTimes + k) & 1 ? pieces[r][k][w] : 0;
        }
        typename S::T* const to = shared.tile + row_of(r) * S::kStride + element_of(k);
        store_vector(reinterpret_cast<uint32_t*>(to), pieces[r][k]);
      }
    }
  }
  // After store().
  __device__ __forceinline__ bool finite() const {
    bool all = true;
#pragma unroll
    for (int r = 0; r < S::kFetchRows; ++r) {
#pragma unroll
      for (int k = 0; k < S::kTimes; ++k) {
#pragma unroll
        for (int w = 0; w < 4; ++w) all &= !any_not_finite<typename S::T>(pieces[r][k][w]);
      }
    }
    return all;
  }
};

// Attention of the rows over the tiles of positions that begin at `base` (a multiple of S::kPositions) up to
// `end`. All threads of the block together; afterwards the waves of split 0 have the results.
template <class S>
__device__ void attend(const AttentionArgs& a, const RowTile& rows, int base, int end, const Scores& score,
                       TileRows<S>& own, TileShared<S>& shared) {
  using M = typename S::M;
  const int head_size = int(a.head_size), block_size = int(a.block_size);
  const int32_t* const table = a.block_tables + rows.index * a.block_table_stride;
  const int first_position = first_visible(a, rows.position(0)),
            last_position = rows.position(rows.num_rows - 1);
  const int whole_first = first_visible(a, last_position), whole_last = rows.position(0);

  // Of the position `of_tile` + thread, in the caches; negative: nowhere.
  const auto block_at = [&](int of_tile) {
    const int position = of_tile + int(threadIdx.x);
    const bool visible =
        int(threadIdx.x) < S::kPositions && position >= first_position && position <= last_position;
    return visible ? table[position / block_size] : -1;
  };
  const auto store_offset = [&](int of_tile, int block, int64_t* to) {
    if (int(threadIdx.x) < S::kPositions) {
      const int within = (of_tile + int(threadIdx.x)) % block_size;
      to[threadIdx.x] =
          uint32_t(block) < uint64_t(a.num_blocks)
              ? ((int64_t(block) * a.num_kv_heads + rows.kv_head) * block_size + within) * head_size
              : -1;
    }
  };

  __syncthreads();  // what was in shared memory has been used
  store_offset(base, block_at(base), shared.offsets[0]);
  own.open(a, rows, shared);
  __syncthreads();
  Staged<S> staged;
  if constexpr (S::kKeysAhead) staged.fetch(a.key_cache, shared.offsets[0], head_size);
#pragma unroll 1
  for (int turn = 0; base < end; base += S::kPositions, turn ^= 1) {
    if constexpr (!S::kKeysAhead) staged.fetch(a.key_cache, shared.offsets[turn], head_size);
    __syncthreads();  // the values before these keys have been used
    staged.store(shared);
    if constexpr (S::kValuesAhead) staged.fetch(a.value_cache, shared.offsets[turn], head_size);
    const int next_block = block_at(base + S::kPositions);
    __syncthreads();  // the keys are there
    typename TileRows<S>::Products s = {};
    own.multiply_keys(s, shared);
    store_offset(base + S::kPositions, next_block, shared.offsets[turn ^ 1]);
    if constexpr (!S::kValuesAhead) staged.fetch(a.value_cache, shared.offsets[turn], head_size);
    __syncthreads();  // the keys have been used
    staged.store(shared);
    const bool edge = base < whole_first || base + S::kPositions - 1 > whole_last;
    bool finite = true;
    if (edge) {
      finite = staged.finite();
      for (int mask = M::kWave / 2; mask > 0; mask /= 2)
        finite = (wave_xor<M>(int(finite), mask) != 0) && finite;
      if (own.lane == 0) shared.not_finite[threadIdx.x / M::kWave] = !finite;
    }
    if constexpr (S::kKeysAhead) {
      if (base + S::kPositions < end) staged.fetch(a.key_cache, shared.offsets[turn ^ 1], head_size);
    }
    own.weigh(s, score, base, edge);
    __syncthreads();  // the values are there
    if (edge) {
      for (int w = 0; w < S::kWaves; ++w) finite = finite && shared.not_finite[w] == 0;
    }
    if (finite) {
      own.multiply_values(s, shared);
    } else {
      own.add_visible_values(s, shared, base);
    }
  }
  own.put_together(score, shared);
}

// A row's elements `d` and after, as many as Width, of those inside of the head; half precision.
template <class T, int Width>
__device__ __forceinline__ void write_row(T* out, const float (&values)[Width], bool aligned) {
  Vector<uint32_t, Width / 2> packed;
#pragma unroll
  for (int i = 0; i < Width / 2; ++i) packed[i] = pack2<T>(values[2 * i], values[2 * i + 1]);
  if (aligned) {
    store_vector(reinterpret_cast<uint32_t*>(out), packed);
  } else {
    for (int i = 0; i < Width / 2; ++i) reinterpret_cast<uint32_t*>(out)[i] = packed[i];
  }
}

// Writes the finished rows; the waves of split 0 alone.
template <class S>
__device__ void write_out(const AttentionArgs& a, const RowTile& rows, const TileRows<S>& own) {
  using T = typename S::T;
  const bool aligned = a.out_token_stride % 8 == 0 && a.out_head_stride % 8 == 0 &&
                       reinterpret_cast<uintptr_t>(a.out) % 16 == 0;
#pragma unroll
  for (int m = 0; m < S::kRowBlocks; ++m) {
    const int row = own.row_of(m);
    if (row >= rows.num_rows) continue;
    const float factor = own.weight[m] == 0 ? 0 : 1 / own.weight[m];
    T* const out = static_cast<T*>(a.out) + (rows.sequence.first_row + rows.query(row)) * a.out_token_stride +
                   rows.head(row) * a.out_head_stride;
#pragma unroll
    for (int section = 0; section < S::kSections; ++section) {
#pragma unroll
      for (int i = 0; i < S::kSums; ++i) {
        const int d = own.element(section, i);
        if (d >= int(a.head_size)) continue;
        float values[S::kWidth];
#pragma unroll
        for (int j = 0; j < S::kWidth; ++j) values[j] = own.sums[m][section * S::kWidth + j][i] * factor;
        write_row(out + d, values, aligned);
      }
    }
  }
}

// f(instructions, element of the dtype, room for the head as an integral constant), which starts a kernel and
// gives its error.
template <class F>
int start_for(const AttentionArgs& a, F&& f) {
  int error = 0;
  with_amd_matrix([&](auto matrix) {
    const auto start = [&](auto element) {
      if (a.head_size <= 64) return f(matrix, element, std::integral_constant<int, 64>{});
      if (a.head_size <= 96) return f(matrix, element, std::integral_constant<int, 96>{});
      if (a.head_size <= 128) return f(matrix, element, std::integral_constant<int, 128>{});
      if (a.head_size <= 192) return f(matrix, element, std::integral_constant<int, 192>{});
      return f(matrix, element, std::integral_constant<int, 256>{});
    };
    error = a.dtype == DType::f16 ? start(f16{}) : start(bf16{});
  });
  return error;
}

}  // namespace pelton::gpu::amd
#endif
