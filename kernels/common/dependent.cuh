// Two kernels of which the second is put in place while the first still runs (programmatic dependent launch,
// sm_90). Elsewhere the second is launched as usual and the functions do nothing.
#pragma once
#include "gpu.cuh"

namespace pelton::gpu {

// In the first kernel: the second may be put in place once all blocks have come here or ended.
__device__ __forceinline__ void let_next_start() {
#if defined(PELTON_CUDA) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// In the second kernel, before it reads what the first wrote.
__device__ __forceinline__ void wait_for_previous() {
#if defined(PELTON_CUDA) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Launches the second kernel with `shared_bytes` of dynamic shared memory. It must call wait_for_previous, at
// its end if it reads nothing of the first: what comes after it in the stream waits for it alone.
template <class... Parameters, class... Arguments>
inline int launch_dependent(void (*kernel)(Parameters...), dim3 grid, dim3 block, int shared_bytes,
                            cudaStream_t stream, const Arguments&... arguments) {
#if defined(PELTON_CUDA) && defined(PELTON_HAS_SM90)
  // Code for older archs does not wait, so the overlap is for a library that has code for this one.
  if (device_properties().compute_capability == 90) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = size_t(shared_bytes);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return int(cudaLaunchKernelEx(&config, kernel, arguments...));
  }
#endif
  kernel<<<grid, block, shared_bytes, stream>>>(arguments...);
  return launch_result();
}

}  // namespace pelton::gpu
