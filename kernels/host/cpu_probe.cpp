// CPU feature probe: CPUID says what the processor has, XCR0 which registers the system saves.
// A feature counts as usable only when both do: wide registers that a context switch forgets are worse than
// none. Method: Intel SDM volume 1, sections 13.2 and 14.3, 15.2; volume 2, CPUID; AMD APM volume 3, appendix
// E.
#include "cpu_probe.h"

#include <cpuid.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace pelton::host {
namespace {

// Register sets that XCR0 has bits for; a feature needs all bits of its set.
constexpr uint64_t kNone = 0;
constexpr uint64_t kAvx = 0b110;                 // XMM, YMM
constexpr uint64_t kAvx512 = kAvx | 0b11100000;  // opmask, ZMM low, ZMM high
constexpr uint64_t kAmx = 0b11ull << 17;         // tile configuration, tile data

enum Register { eax, ebx, ecx, edx };

struct Feature {
  const char* name;  // as in /proc/cpuinfo
  uint32_t leaf, subleaf;
  Register reg;
  int bit;
  uint64_t needs;
};

constexpr Feature kFeatures[] = {
    {"cx8", 1, 0, edx, 8, kNone},
    {"cmov", 1, 0, edx, 15, kNone},
    {"mmx", 1, 0, edx, 23, kNone},
    {"fxsr", 1, 0, edx, 24, kNone},
    {"sse", 1, 0, edx, 25, kNone},
    {"sse2", 1, 0, edx, 26, kNone},
    {"pni", 1, 0, ecx, 0, kNone},
    {"pclmulqdq", 1, 0, ecx, 1, kNone},
    {"ssse3", 1, 0, ecx, 9, kNone},
    {"fma", 1, 0, ecx, 12, kAvx},
    {"cx16", 1, 0, ecx, 13, kNone},
    {"sse4_1", 1, 0, ecx, 19, kNone},
    {"sse4_2", 1, 0, ecx, 20, kNone},
    {"movbe", 1, 0, ecx, 22, kNone},
    {"popcnt", 1, 0, ecx, 23, kNone},
    {"aes", 1, 0, ecx, 25, kNone},
    {"xsave", 1, 0, ecx, 26, kNone},
    {"avx", 1, 0, ecx, 28, kAvx},
    {"f16c", 1, 0, ecx, 29, kAvx},
    {"bmi1", 7, 0, ebx, 3, kNone},
    {"avx2", 7, 0, ebx, 5, kAvx},
    {"bmi2", 7, 0, ebx, 8, kNone},
    {"avx512f", 7, 0, ebx, 16, kAvx512},
    {"avx512dq", 7, 0, ebx, 17, kAvx512},
    {"avx512ifma", 7, 0, ebx, 21, kAvx512},
    {"avx512cd", 7, 0, ebx, 28, kAvx512},
    {"sha_ni", 7, 0, ebx, 29, kNone},
    {"avx512bw", 7, 0, ebx, 30, kAvx512},
    {"avx512vl", 7, 0, ebx, 31, kAvx512},
    {"avx512vbmi", 7, 0, ecx, 1, kAvx512},
    {"avx512_vbmi2", 7, 0, ecx, 6, kAvx512},
    {"gfni", 7, 0, ecx, 8, kNone},
    {"vaes", 7, 0, ecx, 9, kAvx},
    {"vpclmulqdq", 7, 0, ecx, 10, kAvx},
    {"avx512_vnni", 7, 0, ecx, 11, kAvx512},
    {"avx512_bitalg", 7, 0, ecx, 12, kAvx512},
    {"avx512_vpopcntdq", 7, 0, ecx, 14, kAvx512},
    {"amx_bf16", 7, 0, edx, 22, kAmx},
    {"avx512_fp16", 7, 0, edx, 23, kAvx512},
    {"amx_tile", 7, 0, edx, 24, kAmx},
    {"amx_int8", 7, 0, edx, 25, kAmx},
    {"avx_vnni", 7, 1, eax, 4, kAvx},
    {"avx512_bf16", 7, 1, eax, 5, kAvx512},
    {"lahf_lm", 0x80000001, 0, ecx, 0, kNone},
    {"abm", 0x80000001, 0, ecx, 5, kNone},
    {"lm", 0x80000001, 0, edx, 29, kNone},
};

struct Registers {
  uint32_t value[4] = {};
};

// All zero when the processor does not have the leaf.
Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r;
  if (__get_cpuid_max(leaf & 0x80000000u, nullptr) < leaf) return r;
  __cpuid_count(leaf, subleaf, r.value[eax], r.value[ebx], r.value[ecx], r.value[edx]);
  return r;
}

// The register sets that the system saves; 0 when it has not turned XSAVE on.
uint64_t saved_registers() {
  constexpr int kOsXsave = 27;
  if (!(cpuid(1, 0).value[ecx] >> kOsXsave & 1)) return 0;
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

std::string vendor_name() {
  const Registers r = cpuid(0, 0);
  char name[12];
  std::memcpy(name, &r.value[ebx], 4);
  std::memcpy(name + 4, &r.value[edx], 4);
  std::memcpy(name + 8, &r.value[ecx], 4);
  return {name, sizeof name};
}

}  // namespace

CpuFeatures probe_cpu() {
  CpuFeatures found{vendor_name(), {}, {}};
  const uint64_t saved = saved_registers();
  for (const Feature& f : kFeatures) {
    if (!(cpuid(f.leaf, f.subleaf).value[f.reg] >> f.bit & 1)) continue;
    ((saved & f.needs) == f.needs ? found.flags : found.off).emplace_back(f.name);
  }
  std::sort(found.flags.begin(), found.flags.end());
  std::sort(found.off.begin(), found.off.end());
  return found;
}

}  // namespace pelton::host
