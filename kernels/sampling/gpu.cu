// One token per row of logits: argmax, or a draw from the softmax cut by min_p, top_k and top_p, without a
// sort of the row. statistics_kernel notes maxima and sums of slices of the rows. sample_kernel, one block a
// row, sorts the few tokens that can be drawn, or draws in the order of ids where nothing cuts. Rows where
// more can be drawn are left to histogram_kernel and select_kernel: radix selection (Alabi et al. 2012) of
// each cut and of the draw, where bins count tokens or their probabilities.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "../common/gpu.cuh"
#include "sampling.h"
#include "warp.cuh"

namespace pelton::gpu {
namespace {

constexpr int kSliceThreads = 256;
constexpr int kPerSliceThread = kSampleSlice / kSliceThreads;
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int kChunksPerSlice = kSampleSlice / kSampleChunk;
constexpr int kLoad = 4;  // tokens per access; a chunk is one access of a warp
constexpr int kBins = kSampleBins;
constexpr int kList = 4096;  // tokens that can be put on the list; kThreads of them can be sorted
constexpr int kShort = 128;  // tokens of a bin that are sorted rather than divided further
constexpr int kPerThread = kList / kThreads;
constexpr int kHead = 128;     // chunks whose maxima bound the tokens among which top_p is looked for first
constexpr int kChunks = 2048;  // looked at in one round
static_assert(kSampleChunk == kLoad * kWarp && kWarps <= kWarp && kBins == kThreads &&
              kChunks % kThreads == 0);
static_assert(kSampleMaxVocab / kSampleSlice <= kThreads && kSampleSlice == kPerThread * kThreads);

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
__device__ __forceinline__ void load_logits(const T* logits, int first, int vocab, bool aligned,
                                            float (&v)[kLoad]) {
  if (aligned && first + kLoad <= vocab) {
    const Vector<T, kLoad> loaded = load_vector<T, kLoad>(logits + first);
    for (int i = 0; i < kLoad; ++i) v[i] = to_float(loaded[i]);
  } else {
    for (int i = 0; i < kLoad; ++i) v[i] = first + i < vocab ? to_float(logits[first + i]) : -INFINITY;
  }
}

// The workspace of a row, its parts one after another.
struct Workspace {
  char* start;
  int slices;

