// Memory that a kernel needs for the length of one call, kept by the thread between calls.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace pelton {

// Grows to the largest size ever asked for; aligned to cache lines, contents undefined.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  float* floats(int64_t count) {
    const size_t bytes = (size_t(count) * sizeof(float) + kAlignment - 1) / kAlignment * kAlignment;
    if (bytes > bytes_) {
      void* larger = std::aligned_alloc(kAlignment, bytes);
      if (larger == nullptr) throw std::bad_alloc();
      std::free(data_);
      data_ = larger;
      bytes_ = bytes;
    }
    return static_cast<float*>(data_);
  }

 private:
  static constexpr size_t kAlignment = 64;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace pelton
