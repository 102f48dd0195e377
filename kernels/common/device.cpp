#include "device.h"

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <optional>

#include "gpu.h"

#ifdef PELTON_EMULATION
#include "../emulation/buffers.h"
#endif

namespace pelton {
namespace {

// "cuda:0", "cpu"
std::string device_text(const Tensor& t) {
  if (t.is_cpu()) return "cpu";
  if (t.is_cuda()) return "cuda:" + std::to_string(t.get_device_index());
  return "a device of another kind";
}

std::string backend() {
#if defined(PELTON_EMULATION)
  return "emulation";
#elif defined(PELTON_ROCM)
  return "rocm";
#elif defined(PELTON_GPU)
  return "cuda";
#else
  return "cpu";
#endif
}

#ifdef PELTON_EMULATION
// What an operator checks is what its kernels may touch.
void allow_buffers(const char* op, std::initializer_list<NamedTensor> tensors) {
  for (const NamedTensor& t : tensors) {
    int64_t last = 0;
    for (int64_t d = 0; d < t.tensor.dim(); ++d) last += (t.tensor.size(d) - 1) * t.tensor.stride(d);
    const int64_t bytes = t.tensor.numel() == 0 ? 0 : (last + 1) * int64_t(t.tensor.element_size());
    emulation::allow_buffer(op, t.name, t.tensor.const_data_ptr(), size_t(bytes));
  }
}
#endif

}  // namespace

void check_device(const char* op, std::initializer_list<NamedTensor> tensors) {
  const NamedTensor& first = *tensors.begin();
  const bool on_gpu = kTensorsOnGpu;
  PELTON_CHECK(on_gpu ? first.tensor.is_cuda() : first.tensor.is_cpu(), op, ": ", first.name, " is on ",
               device_text(first.tensor), ", but this build of pelton has kernels for ",
               on_gpu ? "GPU" : "CPU", " tensors only");
  const int32_t index = on_gpu ? first.tensor.get_device_index() : 0;
#ifdef PELTON_EMULATION
  allow_buffers(op, tensors);
#endif
  for (const NamedTensor& t : tensors) {
    const bool same = on_gpu ? t.tensor.is_cuda() && t.tensor.get_device_index() == index : t.tensor.is_cpu();
    PELTON_CHECK(same, op, ": ", t.name, " must be on the device of ", first.name, ", ",
                 device_text(first.tensor), ", found ", device_text(t.tensor));
  }
}

#if defined(PELTON_GPU) && !defined(PELTON_EMULATION)
namespace {

using StreamHandleFunction = AOTITorchError (*)(StreamHandle, void**);
using CudaStreamFunction = AOTITorchError (*)(int32_t, void**);

// A function of a library that torch has loaded already; none is loaded for it.
void* find_loaded(const char* library, const char* name) {
  void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return nullptr;
  void* found = dlsym(handle, name);
  dlclose(handle);
  return found;
}

// Since 2.13 torch tells every backend's native stream through libtorch_cpu; before, only its CUDA or HIP
// library does. Both are looked up by name, because the oldest torch has no such symbol to link against.
struct StreamSource {
  StreamHandleFunction native = nullptr;
  CudaStreamFunction cuda = nullptr;

  StreamSource() {
    native =
        reinterpret_cast<StreamHandleFunction>(find_loaded("libtorch_cpu.so", "torch_stream_native_handle"));
    for (const char* library : {"libtorch_cuda.so", "libtorch_hip.so"}) {
      if (native == nullptr && cuda == nullptr) {
        cuda =
            reinterpret_cast<CudaStreamFunction>(find_loaded(library, "aoti_torch_get_current_cuda_stream"));
      }
    }
  }
};

}  // namespace

void* current_stream(const char* op, int32_t device_index) {
  static const StreamSource source;
  void* stream = nullptr;
  if (source.native != nullptr) {
    StreamHandle handle = nullptr;
    PELTON_CHECK(aoti_torch_get_current_stream(device_index, &handle) == AOTI_TORCH_SUCCESS, op,
                 ": torch has no current stream on cuda:", device_index);
    const AOTITorchError error = source.native(handle, &stream);
    aoti_torch_delete_stream(handle);
    PELTON_CHECK(error == AOTI_TORCH_SUCCESS, op, ": torch does not tell its stream on cuda:", device_index);
  } else {
    PELTON_CHECK(source.cuda != nullptr, op, ": this torch has neither a CUDA nor a ROCm library loaded");
    PELTON_CHECK(source.cuda(device_index, &stream) == AOTI_TORCH_SUCCESS, op,
                 ": torch does not tell its stream on cuda:", device_index);
  }
  return stream;
}

void launch_on(const char* op, const Tensor& where, int (*call)(const void*, void*), const void* launcher) {
  const int32_t index = where.get_device_index();
  std::optional<torch::stable::accelerator::DeviceGuard> guard;  // it costs more than the question
  if (torch::stable::accelerator::getCurrentDeviceIndex() != index) guard.emplace(index);
  const int error = call(launcher, current_stream(op, index));
  PELTON_CHECK(error == 0, op, ": the GPU kernel could not be started: ", gpu::error_text(error), " (error ",
               error, ")");
}
#elif defined(PELTON_GPU)
void* current_stream(const char*, int32_t) { return nullptr; }

void launch_on(const char* op, const Tensor&, int (*call)(const void*, void*), const void* launcher) {
  const int error = call(launcher, nullptr);
  emulation::forget_buffers();
  PELTON_CHECK(error == 0, op, ": ", gpu::error_text(error));
}
#endif

}  // namespace pelton

STABLE_TORCH_LIBRARY_FRAGMENT(pelton, m) { m.def("backend() -> str"); }
STABLE_TORCH_LIBRARY_IMPL(pelton, CompositeExplicitAutograd, m) {
  m.impl("backend", TORCH_BOX(&pelton::backend));
}
