# ROCm as the plan names it: HIP's clang, its device libraries, and a library that is not tied to one ROCm.
include_guard(GLOBAL)

# pelton_prepare_hip()
#
# Sets in the caller's scope what CMake has to know before it looks at the HIP compiler. Nothing without ROCm. To be
# called before project().
macro(pelton_prepare_hip)
  if(PELTON_PLAN_HIP_COMPILER)
    set(CMAKE_HIP_PLATFORM amd)  # else an nvcc on PATH makes it NVIDIA's
    set(CMAKE_HIP_COMPILER "${PELTON_PLAN_HIP_COMPILER}")
    set(CMAKE_HIP_ARCHITECTURES ${PELTON_PLAN_HIP_ARCHS})
    pelton_run_build_tool(device-libs --clang "${PELTON_PLAN_HIP_COMPILER}" --libs "${PELTON_PLAN_HIP_DEVICE_LIBS}"
      --out "${CMAKE_BINARY_DIR}/device_libs" ${PELTON_PLAN_HIP_ARCHS})
    # CMake tries the compiler with these. Code objects of version 5 run with ROCm 6 and 7, whatever the compiler's default.
    # Its headers first: a distribution's in /usr/include would else be found before those of a ROCm elsewhere.
    set(pelton_hip_include "")
    if(NOT PELTON_PLAN_HIP_ROOT STREQUAL "/usr")
      set(pelton_hip_include "-isystem \"${PELTON_PLAN_HIP_ROOT}/include\" ")
    endif()
    string(CONCAT CMAKE_HIP_FLAGS_INIT "--rocm-path=\"${PELTON_PLAN_HIP_ROOT}\" ${pelton_hip_include}"
      "--rocm-device-lib-path=\"${CMAKE_BINARY_DIR}/device_libs\" -mcode-object-version=5")
    foreach(pelton_hip_variable IN ITEMS HIPFLAGS HIP_PLATFORM HIP_DEVICE_LIB_PATH HIPCC_COMPILE_FLAGS_APPEND)
      unset(ENV{${pelton_hip_variable}})
    endforeach()
  endif()
endmacro()

# pelton_add_hip(<target>)
#
# An interface target that keeps the HIP runtime out of the library, which finds it in the process that loads it, and the
# hipified sources and headers as the target hipified. Nothing without ROCm.
function(pelton_add_hip target)
  add_library(${target} INTERFACE)
  if(NOT PELTON_PLAN_HIP_COMPILER)
    return()
  endif()
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/hipified")
  pelton_hipify("${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}" "${PELTON_PLAN_TORCH}" "${folder}"
    NAMES ${PELTON_PLAN_HIPIFY_NAMES} OUTPUTS ${PELTON_PLAN_HIPIFY_OUTPUTS})
  set(made ${PELTON_PLAN_HIPIFY_OUTPUTS})
  list(TRANSFORM made PREPEND "${folder}/")
  add_custom_target(hipified DEPENDS ${made})
  target_link_libraries(${target} INTERFACE dl pthread)
  foreach(kind IN ITEMS STATIC SHARED)
    set(CMAKE_HIP_RUNTIME_LIBRARIES_${kind} "" PARENT_SCOPE)
  endforeach()
  # Of the implicit libraries of HIP's driver, the host compiler's own are enough.
  set(CMAKE_HIP_IMPLICIT_LINK_LIBRARIES "" PARENT_SCOPE)
  set(CMAKE_HIP_IMPLICIT_LINK_DIRECTORIES "" PARENT_SCOPE)
  set(CMAKE_HIP_STANDARD_LIBRARIES "" PARENT_SCOPE)
endfunction()

# pelton_name_hip_sources(<target> <name>...)
#
# To compile <target>'s hipified sources, whose names in the plan are given, in their order.
function(pelton_name_hip_sources target)
  add_dependencies(${target} hipified)
  foreach(name IN LISTS ARGN)
    string(REGEX REPLACE "[.]cu$" ".hip" output "${CMAKE_CURRENT_BINARY_DIR}/hipified/${PELTON_PLAN_KERNELS}/${name}")
    # What the compiler tells the kernels of two files apart by is a hash of the path unless it is said.
    string(MD5 id "${name}")
    set_source_files_properties("${output}" PROPERTIES LANGUAGE HIP COMPILE_OPTIONS "-cuid=${id}")
  endforeach()
endfunction()

# pelton_read_hip_symbols(<variable>)
#
# The functions of the HIP runtime that the library may call, in the caller's <variable>. The stub of libtorch_cpu.so has
# them, too, so that `-z defs` lets these through without a library of one ROCm version that would then be needed: when
# the wheel's library is loaded, the runtime that torch uses has been made visible.
function(pelton_read_hip_symbols variable)
  set(file "${CMAKE_CURRENT_SOURCE_DIR}/cmake/hip-symbols.txt")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${file}")
  file(STRINGS "${file}" names REGEX "^[A-Za-z_]")
  set(${variable} "${names}" PARENT_SCOPE)
endfunction()
