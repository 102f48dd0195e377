# The host extension, the only part that knows Python's ABI.
include_guard(GLOBAL)

# pelton_add_host_modules()
#
# The host sources once for each Python of the plan, side by side in the package; the import system picks by suffix.
function(pelton_add_host_modules)
  foreach(index IN LISTS PELTON_PLAN_HOSTS)
    pelton_add_host_module(_host_${index}
      "${PELTON_PLAN_HOST_${index}_SOABI}" "${PELTON_PLAN_HOST_${index}_SUFFIX}" "${PELTON_PLAN_HOST_${index}_INCLUDE}")
  endforeach()
endfunction()

# pelton_add_host_module(<target> <soabi> <suffix> <folder of Python.h>)
#
# <soabi> is written into the file, so that a reader can tell which Python it was built for without loading it.
function(pelton_add_host_module target soabi suffix include)
  add_library(${target} MODULE ${PELTON_PLAN_HOST_SOURCES})
  target_include_directories(${target} SYSTEM PRIVATE "${PELTON_PLAN_PYBIND11_INCLUDE}" "${include}")
  target_compile_definitions(${target} PRIVATE
    ${PELTON_PLAN_HOST_DEFINITIONS}
    "PELTON_HOST_SOABI=\"${soabi}\""
    "PELTON_HOST_COMPILER=\"${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}\"")
  pelton_harden(${target})
  set_target_properties(${target} PROPERTIES
    PREFIX "" OUTPUT_NAME _host SUFFIX "${suffix}" LIBRARY_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/${target}")
  target_link_libraries(${target} PRIVATE pelton_options pelton_glibc)
  pelton_install(${target})
endfunction()
