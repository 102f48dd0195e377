// Matrix tiles of bfloat16 (AMX-BF16), for libraries of the AVX-512 level. Instructions stand here by name,
// because the compiler does not know them at this level; whoever uses them has asked amx_usable. Method:
// Intel, Architecture Instruction Set Extensions Programming Reference, chapter 3.
#pragma once
#include "tile.h"

#if defined(PELTON_AVX512)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace pelton::inline PELTON_SIMD {

// Rows and bytes of a row of a tile; a product of tiles is over kTileDepth elements.
constexpr int kTileHeight = 16, kTileRowBytes = 64, kTileDepth = 32;

// For tests of the ways without it.
inline bool amx_allowed = true;

// Whether the CPU has tiles of bfloat16, the system saves them, and it lets this process use them.
inline bool amx_usable() {
  static const bool usable = [] {
    unsigned a, b, c, d;
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kTileState = 0b11u << 17;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kBf16) == 0 || (d & kTile) == 0) return false;
    unsigned saved, high;
    asm volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if ((saved & kTileState) != kTileState) return false;
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, since Linux 5.16
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return usable && amx_allowed;
}

// While it lives, the thread's eight tiles have their full size; afterwards the system need not save them.
class Tiles {
 public:
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) {
      config.row_bytes[i] = kTileRowBytes;
      config.rows[i] = kTileHeight;
    }
    asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
  }
  ~Tiles() { asm volatile("tilerelease" ::: "memory"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// c [16 * MT][32] (+)= a [16 * MT][32 * steps] * b, MT of 1 or 2, all sums in tiles. `a_stride` in elements;
// b lies [16 * steps pairs of k][32 columns][2], and c in rows of 32.
template <int MT>
inline void multiply_tiles(const bf16* a, int64_t a_stride, const bf16* b, int64_t steps, float* c,
                           bool accumulate, Ahead ahead = {}) {
  constexpr int64_t kRow = 32 * 4;  // bytes of a row of b and of c
  const int64_t a_row = a_stride * 2;
  float* lower = c + kTileHeight * 32;
  const bf16* a_lower = a + kTileHeight * a_stride;
  if (accumulate) {
    asm volatile(
        "tileloadd (%0,%1,1), %%tmm0\n"
        "tileloadd 64(%0,%1,1), %%tmm1" ::"r"(c),
        "r"(kRow)
        : "memory");
    if constexpr (MT == 2)
      asm volatile(
          "tileloadd (%0,%1,1), %%tmm2\n"
          "tileloadd 64(%0,%1,1), %%tmm3" ::"r"(lower),
          "r"(kRow)
          : "memory");
  } else {
    asm volatile("tilezero %%tmm0\ntilezero %%tmm1\ntilezero %%tmm2\ntilezero %%tmm3" ::: "memory");
  }
  for (int64_t s = 0; s < steps; ++s, a += kTileDepth, a_lower += kTileDepth, b += kTileDepth * 32) {
    for (int64_t i = 0; i < ahead.step; i += 64) _mm_prefetch(ahead.first + s * ahead.step + i, _MM_HINT_T1);
    asm volatile(
        "tileloadd (%0,%1,1), %%tmm6\n"
        "tileloadd 64(%0,%1,1), %%tmm7\n"
        "tileloadd (%2,%3,1), %%tmm4\n"
        "tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n"
        "tdpbf16ps %%tmm7, %%tmm4, %%tmm1" ::"r"(b),
        "r"(kRow), "r"(a), "r"(a_row)
        : "memory");
    if constexpr (MT == 2)
      asm volatile(
          "tileloadd (%0,%1,1), %%tmm5\n"
          "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n"
          "tdpbf16ps %%tmm7, %%tmm5, %%tmm3" ::"r"(a_lower),
          "r"(a_row)
          : "memory");
  }
  asm volatile(
      "tilestored %%tmm0, (%0,%1,1)\n"
      "tilestored %%tmm1, 64(%0,%1,1)" ::"r"(c),
      "r"(kRow)
      : "memory");
  if constexpr (MT == 2)
    asm volatile(
        "tilestored %%tmm2, (%0,%1,1)\n"
        "tilestored %%tmm3, 64(%0,%1,1)" ::"r"(lower),
        "r"(kRow)
        : "memory");
}

// Two rows of 32 bfloat16 to one of 32 pairs, as multiply_tiles takes b.
inline void pair_rows(const bf16* first, const bf16* second, bf16* to) {
  alignas(64) static constexpr struct Order {
    uint16_t low[32], high[32];
    constexpr Order() : low{}, high{} {
      for (int i = 0; i < 32; ++i) {
        low[i] = uint16_t(i / 2 + i % 2 * 32);
        high[i] = uint16_t(16 + i / 2 + i % 2 * 32);
      }
    }
  } order;
  const __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
  _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, _mm512_load_si512(order.low), b));
  _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi16(a, _mm512_load_si512(order.high), b));
}

}  // namespace pelton::inline PELTON_SIMD
#endif
