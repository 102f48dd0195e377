# Reading the plan. `python -m pelton_build cmake` writes it as assignments of PELTON_PLAN_* variables; what they
# are is documented there.
include_guard(GLOBAL)

# pelton_read_plan(<profile>)
#
# Makes the plan of <profile> (of what this machine is, when empty), shows it, and sets its PELTON_PLAN_* variables,
# CMAKE_CXX_COMPILER and the build type in the caller's scope. CMake runs again when anything that the plan was made
# from changes. To be called before project().
function(pelton_read_plan profile)
  if(NOT Python_EXECUTABLE)
    find_program(Python_EXECUTABLE NAMES python3 python REQUIRED)
  endif()
  pelton_run_build_tool(cmake plan
    --profile "${profile}" --build-dir "${CMAKE_BINARY_DIR}" --cmake-version "${CMAKE_VERSION}")
  include("${CMAKE_BINARY_DIR}/pelton_plan.cmake")
  message(STATUS "The plan:\n${PELTON_PLAN_TEXT}")
  if(PELTON_PLAN_STATE STREQUAL "wheel")
    # Configured anew for every wheel. Files with time stamps of the future would make ninja do that without end.
    set(CMAKE_SUPPRESS_REGENERATION ON PARENT_SCOPE)
  endif()
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PELTON_PLAN_DEPENDS})
  set_property(GLOBAL PROPERTY JOB_POOLS compile=${PELTON_PLAN_JOBS} compile_gpu=${PELTON_PLAN_GPU_JOBS})
  if(NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE Release PARENT_SCOPE)
  endif()
  if(PELTON_PLAN_CXX_COMPILER)
    set(CMAKE_CXX_COMPILER "${PELTON_PLAN_CXX_COMPILER}" PARENT_SCOPE)
  endif()
  foreach(variable IN LISTS PELTON_PLAN_VARIABLES)
    set(PELTON_PLAN_${variable} "${PELTON_PLAN_${variable}}" PARENT_SCOPE)
  endforeach()
endfunction()

# pelton_run_build_tool(<subcommand> <argument>...)
#
# Runs `python -m pelton_build <subcommand> <argument>...` of this source tree. It stops CMake when that fails; its own
# message has been shown then.
function(pelton_run_build_tool subcommand)
  # The package is found in the working directory, where PYTHONSAFEPATH would not let Python look.
  execute_process(
    COMMAND "${CMAKE_COMMAND}" -E env --unset=PYTHONSAFEPATH
      "${Python_EXECUTABLE}" -X utf8 -m pelton_build ${subcommand} ${ARGN}
    WORKING_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}/python"
    RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "python -m pelton_build ${subcommand} failed (${status}); its message stands above.")
  endif()
endfunction()
