# torch as the operators see it: headers, and a stub to link with. No torch library is looked at.
include_guard(GLOBAL)

# pelton_add_torch(<target>)
#
# An interface target with torch's headers and, to link with, a stub of libtorch_cpu.so that defines exactly the
# symbols which the oldest supported torch exports (cmake/torch-<version>-symbols.txt). With `-z defs` a newer symbol
# is a link error, whichever torch this machine has.
function(pelton_add_torch target)
  set(symbols "${CMAKE_CURRENT_SOURCE_DIR}/cmake/torch-${PELTON_PLAN_TORCH_FLOOR}-symbols.txt")
  if(NOT EXISTS "${symbols}")
    message(FATAL_ERROR
      "cmake/torch-${PELTON_PLAN_TORCH_FLOOR}-symbols.txt is missing. Make it from libtorch_cpu.so of torch "
      "${PELTON_PLAN_TORCH_FLOOR}: nm -D --defined-only libtorch_cpu.so | awk '{print $3}' | "
      "grep -E '^(aoti_torch_|torch_)' | sort")
  endif()
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${symbols}")
  file(STRINGS "${symbols}" names)
  if(PELTON_PLAN_HIP_COMPILER)
    pelton_read_hip_symbols(hip)
    list(APPEND names ${hip})
  endif()
  list(TRANSFORM names PREPEND "extern \"C\" void ")
  list(TRANSFORM names APPEND "() {}")
  list(JOIN names "\n" text)
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/torch_stub")
  file(CONFIGURE OUTPUT "${folder}/stub.cpp" CONTENT "${text}\n" @ONLY)
  add_library(${target}_stub SHARED "${folder}/stub.cpp")
  set_target_properties(${target}_stub PROPERTIES OUTPUT_NAME torch_cpu LIBRARY_OUTPUT_DIRECTORY "${folder}")
  target_link_options(${target}_stub PRIVATE -nostdlib)
  add_library(${target} INTERFACE)
  target_include_directories(${target} SYSTEM INTERFACE "${PELTON_PLAN_TORCH_INCLUDE}")
  target_link_libraries(${target} INTERFACE ${target}_stub)
endfunction()
