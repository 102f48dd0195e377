// On which device this library's kernels run, and how an operator starts them there. A library holds the
// kernels of one backend: PELTON_GPU is defined when that is CUDA or ROCm, PELTON_EMULATION as well when GPU
// kernels run on the CPU in tests.
#pragma once
#include "op.h"

namespace pelton {

#ifdef PELTON_GPU
inline constexpr bool kGpu = true;
#else
inline constexpr bool kGpu = false;
#endif
#if defined(PELTON_GPU) && !defined(PELTON_EMULATION)
inline constexpr bool kTensorsOnGpu = true;
#else
inline constexpr bool kTensorsOnGpu = false;
#endif

struct NamedTensor {
  const char* name;
  const Tensor& tensor;
};

// All tensors must be on the device of the first, and that must be one that this library has kernels for.
void check_device(const char* op, std::initializer_list<NamedTensor> tensors);

// The current stream of torch on this device, as the runtime's own handle (cudaStream_t, hipStream_t).
void* current_stream(const char* op, int32_t device_index);

// Runs a launcher on the device and the current stream of `where`; the error it returns becomes an exception.
void launch_on(const char* op, const Tensor& where, int (*call)(const void* launcher, void* stream),
               const void* launcher);

// launch(op, where, launcher): calls launcher(stream), which starts GPU work and returns its error, 0 for
// none.
template <class Launcher>
inline void launch(const char* op, const Tensor& where, const Launcher& launcher) {
  launch_on(
      op, where, [](const void* f, void* stream) { return int((*static_cast<const Launcher*>(f))(stream)); },
      &launcher);
}

}  // namespace pelton
