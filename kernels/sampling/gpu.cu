// One token per row of logits: argmax, or a draw from the softmax cut by min_p, top_k and top_p, without a
// sort. A first kernel notes maxima and sums of slices of the rows; then one block a row finds cut and draw
// by radix selection: a histogram over the logits, and a sorted list of the few tokens in the bin that
// matters. The draw inverts the cumulative distribution, in the order of ids, or of probability where top_k
// or top_p cut.
#include <cfloat>
#include <cmath>

#include "../common/gpu.cuh"
#include "sampling.h"

namespace pelton::gpu {
namespace {

constexpr int kSliceThreads = 256;
constexpr int kPerSliceThread = kSampleSlice / kSliceThreads;
constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;
constexpr int kChunksPerSlice = kSampleSlice / kSampleChunk;
constexpr int kLoad = 4;     // tokens per access; a chunk is one access of a warp
constexpr int kBins = 1024;  // one a thread
constexpr int kList = 4096;  // tokens that can be sorted
constexpr int kPerThread = kList / kThreads;
constexpr int kHead = 256;  // where top_p is looked for before the whole row is
static_assert(kSampleChunk == kLoad * kWarp && kBins == kThreads && kWarps == kWarp);
static_assert(kSampleMaxVocab / kSampleSlice <= kThreads && kSampleSlice == kLoad * kThreads);

// Temperatures below are greedy, as in pelton.sampling.
constexpr float kGreedyBelow = 1e-5f, kMinScale = 1e-30f;
// A probability that reaches top_p up to this has reached it.
constexpr double kTopPTolerance = 1e-6;
// Probabilities relative to the most likely token's, in fixed point: sums do not depend on their order.
// Below e^kLowest (half a unit) a token has none.
constexpr double kUnit = 8796093022208.0;  // 2^43
constexpr float kLowest = -30.4f;
constexpr float kBinsPerNat = float(kBins - 1) / -kLowest;

// Logits as integers of the same order; -0 is 0, and NaN is above infinity.
constexpr uint32_t kNanKey = 0xffffffffu, kInfinityKey = 0xff800000u, kMinusInfinityKey = 0x007fffffu;

__device__ __forceinline__ uint32_t key_of(float x) {
  if (x != x) return kNanKey;
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x == 0.0f) bits = 0;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32_t key) {
  const uint32_t bits = key >> 31 ? key & 0x7fffffffu : ~key;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
// A token with its logit: greater ones come first, of equal logits the lower id.
__device__ __forceinline__ uint64_t pack(uint32_t key, uint32_t id) {
  return uint64_t(key) << 32 | uint32_t(~id);
}
__device__ __forceinline__ uint32_t key_in(uint64_t token) { return uint32_t(token >> 32); }
__device__ __forceinline__ uint32_t id_in(uint64_t token) { return ~uint32_t(token); }
__device__ __forceinline__ bool is_finite(uint32_t key) {
  return key > kMinusInfinityKey && key < kInfinityKey;
}

__device__ __forceinline__ uint64_t units_of(float x) { return uint64_t(expf(x) * float(kUnit) + 0.5f); }
__device__ __forceinline__ float scale_of(float temperature) { return fmaxf(1.0f / temperature, kMinScale); }

// Logits `first` to `first + 3` of a row; -infinity past its end.
template <class T>
__device__ __forceinline__ void load_logits(const T* logits, int64_t first, int64_t vocab, bool aligned,
                                            float (&v)[kLoad]) {
  if (aligned && first + kLoad <= vocab) {
    const Vector<T, kLoad> loaded = load_vector<T, kLoad>(logits + first);
    for (int i = 0; i < kLoad; ++i) v[i] = to_float(loaded[i]);
  } else {
    for (int i = 0; i < kLoad; ++i) v[i] = first + i < vocab ? to_float(logits[first + i]) : -INFINITY;
  }
}

// The workspace of a row: statistics of its slices, then the greatest key of each chunk.
__device__ __forceinline__ SliceStatistics* slices_of(const SampleArgs& args, int64_t row) {
  return reinterpret_cast<SliceStatistics*>(static_cast<char*>(args.workspace) +
                                            row * sample_workspace_bytes(args.vocab));
}
__device__ __forceinline__ uint32_t* chunks_of(const SampleArgs& args, int64_t row) {
  return reinterpret_cast<uint32_t*>(slices_of(args, row) + sample_slices(args.vocab));
}

template <class T, bool Greedy>
__global__ void __launch_bounds__(kSliceThreads) statistics_kernel(const SampleArgs args, bool aligned) {
  const int slices = int(sample_slices(args.vocab));
  const int64_t row = blockIdx.x / unsigned(slices);
  const int slice = int(blockIdx.x % unsigned(slices));
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const T* logits = static_cast<const T*>(args.logits) + row * args.stride;
  constexpr int kLoads = kPerSliceThread / kLoad;
  float v[kLoads][kLoad];
  for (int j = 0; j < kLoads; ++j) {
    const int64_t first = int64_t(slice) * kSampleSlice + (j * kSliceThreads + threadIdx.x) * kLoad;
    load_logits(logits, first, args.vocab, aligned, v[j]);
  }
  uint64_t best = 0;
  for (int j = 0; j < kLoads; ++j) {
    uint64_t top = 0;
    for (int i = 0; i < kLoad; ++i) {
      const uint32_t id = slice * kSampleSlice + (j * kSliceThreads + threadIdx.x) * kLoad + i;
      const uint64_t token = pack(key_of(v[j][i]), id);
      top = token > top ? token : top;
    }
    best = top > best ? top : best;
    if constexpr (!Greedy) {
      uint32_t key = key_in(top);
      for (int mask = kWarp / 2; mask > 0; mask /= 2) {
        const uint32_t other = shuffle_xor(key, mask);
        key = other > key ? other : key;
      }
      if (lane == 0) {
        chunks_of(args, row)[slice * kChunksPerSlice + j * (kSliceThreads / kWarp) + warp] = key;
      }
    }
  }
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const uint64_t other = shuffle_xor(best, mask);
    best = other > best ? other : best;
  }
  __shared__ uint64_t bests[kSliceThreads / kWarp];
  if (lane == 0) bests[warp] = best;
  __syncthreads();
  for (const uint64_t other : bests) best = other > best ? other : best;

  SliceStatistics statistics{best, 0.0f, 0.0f};
  if constexpr (!Greedy) {
    if (is_finite(key_in(best))) {
      const float peak = value_of(key_in(best)), scale = scale_of(args.temperature[row]);
      float scaled_sum = 0, sum = 0;
      for (int j = 0; j < kLoads; ++j) {
        for (int i = 0; i < kLoad; ++i) {
          scaled_sum += expf((v[j][i] - peak) * scale);
          if (args.logprobs) sum += expf(v[j][i] - peak);
        }
      }
      statistics.scaled_sum = block_sum<kSliceThreads>(scaled_sum);
      if (args.logprobs) statistics.sum = block_sum<kSliceThreads>(sum);
    }
  }
  if (threadIdx.x == 0) slices_of(args, row)[slice] = statistics;
}

// The best token of a row from those of its slices, in every lane of a warp.
__device__ uint64_t best_of(const SliceStatistics* statistics, int slices) {
  uint64_t best = 0;
  for (int i = threadIdx.x % kWarp; i < slices; i += kWarp) {
    best = statistics[i].best > best ? statistics[i].best : best;
  }
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const uint64_t other = shuffle_xor(best, mask);
    best = other > best ? other : best;
  }
  return best;
}

