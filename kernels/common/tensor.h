// A tensor that torch hands to an operator.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/DeviceType.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <utility>

namespace pelton {

using torch::headeronly::ScalarType;

// torch::stable::Tensor asks torch through its C interface each time, and counts its owners. What an operator
// checks is a good part of what a small call costs, so this one owns torch's handle alone and asks once.
class Tensor {
 public:
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}
  Tensor(const Tensor& other) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(other.handle_, &handle_));
  }
  Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Tensor& operator=(Tensor other) noexcept {
    std::swap(handle_, other.handle_);
    known_shape_ = known_type_ = known_device_ = false;
    return *this;
  }
  ~Tensor() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }

  int64_t dim() const { return shape().dim; }
  int64_t size(int64_t d) const { return shape().sizes[d]; }
  int64_t stride(int64_t d) const { return shape().strides[d]; }
  int64_t numel() const {
    int64_t count = 1;
    for (int64_t d = 0; d < dim(); ++d) count *= size(d);
    return count;
  }
  bool is_contiguous() const {
    int64_t wanted = 1;
    for (int64_t d = dim() - 1; d >= 0; --d) {
      if (size(d) != 1 && stride(d) != wanted) return numel() == 0;
      wanted *= size(d);
    }
    return true;
  }

  ScalarType scalar_type() const {
    if (!known_type_) {
      int32_t type;
      STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle_, &type));
      type_ = ScalarType(type);
      known_type_ = true;
    }
    return type_;
  }
  size_t element_size() const { return aoti_torch_dtype_element_size(int32_t(scalar_type())); }

  bool is_cpu() const { return device().type == torch::headeronly::DeviceType::CPU; }
  bool is_cuda() const { return device().type == torch::headeronly::DeviceType::CUDA; }
  int32_t get_device_index() const { return device().index; }

  const void* const_data_ptr() const {
    const void* data;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(handle_, &data));
    return data;
  }
  void* mutable_data_ptr() const {
    void* data;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_get_mutable_data_ptr(handle_, &data));
    return data;
  }
  // The caller has checked the dtype.
  template <class T>
  const T* const_data_ptr() const {
    return static_cast<const T*>(const_data_ptr());
  }
  template <class T>
  T* mutable_data_ptr() const {
    return static_cast<T*>(mutable_data_ptr());
  }

 private:
  struct Shape {
    int64_t dim, *sizes, *strides;  // the arrays are torch's
  };
  struct Device {
    torch::headeronly::DeviceType type;
    int32_t index;
  };

  const Shape& shape() const {
    if (!known_shape_) {
      STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle_, &shape_.dim));
      STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle_, &shape_.sizes));
      STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle_, &shape_.strides));
      known_shape_ = true;
    }
    return shape_;
  }
  const Device& device() const {
    if (!known_device_) {
      int32_t type;
      STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle_, &type));
      STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle_, &device_.index));
      device_.type = torch::headeronly::DeviceType(type);
      known_device_ = true;
    }
    return device_;
  }

  AtenTensorHandle handle_ = nullptr;
  mutable Shape shape_;
  mutable Device device_;
  mutable ScalarType type_;
  mutable bool known_shape_ = false, known_type_ = false, known_device_ = false;
};

}  // namespace pelton

// How TORCH_BOX makes an argument of an operator: the handle is the callee's, as for torch::stable::Tensor.
template <>
struct torch::stable::detail::ToImpl<pelton::Tensor> {
  static pelton::Tensor call(StableIValue value, uint64_t, bool) {
    return pelton::Tensor(torch::stable::detail::to<AtenTensorHandle>(value));
  }
};
