# Linking for an older glibc than this machine's.
include_guard(GLOBAL)

# pelton_add_glibc_floor(<target>)
#
# An interface target that links for the plan's glibc floor: against stubs of that glibc, so that every symbol gets
# the version it had there, with libstdc++ inside, and with the few functions that this machine's libstdc++.a takes
# from a newer glibc. Without a floor (editable builds, or a machine whose glibc is no newer) it does nothing.
function(pelton_add_glibc_floor target)
  add_library(${target} INTERFACE)
  if(NOT PELTON_PLAN_GLIBC_FLOOR)
    return()
  endif()
  set(stubs "${CMAKE_CURRENT_BINARY_DIR}/glibc-${PELTON_PLAN_GLIBC_FLOOR}")
  pelton_run_build_tool(glibc "${PELTON_PLAN_GLIBC_FLOOR}" "${PELTON_PLAN_MACHINE}" "${stubs}")
  add_library(${target}_compat OBJECT cmake/glibc_compat.cpp)
  pelton_harden(${target}_compat)
  target_link_libraries(${target}_compat PRIVATE pelton_options)
  target_sources(${target} INTERFACE "$<TARGET_OBJECTS:${target}_compat>")
  # libpthread even when only libstdc++.a, which comes behind it, needs it.
  target_link_options(${target} INTERFACE "-L${stubs}" -static-libstdc++
    "LINKER:--push-state,--no-as-needed" -lpthread "LINKER:--pop-state")
endfunction()