  __device__ __forceinline__ Workspace(const SampleArgs& args, int64_t row)
      : start(static_cast<char*>(args.workspace) + row * sample_workspace_bytes(args.vocab)),
        slices(int(sample_slices(args.vocab))) {}
  // Masses and counts of bins, and whether the row is left to select_kernel.
  __device__ __forceinline__ uint64_t* masses() const { return reinterpret_cast<uint64_t*>(start); }
  __device__ __forceinline__ uint32_t* counts() const {
    return reinterpret_cast<uint32_t*>(masses() + kBins);
  }
  __device__ __forceinline__ uint32_t& pending() const { return counts()[kBins]; }
  __device__ __forceinline__ SliceStatistics* statistics() const {
    return reinterpret_cast<SliceStatistics*>(counts() + kBins + 2);
  }
  // Maxima of chunks.
  __device__ __forceinline__ float* chunk_peaks() const {
    return reinterpret_cast<float*>(statistics() + slices);
  }
};

template <class T, bool Greedy>
__global__ void __launch_bounds__(kSliceThreads) statistics_kernel(const SampleArgs args, bool aligned) {
  constexpr int kLoads = kPerSliceThread / kLoad, kSliceWarps = kSliceThreads / kWarp;
  const int slices = int(sample_slices(args.vocab));
  const int64_t row = blockIdx.x / unsigned(slices);
  const int slice = int(blockIdx.x % unsigned(slices));
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const T* logits = static_cast<const T*>(args.logits) + row * args.stride;
  const Workspace workspace(args, row);
  __shared__ float warp_peaks[kSliceWarps];
  __shared__ uint32_t id, num_nan;
  if (threadIdx.x == 0) {
    id = 0xffffffffu;
    num_nan = 0;
  }
  const auto id_of = [slice](int j, int i) {
    return uint32_t(slice * kSampleSlice + (j * kSliceThreads + threadIdx.x) * kLoad + i);
  };
  float v[kLoads][kLoad];
  for (int j = 0; j < kLoads; ++j) load_logits(logits, int(id_of(j, 0)), int(args.vocab), aligned, v[j]);

  float own_peak = -INFINITY;
  bool has_nan = false;
  for (int j = 0; j < kLoads; ++j) {
    float peak = -INFINITY;
    for (int i = 0; i < kLoad; ++i) {
      has_nan |= v[j][i] != v[j][i];
      peak = fmaxf(peak, v[j][i]);
    }
    own_peak = fmaxf(own_peak, peak);
    if constexpr (!Greedy) {
      peak = warp_max(peak);
      if (lane == 0) workspace.chunk_peaks()[slice * kChunksPerSlice + j * kSliceWarps + warp] = peak;
    }
  }
  float peak = warp_max(own_peak);
  if (lane == 0) warp_peaks[warp] = peak;
  __syncthreads();
  for (const float other : warp_peaks) peak = fmaxf(peak, other);
  if (has_nan) atomicAdd(&num_nan, 1u);
  if (own_peak == peak) {
    uint32_t first = 0xffffffffu;
    for (int j = kLoads - 1; j >= 0; --j) {
      for (int i = kLoad - 1; i >= 0; --i) first = v[j][i] == peak ? id_of(j, i) : first;
    }
    atomicMin(&id, first);
  }

  float scaled_sum = 0, sum = 0;
  if constexpr (!Greedy) {
    if (peak > -INFINITY) {
      const float scale = scale_of(args.temperature[row]);
      for (int j = 0; j < kLoads; ++j) {
        for (int i = 0; i < kLoad; ++i) {
          scaled_sum += expf((v[j][i] - peak) * scale);
          if (args.logprobs) sum += expf(v[j][i] - peak);
        }
      }
    }
    scaled_sum = block_sum<kSliceThreads>(scaled_sum);
    if (args.logprobs) sum = block_sum<kSliceThreads>(sum);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    workspace.statistics()[slice] = {pack(num_nan ? kNanKey : key_of(peak), id), scaled_sum, sum};
  }
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
  const uint64_t best = best_of(Workspace(args, row).statistics(), int(sample_slices(args.vocab)));
  if (threadIdx.x == 0) args.out[row] = is_finite(key_in(best)) ? int64_t(id_in(best)) : -1;
}

// Draw number `position` of the generator `seed`: pelton.sampling.uniform, after SplitMix64 (Steele, Lea,
// Flood 2014), which is a function of a counter.
__device__ __forceinline__ double uniform_of(uint64_t seed, uint64_t position) {
  uint64_t x = seed + 0x9E3779B97F4A7C15u * (position + 1);
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return double((x ^ (x >> 31)) >> 12) * (1.0 / 4503599627370496.0);
}

// Everything about a row that its threads have in common. Kernels with it are compiled once: the dtype is
// looked at with each access.
struct Row {
  Workspace workspace;
  const char* logits;
  uint64_t best;
  double uniform;
  int vocab, top_k, slices, chunks;
  DType dtype;
  bool aligned, is_valid, is_greedy, with_k, with_p, with_min_p;
  float peak, scale, floor, top_p;

  __device__ Row(const SampleArgs& args, int64_t row, bool aligned)
      : workspace(args, row), vocab(int(args.vocab)), dtype(args.dtype), aligned(aligned) {
    // all loads before the first use
    const float temperature = args.temperature[row], min_p = args.min_p ? args.min_p[row] : 0.0f;
    top_k = args.top_k ? args.top_k[row] : 0;
    top_p = args.top_p ? args.top_p[row] : 1.0f;
    const uint64_t seed = uint64_t(args.seeds[row]), position = uint64_t(args.positions[row]);
    logits = static_cast<const char*>(args.logits) + row * args.stride * (dtype == DType::f32 ? 4 : 2);
    slices = int(sample_slices(vocab));
    chunks = ceil_div(vocab, kSampleChunk);
    best = best_of(workspace.statistics(), slices);
    is_valid = is_finite(key_in(best));
    is_greedy = !(temperature >= kGreedyBelow);
    with_k = top_k > 0 && top_k < vocab;
    with_p = top_p < 1.0f;
    with_min_p = min_p > 0.0f;
    peak = value_of(key_in(best));
    scale = scale_of(temperature);
    floor = with_min_p ? fmaxf(kLowest, fminf(float(log(double(min_p))), 0.0f)) : kLowest;
    uniform = uniform_of(seed, position);
  }