__global__ void greedy_kernel(const SampleArgs args) {
  const int64_t row = blockIdx.x;
  const uint64_t best = best_of(slices_of(args, row), int(sample_slices(args.vocab)));
  if (threadIdx.x == 0) args.out[row] = is_finite(key_in(best)) ? int64_t(id_in(best)) : -1;
}

// Everything about a row that its threads have in common.
template <class T>
struct Row {
  const T* logits;
  int64_t vocab;
  int slices, chunks;
  const SliceStatistics* statistics;
  const uint32_t* chunk_keys;
  bool aligned;
  float peak, scale, floor;

  // The logarithm of a token's probability relative to the most likely one's: 0 or less.
  __device__ __forceinline__ float log_weight(float logit) const { return (logit - peak) * scale; }
  __device__ __forceinline__ float log_weight_of(uint32_t key) const { return log_weight(value_of(key)); }
  // Whether the token has a probability at all, and min_p keeps it.
  __device__ __forceinline__ bool is_alive(float log_weight) const { return log_weight >= floor; }
};

// Bins of one width from the most likely token down to kLowest.
__device__ __forceinline__ int bin_of(float log_weight) {
  const int bin = int(-log_weight * kBinsPerNat);
  return bin < kBins ? bin : kBins - 1;
}

struct Token {
  uint64_t token;
  uint64_t through;  // mass of all tokens up to it and with it
};
struct Place {
  uint32_t index, count;
  uint64_t count_before, mass_before;
};
struct Histogram {
  uint32_t count[kBins], low[kBins], high[kBins];  // low and high half of the mass
};
struct Shared {
  Histogram bins;
  union {
    uint64_t list[kList];
    Histogram fine;
  };
  uint64_t partial[kWarps];
  uint32_t size;
  Token token;
  Place place;
};

