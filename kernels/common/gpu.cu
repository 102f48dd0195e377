#include "gpu.h"

#include "gpu.cuh"

namespace pelton::gpu {

const char* error_text(int error) { return cudaGetErrorString(cudaError_t(error)); }

const DeviceProperties& device_properties() {
  constexpr int kMaxDevices = 64;
  static DeviceProperties properties[kMaxDevices];
  static std::atomic<bool> known[kMaxDevices];
  int device = 0;
  (void)cudaGetDevice(&device);
  DeviceProperties& p = properties[device % kMaxDevices];
  if (known[device % kMaxDevices].load(std::memory_order_acquire)) return p;
  // Two threads may both come here: they write the same values.
  int major = 0, minor = 0;
  (void)cudaDeviceGetAttribute(&p.multiprocessors, cudaDevAttrMultiProcessorCount, device);
  (void)cudaDeviceGetAttribute(&p.shared_memory_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  (void)cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  p.compute_capability = 10 * major + minor;
  known[device % kMaxDevices].store(true, std::memory_order_release);
  return p;
}

}  // namespace pelton::gpu
