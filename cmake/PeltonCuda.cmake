# CUDA as the plan names it: nvcc, the host compiler behind it, and the runtime to link in.
include_guard(GLOBAL)

# pelton_prepare_cuda()
#
# Sets in the caller's scope what CMake has to know before it looks at the CUDA compiler. Nothing without CUDA. To be
# called before project().
macro(pelton_prepare_cuda)
  if(PELTON_PLAN_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER "${PELTON_PLAN_CUDA_COMPILER}")
    set(CMAKE_CUDA_HOST_COMPILER "${PELTON_PLAN_CXX_COMPILER}")
    # Each group of sources states its own; without this CMake would ask for the compiler's default.
    set(CMAKE_CUDA_ARCHITECTURES OFF)
    # CMake tries the compiler by linking a program, and nvcc does not look where packages have the runtime.
    cmake_path(GET PELTON_PLAN_CUDA_RUNTIME PARENT_PATH pelton_cuda_folder)
    set(ENV{LIBRARY_PATH} "${pelton_cuda_folder}:$ENV{LIBRARY_PATH}")
  endif()
endmacro()

# pelton_add_cuda(<target>)
#
# An interface target that links the CUDA runtime in: the driver is then all that a machine needs, and torch may have
# a runtime of its own. Nothing without CUDA.
function(pelton_add_cuda target)
  add_library(${target} INTERFACE)
  if(PELTON_PLAN_CUDA_RUNTIME)
    target_link_libraries(${target} INTERFACE "${PELTON_PLAN_CUDA_RUNTIME}" dl pthread rt)
  endif()
endfunction()

# pelton_name_cuda_sources(<source>...)
#
# The names of kernels in anonymous namespaces hold a hash of the source's path: of the one below the checkout, so
# that the same bytes come out wherever that lies. Device code carries the source's path as the plan has it, by which
# the audit knows whose it is.
function(pelton_name_cuda_sources)
  foreach(source IN LISTS ARGN)
    cmake_path(RELATIVE_PATH source BASE_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}" OUTPUT_VARIABLE name)
    cmake_path(RELATIVE_PATH source BASE_DIRECTORY "${PELTON_PLAN_KERNELS}" OUTPUT_VARIABLE planned)
    set_property(SOURCE "${source}" APPEND PROPERTY COMPILE_OPTIONS
      "-Xcudafe=--orig_src_path_name=${name}" "-Xfatbin=--ident=${planned}")
  endforeach()
endfunction()