// Exclusive prefix sum over the block, and the total.
__device__ uint64_t block_scan(Shared& shared, uint64_t own, uint64_t& total) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const auto scan = [lane](uint64_t sum) {
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const uint64_t other = shuffle(sum, lane < distance ? lane : lane - distance);
      if (lane >= distance) sum += other;
    }
    return sum;
  };
  const uint64_t sum = scan(own);
  __syncthreads();
  if (lane == kWarp - 1) shared.partial[warp] = sum;
  __syncthreads();
  const uint64_t sums = scan(shared.partial[lane]);
  total = shuffle(sums, kWarp - 1);
  const uint64_t before = shuffle(sums, warp == 0 ? 0 : warp - 1);
  return (warp == 0 ? 0 : before) + sum - own;
}

// Calls use(logit, id) for the tokens of the chunks whose greatest key is wanted, and for padding of
// -infinity.
template <class T, class Want, class Use>
__device__ __forceinline__ void for_each_token(const Row<T>& row, const Want& want, const Use& use) {
  constexpr int kAhead = 4;  // loads in flight
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (int first = warp * kAhead; first < row.chunks; first += kWarps * kAhead) {
    float v[kAhead][kLoad];
    bool wanted[kAhead];
    for (int a = 0; a < kAhead; ++a) {
      wanted[a] = first + a < row.chunks && want(row.chunk_keys[first + a]);
      if (wanted[a]) {
        load_logits(row.logits, int64_t(first + a) * kSampleChunk + lane * kLoad, row.vocab, row.aligned,
                    v[a]);
      }
    }
    for (int a = 0; a < kAhead; ++a) {
      if (!wanted[a]) continue;
      for (int i = 0; i < kLoad; ++i) use(v[a][i], uint32_t((first + a) * kSampleChunk + lane * kLoad + i));
    }
  }
}

__device__ __forceinline__ void clear(Histogram& bins) {
  bins.count[threadIdx.x] = bins.low[threadIdx.x] = bins.high[threadIdx.x] = 0;
}
__device__ __forceinline__ void add(Histogram& bins, int bin, uint64_t mass) {
  atomicAdd(&bins.count[bin], 1u);
  const uint32_t low = uint32_t(mass), old = atomicAdd(&bins.low[bin], low);
  const uint32_t high = uint32_t(mass >> 32) + (old + low < low);  // with the carry
  if (high) atomicAdd(&bins.high[bin], high);
}

// A thread's bin of a histogram and what lies before it.
struct Scanned {
  uint64_t count, mass, count_before, mass_before, total_count, total_mass;
};
__device__ Scanned scan(Shared& shared, const Histogram& bins) {
  Scanned s;
  s.count = bins.count[threadIdx.x];
  s.mass = uint64_t(bins.high[threadIdx.x]) << 32 | bins.low[threadIdx.x];
  s.count_before = block_scan(shared, s.count, s.total_count);
  s.mass_before = block_scan(shared, s.mass, s.total_mass);
  return s;
}

// The bin where the count, or the mass, first exceeds the target, which is below the total.
__device__ Place find(Shared& shared, const Scanned& s, bool by_mass, uint64_t target) {
  const uint64_t before = by_mass ? s.mass_before : s.count_before, own = by_mass ? s.mass : s.count;
  __syncthreads();
  if (before <= target && target - before < own) {
    shared.place = {threadIdx.x, uint32_t(s.count), s.count_before, s.mass_before};
  }
  __syncthreads();
  return shared.place;
}

