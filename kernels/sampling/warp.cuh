// Votes of a warp's lanes.
#pragma once
#include "../common/gpu.cuh"

namespace pelton::gpu {

// One bit for each lane that says yes. On AMD two warps share a wave.
__device__ __forceinline__ uint32_t ballot(bool yes) {
#if defined(__HIP_PLATFORM_AMD__) && !defined(PELTON_EMULATION)
  return uint32_t(__ballot(yes) >> (__lane_id() / kWarp * kWarp));
#else
  return __ballot_sync(kAllLanes, yes);
#endif
}

}  // namespace pelton::gpu
