// Boundary to gpu.cu of this folder, without torch and without CUDA.
#pragma once

namespace pelton::gpu {

// The runtime's name of an error that a launcher returned.
const char* error_text(int error);

}  // namespace pelton::gpu
