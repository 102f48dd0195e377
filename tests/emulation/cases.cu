// Small kernels with one planted bug each, beside kernels that are right; tests/emulation loads them by name.
// Each takes an input, an output, and the number of their elements.
#include "../../kernels/common/mma.cuh"
#ifdef PELTON_EMULATION
#include "hopper_cases.cuh"
#endif

namespace pelton::gpu {
namespace {

struct Args {
  const float* in;
  float* out;
  int n;
};

// --- barriers and shared memory ---

__global__ void neighbour(const float* in, float* out, int n) {
  __shared__ float values[64];
  const int t = threadIdx.x;
  values[t] = in[t];
  __syncthreads();
  out[t] = values[(t + 1) % n];
}
__global__ void missing_barrier(const float* in, float* out, int n) {
  __shared__ float values[64];
  const int t = threadIdx.x;
  values[t] = in[t];
  out[t] = values[(t + 1) % n];
}
// The next round overwrites what a slower thread still reads.
__global__ void missing_second_barrier(const float* in, float* out, int n) {
  __shared__ float values[64];
  const int t = threadIdx.x;
  for (int round = 0; round < 2; ++round) {
    values[t] = in[t] + float(round);
    __syncthreads();
    out[t] = values[n - 1 - t];
  }
}
__global__ void early_return(const float* in, float* out, int n) {
  if (threadIdx.x == 3) return;
  __syncthreads();
  out[threadIdx.x] = in[threadIdx.x];
}
__global__ void barrier_in_a_branch(const float* in, float* out, int n) {
  if (threadIdx.x < 32) {
    __syncthreads();
    out[threadIdx.x] = in[threadIdx.x];
  } else {
    out[threadIdx.x] = -in[threadIdx.x];
    __syncthreads();
  }
}
__global__ void uninitialised_static(const float* in, float* out, int n) {
  __shared__ float values[64];
  if (threadIdx.x < 63) values[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = values[threadIdx.x];
}
__global__ void uninitialised_dynamic(const float* in, float* out, int n) {
  out[threadIdx.x] = dynamic_shared<float>()[threadIdx.x];
}
// The block before has written it, this one has not.
__global__ void uninitialised_in_the_second_block(const float* in, float* out, int n) {
  __shared__ float value;
  if (blockIdx.x == 0 && threadIdx.x == 0) value = in[0];
  __syncthreads();
  if (threadIdx.x == 0) out[blockIdx.x] = value;
}
__global__ void past_static(const float* in, float* out, int n) {
  __shared__ float values[64];
  values[threadIdx.x + 1] = in[threadIdx.x];
}
__global__ void past_dynamic(const float* in, float* out, int n) {
  dynamic_shared<float>()[threadIdx.x + 1] = in[threadIdx.x];
}
__global__ void before_dynamic(const float* in, float* out, int n) {
  dynamic_shared<float>()[int(threadIdx.x) - 1] = in[threadIdx.x];
}
__global__ void far_past_dynamic(const float* in, float* out, int n) {
  dynamic_shared<float>()[threadIdx.x + 100000] = in[threadIdx.x];
}
__global__ void dynamic_in_order(const float* in, float* out, int n) {
  float* values = dynamic_shared<float>();
  values[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = values[n - 1 - int(threadIdx.x)];
}
__global__ void histogram(const float* in, float* out, int n) {
  __shared__ unsigned counts[8];
  if (threadIdx.x < 8) counts[threadIdx.x] = 0;
  __syncthreads();
  atomicAdd(&counts[int(in[threadIdx.x]) & 7], 1u);
  __syncthreads();
  if (threadIdx.x < 8) out[threadIdx.x] = float(counts[threadIdx.x]);
}
__global__ void histogram_read_too_early(const float* in, float* out, int n) {
  __shared__ unsigned counts[8];
  if (threadIdx.x < 8) counts[threadIdx.x] = 0;
  __syncthreads();
  atomicAdd(&counts[int(in[threadIdx.x]) & 7], 1u);
  if (threadIdx.x < 8) out[threadIdx.x] = float(counts[threadIdx.x]);
}
__global__ void counting_barriers(const float* in, float* out, int n) {
  const bool positive = in[threadIdx.x] > 0;
  const int count = __syncthreads_count(positive);
  const int any = __syncthreads_or(positive), all = __syncthreads_and(positive);
  out[threadIdx.x] = float(count + 1000 * (any != 0) + 10000 * (all != 0));
}

// --- warps ---

__global__ void sum_of_a_warp(const float* in, float* out, int n) {
  out[threadIdx.x] = warp_sum(in[threadIdx.x]);
}
__global__ void wrong_tree(const float* in, float* out, int n) {
  float v = in[threadIdx.x];
  for (int mask = 16; mask > 1; mask /= 2) v += shuffle_xor(v, mask);
  out[threadIdx.x] = v;
}
// The second warp has 16 lanes: a sum over 32 reads lanes that do not exist.
__global__ void tree_over_missing_lanes(const float* in, float* out, int n) {
  out[threadIdx.x] = warp_sum(in[threadIdx.x]);
}
__global__ void divergent_shuffle(const float* in, float* out, int n) {
  float v = in[threadIdx.x];
  if (threadIdx.x % 32 < 16) v = shuffle_xor(v, 1);
  __syncthreads();
  out[threadIdx.x] = v;
}
__global__ void two_operations(const float* in, float* out, int n) {
  float v = in[threadIdx.x];
  if (threadIdx.x % 2 == 0) {
    v = shuffle_xor(v, 2);
  } else {
    v = float(__ballot_sync(kAllLanes, v > 0));
  }
  out[threadIdx.x] = v;
}
__global__ void inactive_lane(const float* in, float* out, int n) {
  float v = in[threadIdx.x];
  if (threadIdx.x < 16) v = __shfl_sync(0xffffu, v, 20);
  out[threadIdx.x] = v;
}
__global__ void lane_that_returned(const float* in, float* out, int n) {
  if (threadIdx.x == 7) return;
  out[threadIdx.x] = __shfl_sync(kAllLanes, in[threadIdx.x], 7);
}
__global__ void mask_without_itself(const float* in, float* out, int n) {
  out[threadIdx.x] = __shfl_sync(0xfffffffeu, in[threadIdx.x], 1);
}
__global__ void halves_apart(const float* in, float* out, int n) {
  float v = in[threadIdx.x];
  const unsigned half = threadIdx.x < 16 ? 0xffffu : 0xffff0000u;
  for (int i = 0; i < (threadIdx.x < 16 ? 1 : 3); ++i) v = __shfl_xor_sync(half, v, 1);
  out[threadIdx.x] = v;
}
__global__ void exchange_through_shared(const float* in, float* out, int n) {
  __shared__ float values[64];
  values[threadIdx.x] = in[threadIdx.x];
  __syncwarp();
  out[threadIdx.x] = values[threadIdx.x ^ 1];
  __syncwarp();
  values[threadIdx.x ^ 1] = 0;
}
__global__ void exchange_without_syncwarp(const float* in, float* out, int n) {
  __shared__ float values[64];
  values[threadIdx.x] = in[threadIdx.x];
  shuffle_xor(0, 1);  // orders no memory
  out[threadIdx.x] = values[threadIdx.x ^ 1];
}
__global__ void syncwarp_for_two_warps(const float* in, float* out, int n) {
  __shared__ float values[64];
  values[threadIdx.x] = in[threadIdx.x];
  __syncwarp();
  out[threadIdx.x] = values[threadIdx.x ^ 32];
}
__global__ void votes(const float* in, float* out, int n) {
  const int t = threadIdx.x;
  const bool positive = in[t] > 0;
  const unsigned ballot = __ballot_sync(kAllLanes, positive);
  const unsigned same = __match_any_sync(kAllLanes, int(in[t]));
  const int sum = __reduce_add_sync(kAllLanes, t), most = __reduce_max_sync(kAllLanes, t);
  const float up = __shfl_up_sync(kAllLanes, in[t], 3), down = __shfl_down_sync(kAllLanes, in[t], 3, 8);
  float* mine = out + 8 * t;
  mine[0] = float(ballot & 0xffffu);
  mine[1] = float(ballot >> 16);
  mine[2] = float(__popc(same));
  mine[3] = float(sum);
  mine[4] = float(most);
  mine[5] = up;
  mine[6] = down;
  mine[7] = float(__any_sync(kAllLanes, positive) + 2 * __all_sync(kAllLanes, positive));
}

// --- asynchronous copies ---

__global__ void copied(const float* in, float* out, int n) {
  __shared__ __align__(16) float values[64];
  const int t = threadIdx.x;
  copy_async16(values + 4 * t, in + 4 * t, t != 3);
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
  for (int i = 0; i < 4; ++i) out[i * 16 + t] = values[i * 16 + t];
}
__global__ void read_before_wait(const float* in, float* out, int n) {
  __shared__ __align__(16) float values[64];
  const int t = threadIdx.x;
  copy_async16(values + 4 * t, in + 4 * t);
  copy_async_commit();
  __syncthreads();
  for (int i = 0; i < 4; ++i) out[i * 16 + t] = values[i * 16 + t];
}
// Waits for all groups but one, and reads that one.
__global__ void waits_for_the_wrong_group(const float* in, float* out, int n) {
  __shared__ __align__(16) float values[64];
  const int t = threadIdx.x;
  for (int i = 0; i < 2; ++i) {
    if (t / 8 == i) copy_async16(values + 4 * t, in + 4 * t);
    copy_async_commit();
  }
  copy_async_wait<1>();
  __syncthreads();
  for (int i = 0; i < 4; ++i) out[i * 16 + t] = values[i * 16 + t];
}
__global__ void waits_without_a_barrier(const float* in, float* out, int n) {
  __shared__ __align__(16) float values[64];
  const int t = threadIdx.x;
  copy_async16(values + 4 * t, in + 4 * t);
  copy_async_commit();
  copy_async_wait<0>();
  for (int i = 0; i < 4; ++i) out[i * 16 + t] = values[i * 16 + t];
}
__global__ void copies_into_what_is_read(const float* in, float* out, int n) {
  __shared__ __align__(16) float values[64];
  const int t = threadIdx.x;
  for (int round = 0; round < 2; ++round) {
    copy_async16(values + 4 * t, in + 4 * t);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    for (int i = 0; i < 4; ++i) out[i * 16 + t] = values[i * 16 + t];
  }
}

// --- global memory ---

__global__ void doubled(const float* in, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = 2 * in[i];
}
__global__ void reads_past(const float* in, float* out, int n) { out[threadIdx.x] = in[threadIdx.x + 1]; }
__global__ void reads_before(const float* in, float* out, int n) {
  out[threadIdx.x] = in[int(threadIdx.x) - 1];
}
__global__ void writes_past(const float* in, float* out, int n) { out[threadIdx.x + 1] = in[threadIdx.x]; }
__global__ void writes_before(const float* in, float* out, int n) {
  out[int(threadIdx.x) - 1] = in[threadIdx.x];
}
__global__ void misaligned(const float* in, float* out, int n) {
  const auto v = load_vector<float, 4>(in + threadIdx.x);
  out[threadIdx.x] = v[0] + v[3];
}
__global__ void null_pointer(const float* in, float* out, int n) {
  out[threadIdx.x] = *static_cast<const float*>(n > 0 ? nullptr : in);
}
__global__ void division_by_zero(const float* in, float* out, int n) {
  out[threadIdx.x] = float(100 / (n - int(blockDim.x)));
}
__global__ void others_local_variable(const float* in, float* out, int n) {
  __shared__ volatile float* pointer;
  volatile float local = in[threadIdx.x];
  if (threadIdx.x == 0) pointer = &local;
  __syncthreads();
  out[threadIdx.x] = *const_cast<const float*>(pointer) + local;
  __syncthreads();
}
__global__ void everybody_writes_one(const float* in, float* out, int n) { out[0] = in[threadIdx.x]; }
__global__ void blocks_write_one(const float* in, float* out, int n) {
  if (threadIdx.x == 0) out[0] = in[blockIdx.x];
}
__global__ void block_reads_the_one_before(const float* in, float* out, int n) {
  if (threadIdx.x > 0) return;
  out[blockIdx.x] = in[blockIdx.x] + (blockIdx.x > 0 ? out[blockIdx.x - 1] : 0);
}
// Not a race, but the sum of floats depends on which block comes first.
__global__ void sum_by_atomics(const float* in, float* out, int n) { atomicAdd(out, in[blockIdx.x]); }

// The block that comes last adds up what all have written: out[0], after out[1 ...] and a counter at the end.
template <bool Fence>
__device__ void last_block_adds(const float* in, float* out) {
  unsigned* counter = reinterpret_cast<unsigned*>(out + 1 + gridDim.x);
  out[1 + blockIdx.x] = in[blockIdx.x];
  if (Fence) __threadfence();
  if (atomicAdd(counter, 1u) != gridDim.x - 1) return;
  float sum = 0;
  for (unsigned i = 0; i < gridDim.x; ++i) sum += out[1 + i];
  out[0] = sum;
}
__global__ void last_block(const float* in, float* out, int n) { last_block_adds<true>(in, out); }
__global__ void last_block_without_fence(const float* in, float* out, int n) {
  last_block_adds<false>(in, out);
}
__global__ void waits_for_a_later_block(const float* in, float* out, int n) {
  if (blockIdx.x == 0) {
    while (atomicAdd(out, 0.f) == 0) {
    }
  } else {
    atomicAdd(out, 1.f);
  }
}
__global__ void nothing(const float* in, float* out, int n) {}

// --- matrices ---

// in: A [16, 16], B [16, 8], C [16, 8] as fp32; out: D [16, 8].
template <class T, bool WrongFragment>
__device__ void multiply(const float* in, float* out) {
  const int lane = threadIdx.x, group = lane / 4, pair = lane % 4;
  const float *a = in, *b = in + 256, *c = b + 128;
  const auto at_a = [&](int row, int column) {
    return pack2<T>(a[16 * row + column], a[16 * row + column + 1]);
  };
  const auto at_b = [&](int row, int column) {
    return pack2<T>(b[8 * row + column], b[8 * (row + 1) + column]);
  };
  uint32_t fragment_a[4] = {at_a(group, 2 * pair), at_a(group + 8, 2 * pair), at_a(group, 2 * pair + 8),
                            at_a(group + 8, 2 * pair + 8)};
  if (WrongFragment) {  // the second and third register exchanged: an easy mistake
    const uint32_t second = fragment_a[1];
    fragment_a[1] = fragment_a[2];
    fragment_a[2] = second;
  }
  const uint32_t fragment_b[2] = {at_b(2 * pair, group), at_b(2 * pair + 8, group)};
  float d[4];
  for (int i = 0; i < 4; ++i) d[i] = c[8 * (group + 8 * (i / 2)) + 2 * pair + i % 2];
  mma_m16n8k16<T>(d, fragment_a, fragment_b);
  for (int i = 0; i < 4; ++i) out[8 * (group + 8 * (i / 2)) + 2 * pair + i % 2] = d[i];
}
__global__ void mma_f16(const float* in, float* out, int n) { multiply<f16, false>(in, out); }
__global__ void mma_bf16(const float* in, float* out, int n) { multiply<bf16, false>(in, out); }
__global__ void mma_wrong_fragment(const float* in, float* out, int n) { multiply<f16, true>(in, out); }
__global__ void mma_by_some_lanes(const float* in, float* out, int n) {
  if (threadIdx.x < 31) multiply<f16, false>(in, out);
}

// The same product, its fragments read by ldmatrix: A as it lies, B transposed.
__global__ void mma_through_shared(const float* in, float* out, int n) {
  __shared__ __align__(16) f16 a[16][16], b[16][8];
  const int lane = threadIdx.x;
  for (int i = lane; i < 256; i += 32) a[i / 16][i % 16] = from_float<f16>(in[i]);
  for (int i = lane; i < 128; i += 32) b[i / 8][i % 8] = from_float<f16>(in[256 + i]);
  __syncthreads();
  uint32_t fragment_a[4], both[4];
  load_matrix_x4<false>(fragment_a, &a[lane % 16][lane / 16 * 8]);
  load_matrix_x4<true>(both, &b[lane % 16][0]);
  const uint32_t fragment_b[2] = {both[0], both[1]};
  float d[4];
  const int group = lane / 4, pair = lane % 4;
  for (int i = 0; i < 4; ++i) d[i] = in[384 + 8 * (group + 8 * (i / 2)) + 2 * pair + i % 2];
  mma_m16n8k16<f16>(d, fragment_a, fragment_b);
  for (int i = 0; i < 4; ++i) out[8 * (group + 8 * (i / 2)) + 2 * pair + i % 2] = d[i];
}
__global__ void ldmatrix_misaligned(const float* in, float* out, int n) {
  __shared__ __align__(16) f16 a[512];
  for (int i = threadIdx.x; i < 512; i += 32) a[i] = from_float<f16>(in[i]);
  __syncthreads();
  uint32_t r[4];
  load_matrix_x4<false>(r, a + 9 * threadIdx.x);
  out[threadIdx.x] = float(r[0]);
}

#ifdef PELTON_EMULATION
// in: A [Size, depth], B [depth, Size], C [Size, Size]; out: D. AMD's tables give an element's lane and
// place.
template <int Size, class T>
__device__ void multiply_mfma(const float* in, float* out) {
  constexpr int kDepth = Size == 16 ? 16 : 8;
  const float *a = in, *b = a + Size * kDepth, *c = b + kDepth * Size;
  uint16_t fragment_a[4], fragment_b[4];
  float d[Size * Size / 64];
  const auto own = [](int lane) { return lane == int(threadIdx.x); };
  for (int i = 0; i < Size; ++i) {
    for (int k = 0; k < kDepth; ++k) {
      if (!own(i + Size * (k / 4))) continue;
      fragment_a[k % 4] = from_float<T>(a[i * kDepth + k]).bits;
      fragment_b[k % 4] = from_float<T>(b[k * Size + i]).bits;
    }
  }
  const auto each_sum = [&](auto f) {
    for (int i = 0; i < Size; ++i) {
      for (int j = 0; j < Size; ++j) {
        const int lane = Size == 16 ? j + 16 * (i / 4) : j + 32 * (i / 4 % 2);
        if (own(lane)) f(i * Size + j, Size == 16 ? i % 4 : 4 * (i / 8) + i % 4);
      }
    }
  };
  each_sum([&](int at, int item) { d[item] = c[at]; });
  emulation::mfma<Size, T::is_bf16>(d, fragment_a, fragment_b);
  each_sum([&](int at, int item) { out[at] = d[item]; });
}
__global__ void mfma_16_f16(const float* in, float* out, int n) { multiply_mfma<16, f16>(in, out); }
__global__ void mfma_16_bf16(const float* in, float* out, int n) { multiply_mfma<16, bf16>(in, out); }
__global__ void mfma_32_f16(const float* in, float* out, int n) { multiply_mfma<32, f16>(in, out); }
__global__ void mfma_32_bf16(const float* in, float* out, int n) { multiply_mfma<32, bf16>(in, out); }

// Lanes 16 to 31 bring the same rows and columns as lanes 0 to 15, unless Different.
template <class T, bool Different>
__device__ void multiply_wmma(const float* in, float* out) {
  const float *a = in, *b = a + 256, *c = b + 256;
  const int lane = threadIdx.x, line = Different ? lane % 16 ^ lane / 16 : lane % 16;
  uint16_t fragment_a[16], fragment_b[16];
  float d[8];
  for (int k = 0; k < 16; ++k) {
    fragment_a[k] = from_float<T>(a[16 * line + k]).bits;
    fragment_b[k] = from_float<T>(b[16 * k + line]).bits;
  }
  for (int i = 0; i < 8; ++i) d[i] = c[16 * (2 * i + lane / 16) + lane % 16];
  emulation::wmma<T::is_bf16>(d, fragment_a, fragment_b);
  for (int i = 0; i < 8; ++i) out[16 * (2 * i + lane / 16) + lane % 16] = d[i];
}
__global__ void wmma_f16(const float* in, float* out, int n) { multiply_wmma<f16, false>(in, out); }
__global__ void wmma_bf16(const float* in, float* out, int n) { multiply_wmma<bf16, false>(in, out); }
__global__ void wmma_different_halves(const float* in, float* out, int n) {
  multiply_wmma<f16, true>(in, out);
}

// x1 and x2: out[lane] is what the lane has of the matrices, as two numbers.
template <int Count, bool Transposed>
__device__ void read_matrices(const float* in, float* out) {
  __shared__ __align__(16) f16 a[16][8];
  for (int i = threadIdx.x; i < 128; i += 32) a[i / 8][i % 8] = from_float<f16>(in[i]);
  __syncthreads();
  uint32_t r[Count];
  emulation::load_matrix<Count, Transposed>(r, &a[threadIdx.x % 16][0]);
  for (int m = 0; m < Count; ++m) {
    out[(m * 32 + threadIdx.x) * 2] = to_float(f16{uint16_t(r[m])});
    out[(m * 32 + threadIdx.x) * 2 + 1] = to_float(f16{uint16_t(r[m] >> 16)});
  }
}
__global__ void ldmatrix_x1(const float* in, float* out, int n) { read_matrices<1, false>(in, out); }
__global__ void ldmatrix_x1_transposed(const float* in, float* out, int n) {
  read_matrices<1, true>(in, out);
}
__global__ void ldmatrix_x2(const float* in, float* out, int n) { read_matrices<2, false>(in, out); }
__global__ void ldmatrix_x2_transposed(const float* in, float* out, int n) {
  read_matrices<2, true>(in, out);
}

// What AMD's own names give on a wave.
__global__ void wave(const float* in, float* out, int n) {
  const unsigned long long ballot = __ballot(in[threadIdx.x] > 0);
  float* mine = out + 4 * threadIdx.x;
  mine[0] = float(warpSize);
  mine[1] = float(__popcll(ballot));
  mine[2] = __shfl(in[threadIdx.x], warpSize - 1);
  mine[3] = __shfl_xor(in[threadIdx.x], 1, 32);
}
#endif

// --- numbers ---

template <bool Fast>
__global__ void exponentials(const float* in, float* out, int n) {
  if (int(threadIdx.x) < n) out[threadIdx.x] = exponential<Fast>(in[threadIdx.x]);
}

#ifdef PELTON_EMULATION
void start_boxes(Args a) {
  uint16_t numbers[5 * 72];  // the launch runs the kernel to its end
  for (int i = 0; i < 5 * 72; ++i) numbers[i] = uint16_t(a.in[i]);
  alignas(16) static uint16_t tensor[5 * 72];
  memcpy(tensor, numbers, sizeof tensor);
  CUtensorMap map;
  if (encode_map<3>(map, false, tensor, {72, 5, 1}, {144, 720}, {64, 4, 1}) != 0) return;
  boxes<<<1, 64, 2048>>>(map, a.out);
}
template <class T, bool kRegisters, bool kRowsOfN, Group kGroup = Group::right>
void start_product(Args a) {
  warpgroup_product<T, kRegisters, kRowsOfN, kGroup><<<1, 128, 16384>>>(a.in, a.out, a.n);
}
#endif

struct Case {
  const char* name;
  void (*launch)(Args);
};

constexpr int kBytes = 64 * sizeof(float);  // of dynamic shared memory
// clang-format off
const Case kCases[] = {
    {"neighbour", [](Args a) { neighbour<<<1, 64>>>(a.in, a.out, a.n); }},
    {"missing_barrier", [](Args a) { missing_barrier<<<1, 64>>>(a.in, a.out, a.n); }},
    {"missing_second_barrier", [](Args a) { missing_second_barrier<<<1, 64>>>(a.in, a.out, a.n); }},
    {"early_return", [](Args a) { early_return<<<1, 64>>>(a.in, a.out, a.n); }},
    {"barrier_in_a_branch", [](Args a) { barrier_in_a_branch<<<1, 64>>>(a.in, a.out, a.n); }},
    {"uninitialised_static", [](Args a) { uninitialised_static<<<1, 64>>>(a.in, a.out, a.n); }},
    {"uninitialised_dynamic", [](Args a) { uninitialised_dynamic<<<1, 64, kBytes>>>(a.in, a.out, a.n); }},
    {"uninitialised_in_the_second_block", [](Args a) { uninitialised_in_the_second_block<<<2, 64>>>(a.in, a.out, a.n); }},
    {"past_static", [](Args a) { past_static<<<1, 64>>>(a.in, a.out, a.n); }},
    {"past_dynamic", [](Args a) { past_dynamic<<<1, 64, kBytes>>>(a.in, a.out, a.n); }},
    {"before_dynamic", [](Args a) { before_dynamic<<<1, 64, kBytes>>>(a.in, a.out, a.n); }},
    {"far_past_dynamic", [](Args a) { far_past_dynamic<<<1, 64, kBytes>>>(a.in, a.out, a.n); }},
    {"dynamic_in_order", [](Args a) { dynamic_in_order<<<1, 64, kBytes>>>(a.in, a.out, a.n); }},
    {"histogram", [](Args a) { histogram<<<1, 64>>>(a.in, a.out, a.n); }},
    {"histogram_read_too_early", [](Args a) { histogram_read_too_early<<<1, 64>>>(a.in, a.out, a.n); }},
    {"counting_barriers", [](Args a) { counting_barriers<<<1, 64>>>(a.in, a.out, a.n); }},
    {"sum_of_a_warp", [](Args a) { sum_of_a_warp<<<1, 64>>>(a.in, a.out, a.n); }},
    {"wrong_tree", [](Args a) { wrong_tree<<<1, 64>>>(a.in, a.out, a.n); }},
    {"tree_over_missing_lanes", [](Args a) { tree_over_missing_lanes<<<1, 48>>>(a.in, a.out, a.n); }},
    {"divergent_shuffle", [](Args a) { divergent_shuffle<<<1, 64>>>(a.in, a.out, a.n); }},
    {"two_operations", [](Args a) { two_operations<<<1, 32>>>(a.in, a.out, a.n); }},
    {"inactive_lane", [](Args a) { inactive_lane<<<1, 32>>>(a.in, a.out, a.n); }},
    {"lane_that_returned", [](Args a) { lane_that_returned<<<1, 32>>>(a.in, a.out, a.n); }},
    {"mask_without_itself", [](Args a) { mask_without_itself<<<1, 32>>>(a.in, a.out, a.n); }},
    {"halves_apart", [](Args a) { halves_apart<<<1, 32>>>(a.in, a.out, a.n); }},
    {"exchange_through_shared", [](Args a) { exchange_through_shared<<<1, 64>>>(a.in, a.out, a.n); }},
    {"exchange_without_syncwarp", [](Args a) { exchange_without_syncwarp<<<1, 64>>>(a.in, a.out, a.n); }},
    {"syncwarp_for_two_warps", [](Args a) { syncwarp_for_two_warps<<<1, 64>>>(a.in, a.out, a.n); }},
    {"votes", [](Args a) { votes<<<1, 32>>>(a.in, a.out, a.n); }},
    {"copied", [](Args a) { copied<<<1, 16>>>(a.in, a.out, a.n); }},
    {"read_before_wait", [](Args a) { read_before_wait<<<1, 16>>>(a.in, a.out, a.n); }},
    {"waits_for_the_wrong_group", [](Args a) { waits_for_the_wrong_group<<<1, 16>>>(a.in, a.out, a.n); }},
    {"waits_without_a_barrier", [](Args a) { waits_without_a_barrier<<<1, 16>>>(a.in, a.out, a.n); }},
    {"copies_into_what_is_read", [](Args a) { copies_into_what_is_read<<<1, 16>>>(a.in, a.out, a.n); }},
    {"doubled", [](Args a) { doubled<<<dim3(2, 1, 1), 64>>>(a.in, a.out, a.n); }},
    {"reads_past", [](Args a) { reads_past<<<1, 64>>>(a.in, a.out, a.n); }},
    {"reads_before", [](Args a) { reads_before<<<1, 64>>>(a.in, a.out, a.n); }},
    {"writes_past", [](Args a) { writes_past<<<1, 64>>>(a.in, a.out, a.n); }},
    {"writes_before", [](Args a) { writes_before<<<1, 64>>>(a.in, a.out, a.n); }},
    {"misaligned", [](Args a) { misaligned<<<1, 8>>>(a.in, a.out, a.n); }},
    {"null_pointer", [](Args a) { null_pointer<<<1, 32>>>(a.in, a.out, a.n); }},
    {"division_by_zero", [](Args a) { division_by_zero<<<1, 64>>>(a.in, a.out, a.n); }},
    {"others_local_variable", [](Args a) { others_local_variable<<<1, 64>>>(a.in, a.out, a.n); }},
    {"everybody_writes_one", [](Args a) { everybody_writes_one<<<1, 64>>>(a.in, a.out, a.n); }},
    {"blocks_write_one", [](Args a) { blocks_write_one<<<2, 32>>>(a.in, a.out, a.n); }},
    {"block_reads_the_one_before", [](Args a) { block_reads_the_one_before<<<4, 32>>>(a.in, a.out, a.n); }},
    {"sum_by_atomics", [](Args a) { sum_by_atomics<<<64, 1>>>(a.in, a.out, a.n); }},
    {"last_block", [](Args a) { last_block<<<4, 1>>>(a.in, a.out, a.n); }},
    {"last_block_without_fence", [](Args a) { last_block_without_fence<<<4, 1>>>(a.in, a.out, a.n); }},
    {"waits_for_a_later_block", [](Args a) { waits_for_a_later_block<<<2, 1>>>(a.in, a.out, a.n); }},
    {"too_many_threads", [](Args a) { nothing<<<1, dim3(32, 33)>>>(a.in, a.out, a.n); }},
    {"no_block", [](Args a) { nothing<<<dim3(1, 0), 32>>>(a.in, a.out, a.n); }},
    {"too_many_blocks", [](Args a) { nothing<<<dim3(1, 65536), 32>>>(a.in, a.out, a.n); }},
    {"too_much_shared", [](Args a) { nothing<<<1, 32, 50000>>>(a.in, a.out, a.n); }},
    {"exponentials", [](Args a) { exponentials<false><<<1, 1024>>>(a.in, a.out, a.n); }},
    {"exponentials_fast", [](Args a) { exponentials<true><<<1, 1024>>>(a.in, a.out, a.n); }},
    {"mma_f16", [](Args a) { mma_f16<<<1, 32>>>(a.in, a.out, a.n); }},
    {"mma_bf16", [](Args a) { mma_bf16<<<1, 32>>>(a.in, a.out, a.n); }},
    {"mma_wrong_fragment", [](Args a) { mma_wrong_fragment<<<1, 32>>>(a.in, a.out, a.n); }},
    {"mma_by_some_lanes", [](Args a) { mma_by_some_lanes<<<1, 32>>>(a.in, a.out, a.n); }},
    {"mma_through_shared", [](Args a) { mma_through_shared<<<1, 32>>>(a.in, a.out, a.n); }},
    {"ldmatrix_misaligned", [](Args a) { ldmatrix_misaligned<<<1, 32>>>(a.in, a.out, a.n); }},
#ifdef PELTON_EMULATION
    {"mfma_16_f16", [](Args a) { mfma_16_f16<<<1, 64>>>(a.in, a.out, a.n); }},
    {"mfma_16_bf16", [](Args a) { mfma_16_bf16<<<1, 64>>>(a.in, a.out, a.n); }},
    {"mfma_32_f16", [](Args a) { mfma_32_f16<<<1, 64>>>(a.in, a.out, a.n); }},
    {"mfma_32_bf16", [](Args a) { mfma_32_bf16<<<1, 64>>>(a.in, a.out, a.n); }},
    {"wmma_f16", [](Args a) { wmma_f16<<<1, 32>>>(a.in, a.out, a.n); }},
    {"wmma_bf16", [](Args a) { wmma_bf16<<<1, 32>>>(a.in, a.out, a.n); }},
    {"wmma_different_halves", [](Args a) { wmma_different_halves<<<1, 32>>>(a.in, a.out, a.n); }},
    {"ldmatrix_x1", [](Args a) { ldmatrix_x1<<<1, 32>>>(a.in, a.out, a.n); }},
    {"ldmatrix_x1_transposed", [](Args a) { ldmatrix_x1_transposed<<<1, 32>>>(a.in, a.out, a.n); }},
    {"ldmatrix_x2", [](Args a) { ldmatrix_x2<<<1, 32>>>(a.in, a.out, a.n); }},
    {"ldmatrix_x2_transposed", [](Args a) { ldmatrix_x2_transposed<<<1, 32>>>(a.in, a.out, a.n); }},
    {"copied_in_bulk", [](Args a) { copied_in_bulk<Bulk::right><<<1, 96>>>(a.in, a.out, a.n); }},
    {"bulk_without_wait", [](Args a) { copied_in_bulk<Bulk::no_wait><<<1, 96>>>(a.in, a.out, a.n); }},
    {"bulk_without_release", [](Args a) { copied_in_bulk<Bulk::no_release><<<1, 96>>>(a.in, a.out, a.n); }},
    {"bulk_without_syncwarp", [](Args a) { copied_in_bulk<Bulk::no_syncwarp><<<1, 96>>>(a.in, a.out, a.n); }},
    {"bulk_with_too_few_bytes", [](Args a) { copied_in_bulk<Bulk::too_few_bytes><<<1, 96>>>(a.in, a.out, a.n); }},
    {"bulk_with_too_many_arrivals", [](Args a) { copied_in_bulk<Bulk::too_many_arrivals><<<1, 96>>>(a.in, a.out, a.n); }},
    {"bulk_not_initialised", [](Args a) { copied_in_bulk<Bulk::not_initialised><<<1, 96>>>(a.in, a.out, a.n); }},
    {"boxes", start_boxes},
    {"named_barriers", [](Args a) { named_barriers<true><<<1, 96>>>(a.in, a.out, a.n); }},
    {"named_barrier_with_too_few", [](Args a) { named_barriers<false><<<1, 96>>>(a.in, a.out, a.n); }},
    {"wgmma_shared_f16", start_product<f16, false, false>},
    {"wgmma_shared_bf16", start_product<bf16, false, false>},
    {"wgmma_registers_f16", start_product<f16, true, false>},
    {"wgmma_registers_rows_of_n_bf16", start_product<bf16, true, true>},
    {"wgmma_without_fence", start_product<f16, true, false, Group::no_fence>},
    {"wgmma_without_wait", start_product<f16, true, false, Group::no_wait>},
    {"wgmma_without_commit", start_product<f16, true, false, Group::no_commit>},
    {"wave", [](Args a) { wave<<<1, 64>>>(a.in, a.out, a.n); }},
#endif
};
// clang-format on

}  // namespace
}  // namespace pelton::gpu

#define EXPORT extern "C" __attribute__((visibility("default")))

// Runs the case of this name. Null when nothing was wrong, else the error.
EXPORT const char* run_case(const char* name, const float* in, float* out, int n) {
  for (const auto& c : pelton::gpu::kCases) {
    if (strcmp(c.name, name) != 0) continue;
    c.launch({in, out, n});
    const int error = pelton::gpu::launch_result();
    return error == 0 ? nullptr : cudaGetErrorString(cudaError_t(error));
  }
  return "there is no such case";
}
