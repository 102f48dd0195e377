// CUDA's and HIP's device functions for the emulation; included by emulation.h.
#pragma once

// --- warps ---

#define PELTON_SHUFFLE(name, argument, source)                                                           \
  template <class Mask, class T>                                                                         \
  T name##_sync(Mask mask, T value, argument, int width = 32) {                                          \
    const int group = ::pelton::emulation::width_of<Mask>(), lane = ::pelton::emulation::lane_of(group); \
    return ::pelton::emulation::shuffle(#name "_sync", ::pelton::emulation::bits_of(mask), group, value, \
                                        source);                                                         \
  }                                                                                                      \
  template <class T>                                                                                     \
  T name(T value, argument, int width = ::pelton::emulation::wave_size()) {                              \
    const int group = ::pelton::emulation::wave_size(), lane = ::pelton::emulation::lane_of(group);      \
    return ::pelton::emulation::shuffle(#name, ~uint64_t(0), group, value, source);                      \
  }
PELTON_SHUFFLE(__shfl, int from, ::pelton::emulation::source_index(lane, from, width))
PELTON_SHUFFLE(__shfl_up, unsigned delta, ::pelton::emulation::source_up(lane, int(delta), width))
PELTON_SHUFFLE(__shfl_down, unsigned delta, ::pelton::emulation::source_down(lane, int(delta), width))
PELTON_SHUFFLE(__shfl_xor, int bits, ::pelton::emulation::source_xor(lane, bits, width))
#undef PELTON_SHUFFLE

template <class Mask>
Mask __ballot_sync(Mask mask, int predicate) {
  using namespace pelton::emulation;
  return Mask(vote("__ballot_sync", bits_of(mask), width_of<Mask>(), predicate != 0));
}
template <class Mask>
int __any_sync(Mask mask, int predicate) {
  using namespace pelton::emulation;
  return vote("__any_sync", bits_of(mask), width_of<Mask>(), predicate != 0) != 0;
}
template <class Mask>
int __all_sync(Mask mask, int predicate) {
  using namespace pelton::emulation;
  return vote("__all_sync", bits_of(mask), width_of<Mask>(), predicate == 0) == 0;
}
inline unsigned long long __ballot(int predicate) {
  return pelton::emulation::vote("__ballot", ~uint64_t(0), pelton::emulation::wave_size(), predicate != 0);
}
inline int __any(int predicate) {
  return pelton::emulation::vote("__any", ~uint64_t(0), pelton::emulation::wave_size(), predicate != 0) != 0;
}
inline int __all(int predicate) {
  return pelton::emulation::vote("__all", ~uint64_t(0), pelton::emulation::wave_size(), predicate == 0) == 0;
}
inline unsigned __activemask() { return unsigned(pelton::emulation::live_lanes(32)); }
inline unsigned __lane_id() { return unsigned(pelton::emulation::lane_of(pelton::emulation::wave_size())); }

inline void __syncwarp(unsigned mask = 0xffffffffu) {
  pelton::emulation::meet({"__syncwarp", mask, 32, 0, 0, nullptr, -1, true}, nullptr, nullptr);
}

template <class T>
unsigned __match_any_sync(unsigned mask, T value) {
  using namespace pelton::emulation;
  const auto finish = [](Lanes& lanes) {
    for (int i = 0; i < 32; ++i) {
      unsigned same = 0;
      for (int k = 0; k < 32; ++k) {
        if (lanes.present >> k & 1 && lanes.input<T>(k) == lanes.input<T>(i)) same |= 1u << k;
      }
      lanes.output(i, same);
    }
  };
  unsigned result;
  meet({"__match_any_sync", mask, 32, sizeof(T), sizeof result, finish, 0, false}, &value, &result);
  return result;
}
template <class T>
unsigned __match_all_sync(unsigned mask, T value, int* predicate) {
  const unsigned same = __match_any_sync(mask, value);
  *predicate = same == (mask & unsigned(pelton::emulation::live_lanes(32)));
  return *predicate ? same : 0;
}

#define PELTON_REDUCE(name, expression)                                                               \
  template <class T>                                                                                  \
  T name(unsigned mask, T value) {                                                                    \
    return ::pelton::emulation::reduce(#name, mask, value, [](T a, T b) -> T { return expression; }); \
  }
PELTON_REDUCE(__reduce_add_sync, a + b)
PELTON_REDUCE(__reduce_min_sync, b < a ? b : a)
PELTON_REDUCE(__reduce_max_sync, a < b ? b : a)
PELTON_REDUCE(__reduce_and_sync, a& b)
PELTON_REDUCE(__reduce_or_sync, a | b)
PELTON_REDUCE(__reduce_xor_sync, a ^ b)
#undef PELTON_REDUCE

// --- memory ---

#define PELTON_ATOMIC(name, expression)                                                             \
  template <class T>                                                                                \
  T name(T* address, std::type_identity_t<T> value) {                                               \
    return ::pelton::emulation::atomic_update(address, [value](T old) -> T { return expression; }); \
  }
PELTON_ATOMIC(atomicAdd, T(old + value))
PELTON_ATOMIC(atomicSub, T(old - value))
PELTON_ATOMIC(atomicExch, value)
PELTON_ATOMIC(atomicMin, value < old ? value : old)
PELTON_ATOMIC(atomicMax, old < value ? value : old)
PELTON_ATOMIC(atomicAnd, old& value)
PELTON_ATOMIC(atomicOr, old | value)
PELTON_ATOMIC(atomicXor, old ^ value)
PELTON_ATOMIC(atomicInc, old >= value ? T(0) : T(old + 1))
PELTON_ATOMIC(atomicDec, old == 0 || old > value ? value : T(old - 1))
#undef PELTON_ATOMIC
template <class T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return pelton::emulation::atomic_update(address, [=](T old) { return old == expected ? value : old; });
}

inline void __threadfence() { pelton::emulation::fence(); }
inline void __threadfence_block() {}
inline void __threadfence_system() { pelton::emulation::fence(); }
inline void __nanosleep(unsigned) { pelton::emulation::yield(); }
[[noreturn]] inline void __trap() { pelton::emulation::fail("__trap() was called"); }

template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, T value) {
  *p = value;
}
template <class T>
void __stcg(T* p, T value) {
  *p = value;
}