  __device__ __forceinline__ void load(int first, float (&v)[kLoad]) const {
    if (dtype == DType::f32) {
      load_logits(reinterpret_cast<const float*>(logits), first, vocab, aligned, v);
    } else if (dtype == DType::f16) {
      load_logits(reinterpret_cast<const f16*>(logits), first, vocab, aligned, v);
    } else {
      load_logits(reinterpret_cast<const bf16*>(logits), first, vocab, aligned, v);
    }
  }
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
  uint32_t size, num_chunks;
  uint16_t chunks[kChunks];
  Token token;
  Place place;
};

// Exclusive prefix sum over the block, and the total.
__device__ uint64_t block_scan(Shared& shared, uint64_t own, uint64_t& total) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  uint64_t sum = own;
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const uint64_t other = shuffle(sum, lane < distance ? lane : lane - distance);
    if (lane >= distance) sum += other;
  }
  __syncthreads();
  if (lane == kWarp - 1) shared.partial[warp] = sum;
  __syncthreads();
  uint64_t before = 0;
  total = 0;
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) before += shared.partial[i];
    total += shared.partial[i];
  }
  return before + sum - own;
}

// A number of its own, counted from `counter` on, for each lane of the warp that wants one.
__device__ __forceinline__ uint32_t reserve(uint32_t& counter, bool wanted) {
  const uint32_t lane = threadIdx.x % kWarp, wants = ballot(wanted);
  if (wants == 0) return 0;
  uint32_t first = 0;
  if (lane == 0) first = atomicAdd(&counter, uint32_t(__popc(wants)));
  return shuffle(first, 0) + uint32_t(__popc(wants & ((1u << lane) - 1)));
}

// Calls use(logit, id), all lanes of a warp together, for the tokens of the chunks whose maximum is wanted,
// and for padding of -infinity.
template <class Want, class Use>
__device__ __forceinline__ void for_each_token(Shared& shared, const Row& row, const Want& want,
                                               const Use& use) {
  constexpr int kAhead = 4;  // loads in flight
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (int start = 0; start < row.chunks; start += kChunks) {
    // the wanted ones of the next chunks, so that all warps have work
    __syncthreads();
    if (threadIdx.x == 0) shared.num_chunks = 0;
    __syncthreads();
    for (int base = 0; base < kChunks && start + base < row.chunks; base += kThreads) {
      const int i = base + int(threadIdx.x);
      const bool wanted = start + i < row.chunks && want(row.workspace.chunk_peaks()[start + i]);
      const uint32_t place = reserve(shared.num_chunks, wanted);
      if (wanted) shared.chunks[place] = uint16_t(i);
    }
    __syncthreads();
    const int count = int(shared.num_chunks);
    for (int first = warp * kAhead; first < count; first += kWarps * kAhead) {
      float v[kAhead][kLoad];
      uint32_t id[kAhead];
      for (int a = 0; a < kAhead; ++a) {
        if (first + a >= count) continue;
        id[a] = uint32_t((start + shared.chunks[first + a]) * kSampleChunk + lane * kLoad);
        row.load(id[a], v[a]);
      }
      for (int a = 0; a < kAhead; ++a) {
        if (first + a >= count) continue;
        for (int i = 0; i < kLoad; ++i) use(v[a][i], id[a] + i);
      }
    }
  }
}