// Puts the tokens that are accepted on the list, in any order, and returns how many they are: more than kList
// are not on it.
template <class T, class Want, class Accept>
__device__ uint32_t gather(Shared& shared, const Row<T>& row, const Want& want, const Accept& accept) {
  __syncthreads();
  if (threadIdx.x == 0) shared.size = 0;
  __syncthreads();
  for_each_token(row, want, [&](float logit, uint32_t id) {
    if (!accept(logit)) return;
    const uint32_t place = atomicAdd(&shared.size, 1u);
    if (place < kList) shared.list[place] = pack(key_of(logit), id);
  });
  __syncthreads();
  return shared.size;
}

// Sorts the list, greatest first (bitonic; Batcher 1968).
__device__ void sort(Shared& shared, uint32_t size) {
  uint32_t padded = 2;
  while (padded < size) padded *= 2;
  for (uint32_t i = size + threadIdx.x; i < padded; i += kThreads) shared.list[i] = 0;
  __syncthreads();
  for (uint32_t run = 2; run <= padded; run *= 2) {
    for (uint32_t step = run / 2; step > 0; step /= 2) {
      for (uint32_t i = threadIdx.x; i < padded / 2; i += kThreads) {
        const uint32_t first = 2 * i - (i & (step - 1)), second = first + step;
        const uint64_t a = shared.list[first], b = shared.list[second];
        if ((a < b) == ((first & run) == 0)) {
          shared.list[first] = b;
          shared.list[second] = a;
        }
      }
      __syncthreads();
    }
  }
}

// A thread's part of the sorted list.
struct Listed {
  uint64_t before, own[kPerThread], total;
};
template <class T>
__device__ Listed scan_list(Shared& shared, const Row<T>& row, uint32_t size) {
  Listed listed;
  uint64_t sum = 0;
  for (int i = 0; i < kPerThread; ++i) {
    const uint32_t place = threadIdx.x * kPerThread + i;
    listed.own[i] = place < size ? units_of(row.log_weight_of(key_in(shared.list[place]))) : 0;
    sum += listed.own[i];
  }
  listed.before = block_scan(shared, sum, listed.total);
  return listed;
}
// The listed token at an index, or the first whose mass with that of all before it exceeds the target.
__device__ Token find(Shared& shared, const Listed& listed, bool by_mass, uint64_t target) {
  __syncthreads();
  uint64_t before = listed.before;
  for (int i = 0; i < kPerThread; ++i) {
    const uint32_t place = threadIdx.x * kPerThread + i;
    if (by_mass ? before <= target && target - before < listed.own[i] : place == target) {
      shared.token = {shared.list[place], before + listed.own[i]};
    }
    before += listed.own[i];
  }
  __syncthreads();
  return shared.token;
}

// The n-th token, by id, of those whose logit has this key.
template <class T>
__device__ uint32_t nth_equal(Shared& shared, const Row<T>& row, uint32_t key, uint64_t n) {
  for (int slice = 0; slice < row.slices; ++slice) {
    if (key_in(row.statistics[slice].best) < key) continue;
    const uint32_t first = slice * kSampleSlice + threadIdx.x * kLoad;
    float v[kLoad];
    load_logits(row.logits, first, row.vocab, row.aligned, v);
    uint64_t own = 0, total;
    for (int i = 0; i < kLoad; ++i) own += key_of(v[i]) == key;
    uint64_t before = block_scan(shared, own, total);
    if (n >= total) {
      n -= total;
      continue;
    }
    for (int i = 0; i < kLoad; ++i) {
      if (key_of(v[i]) == key && before++ == n) shared.size = first + i;
    }
    break;
  }
  __syncthreads();
  return shared.size;
}