// --- numbers ---

// The product is rounded, as on GPUs.
inline float __expf(float x) { return std::exp2(x * 1.4426950408889634f); }
inline float __exp2f(float x) { return std::exp2(x); }
inline float __exp10f(float x) { return std::pow(10.f, x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __saturatef(float x) { return x > 1 ? 1.f : x > 0 ? x : 0.f; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frsqrt_rn(float x) { return float(1 / std::sqrt(double(x))); }
inline float rsqrtf(float x) { return float(1 / std::sqrt(double(x))); }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }

template <class To, class From>
To pelton_bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  memcpy(&result, &value, sizeof result);
  return result;
}
inline unsigned __float_as_uint(float x) { return pelton_bits<unsigned>(x); }
inline int __float_as_int(float x) { return pelton_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return pelton_bits<float>(x); }
inline float __int_as_float(int x) { return pelton_bits<float>(x); }
inline long long __double_as_longlong(double x) { return pelton_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return pelton_bits<double>(x); }
inline int __float2int_rn(float x) { return int(std::nearbyint(x)); }
inline int __float2int_rz(float x) { return int(x); }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
inline unsigned __brev(unsigned x) {
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= (x >> i & 1) << (31 - i);
  return result;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline int __mulhi(int a, int b) { return int(int64_t(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned s = selector >> 4 * i & 0xf, byte = unsigned(bytes >> 8 * (s & 7) & 0xff);
    result |= (s & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
  }
  return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) >> (shift & 31));
}

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(a) < T(b) ? T(b) : T(a);
}