template <int Threads>
__device__ __forceinline__ void clear(Histogram& bins) {
  for (int i = threadIdx.x; i < kBins; i += Threads) bins.count[i] = bins.low[i] = bins.high[i] = 0;
}
__device__ __forceinline__ uint64_t mass_of(const Histogram& bins, int bin) {
  return uint64_t(bins.high[bin]) << 32 | bins.low[bin];
}
__device__ __forceinline__ void add(Histogram& bins, int bin, uint64_t mass, bool with_count) {
  if (with_count) atomicAdd(&bins.count[bin], 1u);
  const uint32_t low = uint32_t(mass), old = atomicAdd(&bins.low[bin], low);
  const uint32_t high = uint32_t(mass >> 32) + (old + low < low);  // with the carry
  if (high) atomicAdd(&bins.high[bin], high);
}

// A thread's bin of a histogram and what lies before it.
struct Scanned {
  uint64_t count, mass, count_before, mass_before, total_count, total_mass;
};
__device__ Scanned scan(Shared& shared, uint64_t count, uint64_t mass) {
  Scanned s;
  s.count = count;
  s.mass = mass;
  s.count_before = block_scan(shared, count, s.total_count);
  s.mass_before = block_scan(shared, mass, s.total_mass);
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
template <class Want, class Accept>
__device__ uint32_t gather(Shared& shared, const Row& row, const Want& want, const Accept& accept) {
  __syncthreads();
  if (threadIdx.x == 0) shared.size = 0;
  __syncthreads();
  for_each_token(shared, row, want, [&](float logit, uint32_t id) {
    const bool accepted = accept(logit);
    const uint32_t place = reserve(shared.size, accepted);
    if (accepted && place < kList) shared.list[place] = pack(key_of(logit), id);
  });
  __syncthreads();
  return shared.size;
}

// Sorts a list of at most kThreads tokens, greatest first (bitonic; Batcher 1968): one token a thread, and
// steps within a warp go without shared memory.
__device__ void sort(Shared& shared, uint32_t size) {
  uint32_t padded = 2;
  while (padded < size) padded *= 2;
  uint64_t own = threadIdx.x < size ? shared.list[threadIdx.x] : 0;
  __syncthreads();
  uint32_t buffer = 0;
#pragma unroll 1
  for (uint32_t run = 2; run <= padded; run *= 2) {
#pragma unroll 1
    for (uint32_t step = run / 2; step > 0; step /= 2) {
      uint64_t other;
      if (step < kWarp) {
        if (threadIdx.x / kWarp * kWarp >= padded) continue;  // a warp without tokens
        other = shuffle_xor(own, int(step));
      } else {
        shared.list[buffer + threadIdx.x] = own;
        __syncthreads();
        other = shared.list[buffer + (threadIdx.x ^ step)];
        buffer ^= kThreads;
      }
      const bool keep_greater = ((threadIdx.x & step) == 0) == ((threadIdx.x & run) == 0);
      if ((other > own) == keep_greater) own = other;
    }
  }
  __syncthreads();
  shared.list[threadIdx.x] = own;
  __syncthreads();
}

__device__ __forceinline__ uint64_t mass_of(const Row& row, uint64_t token) {
  return token == 0 ? 0 : units_of(row.log_weight_of(key_in(token)));
}

// A thread's token of the sorted list.
struct Listed {
  uint64_t token, mass, before, total;
};
__device__ Listed scan_list(Shared& shared, const Row& row, uint32_t size) {
  Listed listed;
  listed.token = threadIdx.x < size ? shared.list[threadIdx.x] : 0;
  listed.mass = mass_of(row, listed.token);
  listed.before = block_scan(shared, listed.mass, listed.total);
  return listed;
}
// The listed token at an index, or the first whose mass with that of all before it exceeds the target.
__device__ Token find(Shared& shared, const Listed& listed, bool by_mass, uint64_t target) {
  __syncthreads();
  if (by_mass ? listed.before <= target && target - listed.before < listed.mass : threadIdx.x == target) {
    shared.token = {listed.token, listed.before + listed.mass};
  }
  __syncthreads();
  return shared.token;
}

__device__ uint64_t block_max(Shared& shared, uint64_t v) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const uint64_t other = shuffle_xor(v, mask);
    v = other > v ? other : v;
  }
  __syncthreads();
  if (threadIdx.x % kWarp == 0) shared.partial[threadIdx.x / kWarp] = v;
  __syncthreads();
  for (const uint64_t other : shared.partial) v = other > v ? other : v;
  return v;
}

