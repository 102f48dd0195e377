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
    # nvcc would add these to what the plan says, in CMake's own trials too.
    foreach(pelton_cuda_variable IN ITEMS NVCC_PREPEND_FLAGS NVCC_APPEND_FLAGS NVCC_CCBIN)
      unset(ENV{${pelton_cuda_variable}})
    endforeach()
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

# pelton_compile_alone(<target>)
#
# Has <target>'s CUDA files compiled without what nvcc reads from the environment, also when ninja is run by hand.
function(pelton_compile_alone target)
  set_target_properties(${target} PROPERTIES RULE_LAUNCH_COMPILE
    "\"${CMAKE_COMMAND}\" -E env --unset=NVCC_PREPEND_FLAGS --unset=NVCC_APPEND_FLAGS --unset=NVCC_CCBIN")
endfunction()

# pelton_name_cuda_source(<source> <name>)
#
# Has the compiler write <name>, the one that the plan has, wherever it would write something of its own: into the
# names of kernels in anonymous namespaces, which hold a hash of the path, so that the same bytes come out wherever
# the checkout lies; and into the head of the device code, where the audit reads which source that is from.
function(pelton_name_cuda_source source name)
  set_property(SOURCE "${source}" APPEND PROPERTY COMPILE_OPTIONS
    "-Xcudafe=--orig_src_path_name=${name}" "-Xfatbin=--ident=${name}")
endfunction()