// The first token, from the most likely one on, with which the count, or the mass, exceeds the target.
template <class T>
__device__ __noinline__ Token select(Shared& shared, const Row<T>& row, const Scanned& scanned, bool by_mass,
                                     uint64_t target) {
  Place place = find(shared, scanned, by_mass, target);
  uint64_t count_before = place.count_before, mass_before = place.mass_before;
  const int bin = int(place.index);
  if (place.count <= kList) {
    gather(
        shared, row, [&](uint32_t key) { return bin_of(row.log_weight_of(key)) <= bin; },
        [&](float logit) {
          const float x = row.log_weight(logit);
          return row.is_alive(x) && bin_of(x) == bin;
        });
  } else {
    // Too many for the list: find the bin's range of keys, and divide that further.
    const uint32_t top = key_of(row.peak);
    uint32_t low = key_of(-FLT_MAX), high = top;
    while (low < high) {  // the lowest key in the bin
      const uint32_t middle = low + (high - low) / 2;
      const float x = row.log_weight_of(middle);
      if (row.is_alive(x) && bin_of(x) <= bin) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    uint32_t lowest = low;
    high = top;
    while (low < high) {  // the highest one
      const uint32_t middle = high - (high - low) / 2;
      if (bin_of(row.log_weight_of(middle)) >= bin) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    low = lowest;
    while (place.count > kList && low < high) {
      int shift = 0;
      while ((high - low) >> shift >= kBins) ++shift;
      __syncthreads();
      clear(shared.fine);
      __syncthreads();
      for_each_token(
          row, [&](uint32_t key) { return key >= low; },
          [&](float logit, uint32_t) {
            const uint32_t key = key_of(logit);
            if (low <= key && key <= high)
              add(shared.fine, (high - key) >> shift, units_of(row.log_weight(logit)));
          });
      __syncthreads();
      const Scanned fine = scan(shared, shared.fine);
      place = find(shared, fine, by_mass, target - (by_mass ? mass_before : count_before));
      count_before += place.count_before;
      mass_before += place.mass_before;
      high -= place.index << shift;
      const uint32_t width = (1u << shift) - 1;
      low = high - low > width ? high - width : low;
    }
    if (place.count > kList) {  // all equal
      const uint64_t mass = units_of(row.log_weight_of(high));
      const uint64_t n = by_mass ? (target - mass_before) / mass : target - count_before;
      return {pack(high, nth_equal(shared, row, high, n)), mass_before + (n + 1) * mass};
    }
    gather(
        shared, row, [&](uint32_t key) { return key >= low; },
        [&](float logit) {
          const uint32_t key = key_of(logit);
          return low <= key && key <= high;
        });
  }
  sort(shared, place.count);
  const Listed listed = scan_list(shared, row, place.count);
  Token token = find(shared, listed, by_mass, target - (by_mass ? mass_before : count_before));
  token.through += mass_before;
  return token;
}

// Sum of exp(logit) over the row relative to its maximum, with or without temperature; the same in every
// thread.
template <class T>
__device__ double sum_of(const Row<T>& row, bool scaled) {
  double sum = 0;
  for (int i = threadIdx.x % kWarp; i < row.slices; i += kWarp) {
    const SliceStatistics& s = row.statistics[i];
    const float below = value_of(key_in(s.best)) - row.peak;
    sum += scaled ? double(s.scaled_sum) * expf(below * row.scale) : double(s.sum) * expf(below);
  }
  for (int mask = kWarp / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  return sum;
}

// The mass up to which top_p keeps tokens: of those at or before it, all, and always one.
__device__ __forceinline__ uint64_t top_p_goal(float top_p, uint64_t total) {
  const double goal = ceil((double(top_p) - kTopPTolerance) * double(total));
  return goal >= 1.0 ? uint64_t(goal) : 1;
}
// A draw in [0, total): `uniform` is below 1, but its product may be rounded up.
__device__ __forceinline__ uint64_t draw(double uniform, uint64_t total) {
  const uint64_t target = uint64_t(uniform * double(total));
  return target < total ? target : total - 1;
}

template <class T>
__device__ uint64_t draw_by_probability(Shared& shared, const Row<T>& row, int64_t top_k, float top_p,
                                        bool with_min_p, double uniform) {
  const bool with_k = top_k > 0 && top_k < row.vocab, with_p = top_p < 1.0f;
  // The bins that surely hold all tokens that can be drawn; for top_p, those that usually do. The k greatest
  // maxima of chunks bound the k-th logit from below.
  int last_bin = kBins - 1;
  if (row.vocab > kList && (with_k || !with_min_p)) {
    const int64_t wanted = with_k ? top_k : kHead < row.chunks ? kHead : row.chunks;
    clear(shared.bins);
    __syncthreads();
    for (int i = threadIdx.x; i < row.chunks; i += kThreads) {
      const float x = row.log_weight_of(row.chunk_keys[i]);
      if (row.is_alive(x)) atomicAdd(&shared.bins.count[bin_of(x)], 1u);
    }
    __syncthreads();
    Scanned s{};
    s.count = shared.bins.count[threadIdx.x];
    s.count_before = block_scan(shared, s.count, s.total_count);
    if (uint64_t(wanted) <= s.total_count) last_bin = int(find(shared, s, false, wanted - 1).index);
  }
  const bool complete = with_k || last_bin == kBins - 1;
  const uint32_t size = gather(
      shared, row,
      [&](uint32_t key) {
        const float x = row.log_weight_of(key);
        return row.is_alive(x) && bin_of(x) <= last_bin;
      },
      [&](float logit) {
        const float x = row.log_weight(logit);
        return row.is_alive(x) && bin_of(x) <= last_bin;
      });
  if (size <= kList) {
    sort(shared, size);
    const uint32_t kept_size = with_k && top_k < size ? uint32_t(top_k) : size;
    const Listed listed = scan_list(shared, row, size);
    uint64_t kept = find(shared, listed, false, kept_size - 1).through;
    bool reached = true;
    if (with_p) {
      const uint64_t goal = top_p_goal(top_p, complete ? kept : uint64_t(sum_of(row, true) * kUnit));
      reached = goal <= kept;
      if (reached) kept = find(shared, listed, true, goal - 1).through;
    }
    if (reached) return find(shared, listed, true, draw(uniform, kept)).token;
  }

  __syncthreads();
  clear(shared.bins);
  __syncthreads();
  for_each_token(
      row, [&](uint32_t key) { return row.is_alive(row.log_weight_of(key)); },
      [&](float logit, uint32_t) {
        const float x = row.log_weight(logit);
        if (row.is_alive(x)) add(shared.bins, bin_of(x), units_of(x));
      });
  __syncthreads();
  const Scanned scanned = scan(shared, shared.bins);
  uint64_t kept = scanned.total_mass;
  if (with_k && uint64_t(top_k) < scanned.total_count)
    kept = select(shared, row, scanned, false, top_k - 1).through;
  if (with_p) kept = select(shared, row, scanned, true, top_p_goal(top_p, kept) - 1).through;
  return select(shared, row, scanned, true, draw(uniform, kept)).token;
}

template <class T>
__device__ uint64_t draw_by_id(Shared& shared, const Row<T>& row, bool with_min_p, double uniform) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  // masses of slices
  if (with_min_p) {
    for (int slice = warp; slice < row.slices; slice += kWarps) {
      uint64_t sum = 0;
      for (int c = slice * kChunksPerSlice; c < (slice + 1) * kChunksPerSlice; ++c) {
        if (!row.is_alive(row.log_weight_of(row.chunk_keys[c]))) continue;
        float v[kLoad];
        load_logits(row.logits, int64_t(c) * kSampleChunk + lane * kLoad, row.vocab, row.aligned, v);
        for (int i = 0; i < kLoad; ++i) {
          const float x = row.log_weight(v[i]);
          if (row.is_alive(x)) sum += units_of(x);
        }
      }
      for (int mask = kWarp / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
      if (lane == 0) shared.list[slice] = sum;
    }
    __syncthreads();
  }
  uint64_t own = 0, total;
  if (int(threadIdx.x) < row.slices) {
    const SliceStatistics& s = row.statistics[threadIdx.x];
    own = with_min_p ? shared.list[threadIdx.x]
                     : uint64_t(double(s.scaled_sum) * expf(row.log_weight_of(key_in(s.best))) * kUnit + 0.5);
  }
  const uint64_t before = block_scan(shared, own, total);
  const uint64_t target = draw(uniform, total);
  __syncthreads();
  if (before <= target && target - before < own) {
    // The fraction of the slice that lies before the draw, as another draw inside of it.
    shared.place.index = threadIdx.x;
    shared.place.mass_before = uint64_t(double(target - before) / double(own) * kUnit);
  }
  __syncthreads();
  const int slice = int(shared.place.index);
  const double inside = double(shared.place.mass_before) / kUnit;

  const float peak = value_of(key_in(row.statistics[slice].best));
  const uint32_t first = slice * kSampleSlice + threadIdx.x * kLoad;
  float v[kLoad];
  load_logits(row.logits, first, row.vocab, row.aligned, v);
  uint64_t mass[kLoad], sum = 0, all;
  for (int i = 0; i < kLoad; ++i) {
    const bool kept = !with_min_p || row.is_alive(row.log_weight(v[i]));
    mass[i] = kept ? units_of((v[i] - peak) * row.scale) : 0;
    sum += mass[i];
  }
  uint64_t through = block_scan(shared, sum, all);
  const uint64_t goal = draw(inside, all);
  for (int i = 0; i < kLoad; ++i) {
    if (through <= goal && goal - through < mass[i]) shared.token.token = pack(key_of(v[i]), first + i);
    through += mass[i];
  }
  __syncthreads();
  return shared.token.token;
}

// Draw number `position` of the generator `seed`: pelton.sampling.uniform, after SplitMix64 (Steele, Lea,
// Flood 2014), which is a function of a counter.
__device__ __forceinline__ double uniform_of(uint64_t seed, uint64_t position) {
  uint64_t x = seed + 0x9E3779B97F4A7C15u * (position + 1);
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return double((x ^ (x >> 31)) >> 12) * (1.0 / 4503599627370496.0);
}

template <class T>
__global__ void __launch_bounds__(kThreads) sample_kernel(const SampleArgs args, bool aligned) {
  __shared__ Shared shared;
  const int64_t index = blockIdx.x;
  Row<T> row;
  row.vocab = args.vocab;
  row.logits = static_cast<const T*>(args.logits) + index * args.stride;
  row.slices = int(sample_slices(args.vocab));
  row.chunks = int(ceil_div<int64_t>(args.vocab, kSampleChunk));
  row.statistics = slices_of(args, index);
  row.chunk_keys = chunks_of(args, index);
  row.aligned = aligned;
  uint64_t token = best_of(row.statistics, row.slices);
  const bool valid = is_finite(key_in(token));
  const float temperature = args.temperature[index];
  row.peak = value_of(key_in(token));
  if (valid && temperature >= kGreedyBelow) {
    const int64_t top_k = args.top_k ? args.top_k[index] : 0;
    const float top_p = args.top_p ? args.top_p[index] : 1.0f, min_p = args.min_p ? args.min_p[index] : 0.0f;
    const bool with_min_p = min_p > 0.0f;
    row.scale = scale_of(temperature);
    row.floor = kLowest;
    if (with_min_p) row.floor = fmaxf(kLowest, fminf(float(log(double(min_p))), 0.0f));
    const double uniform = uniform_of(uint64_t(args.seeds[index]), uint64_t(args.positions[index]));
    token = (top_k > 0 && top_k < row.vocab) || top_p < 1.0f
                ? draw_by_probability(shared, row, top_k, top_p, with_min_p, uniform)
                : draw_by_id(shared, row, with_min_p, uniform);
  }
  if (args.logprobs) {
    const double sum = sum_of(row, false);
    if (threadIdx.x == 0) {
      args.logprobs[index] = valid ? float(double(value_of(key_in(token)) - row.peak) - log(sum)) : NAN;
    }
  }
  if (threadIdx.x == 0) args.out[index] = valid ? int64_t(id_in(token)) : -1;
}

template <class T>
bool can_load_vectors(const SampleArgs& args) {
  constexpr int kBytes = kLoad * int(sizeof(T));
  return reinterpret_cast<uintptr_t>(args.logits) % kBytes == 0 &&
         args.stride * int64_t(sizeof(T)) % kBytes == 0;
}

}  // namespace

int sample(const SampleArgs& args, int64_t rows, void* stream) {
  if (rows == 0) return 0;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool aligned = can_load_vectors<T>(args);
    const unsigned blocks = unsigned(rows * sample_slices(args.vocab));
    statistics_kernel<T, false><<<blocks, kSliceThreads, 0, cudaStream_t(stream)>>>(args, aligned);
    sample_kernel<T><<<unsigned(rows), kThreads, 0, cudaStream_t(stream)>>>(args, aligned);
  });
  return launch_result();
}

int greedy_sample(const SampleArgs& args, int64_t rows, void* stream) {
  if (rows == 0) return 0;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool aligned = can_load_vectors<T>(args);
    const unsigned blocks = unsigned(rows * sample_slices(args.vocab));
    statistics_kernel<T, true><<<blocks, kSliceThreads, 0, cudaStream_t(stream)>>>(args, aligned);
  });
  greedy_kernel<<<unsigned(rows), kWarp, 0, cudaStream_t(stream)>>>(args);
  return launch_result();
}

}  // namespace pelton::gpu
