# The library of all kernels and operators.
include_guard(GLOBAL)

# pelton_add_library()
#
# The plan's sources as one shared library without any Python symbol. The plan groups the sources that are compiled
# alike; each group is an object library, because flags of single sources do not cover everything (archs of GPUs).
function(pelton_add_library)
  add_library(pelton_library MODULE)
  foreach(index IN LISTS PELTON_PLAN_GROUPS)
    pelton_add_group(${index})
    target_link_libraries(pelton_library PRIVATE pelton_group_${index})
  endforeach()
  pelton_harden(pelton_library)
  set_target_properties(pelton_library PROPERTIES
    PREFIX lib OUTPUT_NAME "${PELTON_PLAN_LIBRARY}" SUFFIX .so LINKER_LANGUAGE CXX)
  target_link_libraries(pelton_library PRIVATE pelton_options pelton_torch pelton_glibc pelton_cuda pelton_hip)
  target_link_options(pelton_library PRIVATE LINKER:-z,defs)
  pelton_install(pelton_library)
endfunction()

# pelton_add_group(<index>)
#
# The object library pelton_group_<index>. Only operators see torch's headers.
function(pelton_add_group index)
  set(target pelton_group_${index})
  set(sources ${PELTON_PLAN_GROUP_${index}_SOURCES})
  if(PELTON_PLAN_GROUP_${index}_LANGUAGE STREQUAL "HIP")
    list(TRANSFORM sources PREPEND "${CMAKE_CURRENT_BINARY_DIR}/hipified/")
  endif()
  add_library(${target} OBJECT ${sources})
  target_compile_options(${target} PRIVATE ${PELTON_PLAN_GROUP_${index}_FLAGS})
  target_compile_definitions(${target} PRIVATE ${PELTON_PLAN_GROUP_${index}_DEFINITIONS})
  target_link_libraries(${target} PRIVATE pelton_options)
  if(PELTON_PLAN_GROUP_${index}_ROLE STREQUAL "op")
    target_include_directories(${target} SYSTEM PRIVATE "${PELTON_PLAN_TORCH_INCLUDE}")
  endif()
  pelton_harden(${target})
  if(PELTON_PLAN_GROUP_${index}_LANGUAGE STREQUAL "CUDA")
    pelton_compile_alone(${target})
    foreach(source name IN ZIP_LISTS PELTON_PLAN_GROUP_${index}_SOURCES PELTON_PLAN_GROUP_${index}_NAMES)
      pelton_name_cuda_source("${source}" "${name}")
    endforeach()
  endif()
  if(PELTON_PLAN_GROUP_${index}_LANGUAGE STREQUAL "HIP")
    pelton_name_hip_sources(${target} ${PELTON_PLAN_GROUP_${index}_NAMES})
  endif()
  if(PELTON_PLAN_GROUP_${index}_ROLE STREQUAL "gpu")
    set_target_properties(${target} PROPERTIES
      ${PELTON_PLAN_GROUP_${index}_LANGUAGE}_ARCHITECTURES "${PELTON_PLAN_GROUP_${index}_ARCHS}"
      JOB_POOL_COMPILE compile_gpu)
  endif()
endfunction()
