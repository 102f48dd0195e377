# The library of the GPU kernels as plain C++, for tests on a machine without a GPU.
include_guard(GLOBAL)

# pelton_read_emulation_plan(<project>)
#
# Makes the plan of the emulated library and sets its PELTON_EMULATION_* variables in the caller's scope. To be called
# before project(). CMake runs again when a source changes, because it may include a header that was not there before.
function(pelton_read_emulation_plan project)
  find_program(Python_EXECUTABLE NAMES python3 python REQUIRED)
  execute_process(
    COMMAND "${CMAKE_COMMAND}" -E env --unset=PYTHONSAFEPATH
      "${Python_EXECUTABLE}" -X utf8 -m pelton_build emulation --build-dir "${CMAKE_BINARY_DIR}"
    WORKING_DIRECTORY "${project}/python"
    RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "python -m pelton_build emulation failed (${status}); its message stands above.")
  endif()
  include("${CMAKE_BINARY_DIR}/emulation_plan.cmake")
  message(STATUS "${PELTON_EMULATION_TEXT}")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PELTON_EMULATION_DEPENDS})
  foreach(name IN ITEMS LIBRARY CXX_STANDARD TORCH OP_SOURCES OP_DEFINITIONS GPU_SOURCES GPU_DEFINITIONS TEST_SOURCES
      HIPIFY_NAMES HIPIFY_OUTPUTS)
    set(PELTON_EMULATION_${name} "${PELTON_EMULATION_${name}}" PARENT_SCOPE)
  endforeach()
  set(CMAKE_CXX_COMPILER "${PELTON_EMULATION_CXX_COMPILER}" PARENT_SCOPE)
endfunction()

# pelton_add_emulation_runtime(<target> <project>)
#
# What runs the kernels, and how files against it are compiled: <target> to link with, <target>_kernel for device code,
# where every access to memory is reported to the runtime (the compiler's hooks for data races and wrong accesses).
function(pelton_add_emulation_runtime target project)
  set(folder "${project}/kernels/emulation")
  add_library(${target} STATIC "${folder}/runtime.cpp" "${folder}/memory.cpp" "${folder}/matrix.cpp"
    "${folder}/hopper.cpp")
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_compile_definitions(${target} PUBLIC PELTON_GPU=1 PELTON_EMULATION=1)
  target_compile_options(${target} PRIVATE -O2 -g -Wall -Wextra)
  set_target_properties(${target} PROPERTIES
    CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON POSITION_INDEPENDENT_CODE ON)
  add_library(${target}_kernel INTERFACE)
  target_link_libraries(${target}_kernel INTERFACE ${target})
  target_include_directories(${target}_kernel INTERFACE "${folder}")
  target_compile_options(${target}_kernel INTERFACE -O1 -gdwarf-4 -Wall -Wno-unknown-pragmas -Wno-unused
    -fsanitize=thread --param=tsan-instrument-func-entry-exit=0 --param=tsan-distinguish-volatile=1 -fsanitize=bounds,alignment -fsanitize-recover=all
    -fno-strict-aliasing "-ffile-prefix-map=${project}/=")
endfunction()

# pelton_add_emulated_library(<project>)
#
# The library of the plan, in the build folder, and beside it the planted bugs of tests/emulation.
function(pelton_add_emulated_library project)
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/hipified")
  pelton_hipify("${Python_EXECUTABLE}" "${project}" "${PELTON_EMULATION_TORCH}" "${folder}"
    NAMES ${PELTON_EMULATION_HIPIFY_NAMES} OUTPUTS ${PELTON_EMULATION_HIPIFY_OUTPUTS})
  # Headers first: they must be there before anything is compiled.
  set(headers ${PELTON_EMULATION_HIPIFY_OUTPUTS})
  list(REMOVE_ITEM headers ${PELTON_EMULATION_GPU_SOURCES} ${PELTON_EMULATION_TEST_SOURCES})
  list(TRANSFORM headers PREPEND "${folder}/")
  list(TRANSFORM PELTON_EMULATION_GPU_SOURCES PREPEND "${folder}/" OUTPUT_VARIABLE gpu)
  list(TRANSFORM PELTON_EMULATION_TEST_SOURCES PREPEND "${folder}/" OUTPUT_VARIABLE tests)
  set_source_files_properties(${gpu} ${tests} PROPERTIES LANGUAGE CXX)
  add_custom_target(hipified_headers DEPENDS ${headers})
  add_library(pelton_gpu OBJECT ${gpu})
  add_dependencies(pelton_gpu hipified_headers)
  target_link_libraries(pelton_gpu PRIVATE emulation_kernel)
  target_compile_definitions(pelton_gpu PRIVATE ${PELTON_EMULATION_GPU_DEFINITIONS})
  add_library(pelton_op OBJECT ${PELTON_EMULATION_OP_SOURCES})
  target_include_directories(pelton_op SYSTEM PRIVATE "${PELTON_EMULATION_TORCH}/include")
  target_compile_definitions(pelton_op PRIVATE ${PELTON_EMULATION_OP_DEFINITIONS})
  target_compile_options(pelton_op PRIVATE -O1 -g -Wall)
  target_link_libraries(pelton_op PRIVATE emulation)
  add_library(pelton_library MODULE)
  target_link_libraries(pelton_library PRIVATE pelton_gpu pelton_op emulation
    "${PELTON_EMULATION_TORCH}/lib/libtorch_cpu.so")
  target_link_options(pelton_library PRIVATE LINKER:-z,defs LINKER:--as-needed)
  set_target_properties(pelton_gpu pelton_op pelton_library PROPERTIES
    CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON POSITION_INDEPENDENT_CODE ON LINKER_LANGUAGE CXX
    PREFIX lib OUTPUT_NAME "${PELTON_EMULATION_LIBRARY}" SUFFIX .so SKIP_BUILD_RPATH ON)
  if(tests)
    add_library(emulation_cases MODULE ${tests})
    add_dependencies(emulation_cases hipified_headers)
    target_link_libraries(emulation_cases PRIVATE emulation_kernel)
    set_target_properties(emulation_cases PROPERTIES CXX_VISIBILITY_PRESET hidden POSITION_INDEPENDENT_CODE ON PREFIX "")
  endif()
endfunction()
