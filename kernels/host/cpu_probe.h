// What this processor offers, and what the operating system lets programs use of it.
#pragma once
#include <string>
#include <vector>

namespace pelton::host {

struct CpuFeatures {
  std::string vendor;              // "GenuineIntel", "AuthenticAMD"
  std::vector<std::string> flags;  // usable here, as Linux names them, sorted
  std::vector<std::string> off;    // in the processor, but the system does not save their registers; sorted
};

// Reads CPUID and, where the processor has it, XCR0. Holds only baseline x86-64 instructions besides.
CpuFeatures probe_cpu();

}  // namespace pelton::host