// A thread's tokens of a long list, in no order; 0 for none. The list itself is used for parts of it then.
struct Unsorted {
  uint64_t token[kPerThread];

  __device__ Unsorted(const Shared& shared, uint32_t size) {
    for (int i = 0; i < kPerThread; ++i) {
      const uint32_t place = threadIdx.x + i * kThreads;
      token[i] = place < size ? shared.list[place] : 0;
    }
  }
};

// Of a list of any order, the first token, from the most likely one on, with which the count, or the mass,
// exceeds the target: a bin of it is divided until it is short enough to sort.
__device__ __forceinline__ Token select(Shared& shared, const Row& row, const Unsorted& mine, uint32_t size,
                                        bool by_mass, uint64_t target) {
  uint64_t own_high = 0, own_low = 0;
  for (const uint64_t token : mine.token) {
    own_high = token > own_high ? token : own_high;
    own_low = token != 0 && ~token > own_low ? ~token : own_low;
  }
  uint64_t high = block_max(shared, own_high), low = ~block_max(shared, own_low);
  uint64_t mass_before = 0;
  while (size > kShort) {
    int shift = 0;
    while ((high - low) >> shift >= kBins) ++shift;
    __syncthreads();
    clear<kThreads>(shared.bins);
    __syncthreads();
    for (const uint64_t token : mine.token) {
      if (low <= token && token <= high) {
        add(shared.bins, int((high - token) >> shift), mass_of(row, token), true);
      }
    }
    __syncthreads();
    const Scanned s = scan(shared, shared.bins.count[threadIdx.x], mass_of(shared.bins, threadIdx.x));
    const Place place = find(shared, s, by_mass, target);
    size = place.count;
    target -= by_mass ? place.mass_before : place.count_before;
    mass_before += place.mass_before;
    high -= uint64_t(place.index) << shift;
    const uint64_t width = (uint64_t(1) << shift) - 1;
    low = high - low > width ? high - width : low;
  }
  __syncthreads();
  if (threadIdx.x == 0) shared.size = 0;
  __syncthreads();
  for (const uint64_t token : mine.token) {
    const bool wanted = low <= token && token <= high;
    const uint32_t place = reserve(shared.size, wanted);
    if (wanted) shared.list[place] = token;
  }
  __syncthreads();
  sort(shared, size);
  Token token = find(shared, scan_list(shared, row, size), by_mass, target);
  token.through += mass_before;
  return token;
}

// A thread's part of a slice: consecutive tokens.
__device__ __forceinline__ void load_part(const Row& row, uint32_t first, float (&v)[kPerThread]) {
  for (int j = 0; j < kPerThread / kLoad; ++j) {
    float part[kLoad];
    row.load(first + j * kLoad, part);
    for (int i = 0; i < kLoad; ++i) v[j * kLoad + i] = part[i];
  }
}

// The n-th token, by id, of those whose logit has this key.
__device__ uint32_t nth_equal(Shared& shared, const Row& row, uint32_t key, uint64_t n) {
  for (int slice = 0; slice < row.slices; ++slice) {
    if (key_in(row.workspace.statistics()[slice].best) < key) continue;
    const uint32_t first = slice * kSampleSlice + threadIdx.x * kPerThread;
    float v[kPerThread];
    load_part(row, first, v);
    uint64_t own = 0, total;
    for (int i = 0; i < kPerThread; ++i) own += key_of(v[i]) == key;
    uint64_t before = block_scan(shared, own, total);
    if (n >= total) {
      n -= total;
      continue;
    }
    for (int i = 0; i < kPerThread; ++i) {
      if (key_of(v[i]) == key && before++ == n) shared.size = first + i;
    }
    break;
  }
  __syncthreads();
  return shared.size;
}

