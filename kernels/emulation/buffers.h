// What operators tell the emulation of their tensors, so that it knows what kernels may touch.
#pragma once
#include <cstddef>

namespace pelton::emulation {

// Kernels of this operator may access this memory as well, from now on until forget_buffers() or a buffer of
// another operator. When nothing has been allowed, everything is.
void allow_buffer(const char* op, const char* name, const void* begin, size_t bytes);
void forget_buffers();

}  // namespace pelton::emulation