// The first token, from the most likely one on, with which the count, or the mass, exceeds the target.
__device__ __forceinline__ Token select(Shared& shared, const Row& row, const Scanned& scanned, bool by_mass,
                                        uint64_t target) {
  Place place = find(shared, scanned, by_mass, target);
  uint64_t count_before = place.count_before, mass_before = place.mass_before;
  const int bin = int(place.index);
  uint32_t size = gather(
      shared, row, [&](float peak) { return bin_of(row.log_weight(peak)) <= bin; },
      [&](float logit) {
        const float x = row.log_weight(logit);
        return row.is_alive(x) && bin_of(x) == bin;
      });
  if (size > kList) {
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
    while (size > kList && low < high) {
      int shift = 0;
      while ((high - low) >> shift >= kBins) ++shift;
      __syncthreads();
      clear<kThreads>(shared.fine);
      __syncthreads();
      for_each_token(
          shared, row, [&](float peak) { return key_of(peak) >= low; },
          [&](float logit, uint32_t) {
            const uint32_t key = key_of(logit);
            if (low <= key && key <= high)
              add(shared.fine, (high - key) >> shift, units_of(row.log_weight(logit)), true);
          });
      __syncthreads();
      const Scanned fine = scan(shared, shared.fine.count[threadIdx.x], mass_of(shared.fine, threadIdx.x));
      place = find(shared, fine, by_mass, target - (by_mass ? mass_before : count_before));
      size = place.count;
      count_before += place.count_before;
      mass_before += place.mass_before;
      high -= place.index << shift;
      const uint32_t width = (1u << shift) - 1;
      low = high - low > width ? high - width : low;
    }
    if (size > kList) {  // all equal
      const uint64_t mass = units_of(row.log_weight_of(high));
      const uint64_t n = by_mass ? (target - mass_before) / mass : target - count_before;
      return {pack(high, nth_equal(shared, row, high, n)), mass_before + (n + 1) * mass};
    }
    gather(
        shared, row, [&](float peak) { return key_of(peak) >= low; },
        [&](float logit) {
          const uint32_t key = key_of(logit);
          return low <= key && key <= high;
        });
  }
  const uint64_t inside = target - (by_mass ? mass_before : count_before);
  Token token = select(shared, row, Unsorted(shared, size), size, by_mass, inside);
  token.through += mass_before;
  return token;
}

// Sum of exp(logit) over the row relative to its maximum, with or without temperature; the same in every
// thread.
__device__ double sum_of(const Row& row, bool scaled) {
  double sum = 0;
  for (int i = threadIdx.x % kWarp; i < row.slices; i += kWarp) {
    const SliceStatistics& s = row.workspace.statistics()[i];
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

// The cut of top_k, that of top_p, and the draw: each asks select(by_mass, target) for the token where count
// or mass exceeds the target. False if not all of the row was there to select from, and top_p reaches beyond.
template <class Select>
__device__ __forceinline__ bool cut_and_draw(const Row& row, uint64_t count, uint64_t mass, bool is_complete,
                                             const Select& select, uint64_t& token) {
  uint64_t kept = mass;
  Token found{};
#pragma unroll 1
  for (int step = 0; step < 3; ++step) {
    uint64_t target;
    if (step == 0) {
      if (!row.with_k || uint64_t(row.top_k) >= count) continue;
      target = row.top_k - 1;
    } else if (step == 1) {
      if (!row.with_p) continue;
      const uint64_t goal = top_p_goal(row.top_p, is_complete ? kept : uint64_t(sum_of(row, true) * kUnit));
      if (goal > kept) return false;
      target = goal - 1;
    } else {
      target = draw(row.uniform, kept);
    }
    found = select(step > 0, target);
    kept = found.through;
  }
  token = found.token;
  return true;
}

// A draw among tokens in the order of their probability, if those that can be drawn are so few that they can
// be sorted.
__device__ bool draw_from_list(Shared& shared, const Row& row, uint64_t& token) {
  // The bins that surely hold all tokens that can be drawn; for top_p, those that usually do. The k greatest
  // maxima of chunks bound the k-th logit from below.
  int last_bin = kBins - 1;
  if (row.vocab > kThreads && (row.with_k || !row.with_min_p)) {
    const int wanted = row.with_k ? row.top_k : kHead < row.chunks ? kHead : row.chunks;
    clear<kThreads>(shared.bins);
    __syncthreads();
    for (int i = threadIdx.x; i < row.chunks; i += kThreads) {
      const float x = row.log_weight(row.workspace.chunk_peaks()[i]);
      if (row.is_alive(x)) atomicAdd(&shared.bins.count[bin_of(x)], 1u);
    }
    __syncthreads();
    Scanned s{};
    s.count = shared.bins.count[threadIdx.x];
    s.count_before = block_scan(shared, s.count, s.total_count);
    if (uint64_t(wanted) <= s.total_count) {
      last_bin = int(find(shared, s, false, wanted - 1).index);
    } else if (s.total_count > kHead) {
      return false;  // too many, or nearly so
    }
  }
  const bool is_complete = row.with_k || last_bin == kBins - 1;
  const auto is_wanted = [&](float logit) {
    const float x = row.log_weight(logit);
    return row.is_alive(x) && bin_of(x) <= last_bin;
  };
  const uint32_t size = gather(shared, row, is_wanted, is_wanted);
  if (size > kThreads) return false;
  sort(shared, size);
  const Listed listed = scan_list(shared, row, size);
  return cut_and_draw(
      row, size, listed.total, is_complete,
      [&](bool by_mass, uint64_t target) { return find(shared, listed, by_mass, target); }, token);
}

// A draw among tokens in the order of their ids, which only min_p may cut: first the slice, then the token in
// it.
__device__ uint64_t draw_by_id(Shared& shared, const Row& row) {
  if (row.with_min_p) {
    clear<kThreads>(shared.bins);
    const auto is_alive = [&](float logit) { return row.is_alive(row.log_weight(logit)); };
    for_each_token(shared, row, is_alive, [&](float logit, uint32_t id) {
      if (is_alive(logit)) add(shared.bins, int(id / kSampleSlice), units_of(row.log_weight(logit)), false);
    });
    __syncthreads();
  }
  uint64_t own = 0, total;
  if (int(threadIdx.x) < row.slices) {
    const SliceStatistics& s = row.workspace.statistics()[threadIdx.x];
    own = row.with_min_p
              ? mass_of(shared.bins, threadIdx.x)
              : uint64_t(double(s.scaled_sum) * expf(row.log_weight_of(key_in(s.best))) * kUnit + 0.5);
  }
  const uint64_t before = block_scan(shared, own, total);
  const uint64_t target = draw(row.uniform, total);
  __syncthreads();
  if (before <= target && target - before < own) {
    // The fraction of the slice that lies before the draw, as another draw inside of it.
    shared.place.index = threadIdx.x;
    shared.place.mass_before = uint64_t(double(target - before) / double(own) * kUnit);
  }
  __syncthreads();
  const int slice = int(shared.place.index);
  const double inside = double(shared.place.mass_before) / kUnit;

  const float peak = value_of(key_in(row.workspace.statistics()[slice].best));
  const uint32_t first = slice * kSampleSlice + threadIdx.x * kPerThread;
  float v[kPerThread];
  load_part(row, first, v);
  uint64_t mass[kPerThread], sum = 0, all;
  for (int i = 0; i < kPerThread; ++i) {
    const bool kept = !row.with_min_p || row.is_alive(row.log_weight(v[i]));
    mass[i] = kept ? units_of((v[i] - peak) * row.scale) : 0;
    sum += mass[i];
  }
  uint64_t through = block_scan(shared, sum, all);
  const uint64_t goal = draw(inside, all);
  for (int i = 0; i < kPerThread; ++i) {
    if (through <= goal && goal - through < mass[i]) shared.token.token = pack(key_of(v[i]), first + i);
    through += mass[i];
  }
  __syncthreads();
  return shared.token.token;
}

__device__ void write(const SampleArgs& args, int64_t index, const Row& row, uint64_t token) {
  if (args.logprobs) {
    const double sum = sum_of(row, false);
    if (threadIdx.x == 0) {
      const float below = value_of(key_in(token)) - row.peak;
      args.logprobs[index] = row.is_valid ? float(double(below) - log(sum)) : NAN;
    }
  }
  if (threadIdx.x == 0) args.out[index] = row.is_valid ? int64_t(id_in(token)) : -1;
}

__global__ void __launch_bounds__(kThreads, 2) sample_kernel(const SampleArgs args, bool aligned) {
  __shared__ Shared shared;
  const Row row(args, blockIdx.x, aligned);
  uint64_t token = row.best;
  bool done = true;
  if (row.is_valid && !row.is_greedy) {
    if (row.with_k || row.with_p) {
      done = draw_from_list(shared, row, token);
    } else {
      token = draw_by_id(shared, row);
    }
  }
  if (done) write(args, blockIdx.x, row, token);
  if (threadIdx.x == 0) row.workspace.pending() = !done;
  if (!done) row.workspace.masses()[threadIdx.x] = row.workspace.counts()[threadIdx.x] = 0;
}

// Counts and masses of the bins of pending rows. `parts` blocks share a row.
__global__ void __launch_bounds__(kSliceThreads, 4)
    histogram_kernel(const SampleArgs args, bool aligned, int parts) {
  const int64_t index = blockIdx.x / unsigned(parts);
  if (!Workspace(args, index).pending()) return;
  const Row row(args, index, aligned);
  __shared__ Histogram bins;
  clear<kSliceThreads>(bins);
  __syncthreads();
  constexpr int kLoads = kPerSliceThread / kLoad;
  for (int slice = int(blockIdx.x % unsigned(parts)); slice < row.slices; slice += parts) {
    float v[kLoads][kLoad];
    for (int j = 0; j < kLoads; ++j) {
      row.load(slice * kSampleSlice + (j * kSliceThreads + int(threadIdx.x)) * kLoad, v[j]);
    }
    for (int j = 0; j < kLoads; ++j) {
      for (int i = 0; i < kLoad; ++i) {
        const float x = row.log_weight(v[j][i]);
        if (row.is_alive(x)) add(bins, bin_of(x), units_of(x), row.with_k);
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kBins; i += kSliceThreads) {
    const unsigned long long mass = mass_of(bins, i);
    if (mass == 0) continue;
    atomicAdd(reinterpret_cast<unsigned long long*>(&row.workspace.masses()[i]), mass);
    if (row.with_k) atomicAdd(&row.workspace.counts()[i], bins.count[i]);
  }
}

// Pending rows: the cut of top_k, that of top_p, and the draw.
__global__ void __launch_bounds__(kThreads, 1) select_kernel(const SampleArgs args, bool aligned) {
  if (!Workspace(args, blockIdx.x).pending()) return;
  __shared__ Shared shared;
  const Row row(args, blockIdx.x, aligned);
  const Scanned scanned =
      scan(shared, row.workspace.counts()[threadIdx.x], row.workspace.masses()[threadIdx.x]);
  uint64_t token = 0;
  cut_and_draw(
      row, scanned.total_count, scanned.total_mass, true,
      [&](bool by_mass, uint64_t target) { return select(shared, row, scanned, by_mass, target); }, token);
  write(args, blockIdx.x, row, token);
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
  const auto on = cudaStream_t(stream);
  const int64_t slices = sample_slices(args.vocab);
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool aligned = can_load_vectors<T>(args);
    statistics_kernel<T, false><<<unsigned(rows * slices), kSliceThreads, 0, on>>>(args, aligned);
    sample_kernel<<<unsigned(rows), kThreads, 0, on>>>(args, aligned);
    if (!args.top_k && !args.top_p) return;
    const int64_t resident = 8 * device_properties().multiprocessors;
    const int64_t parts = std::min(slices, ceil_div(resident, rows));
    histogram_kernel<<<unsigned(rows * parts), kSliceThreads, 0, on>>>(args, aligned, int(parts));
    select_kernel<<<unsigned(rows), kThreads, 0, on>>>(args, aligned);
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
