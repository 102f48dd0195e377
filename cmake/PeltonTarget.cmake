# What all targets have in common.
include_guard(GLOBAL)

# pelton_add_options(<target>)
#
# An interface target with the C++ standard, the warnings, and the folders of this machine kept out of the binaries.
function(pelton_add_options target)
  add_library(${target} INTERFACE)
  foreach(language IN LISTS PELTON_PLAN_LANGUAGES)
    string(TOLOWER "${language}" lower)
    target_compile_features(${target} INTERFACE ${lower}_std_${PELTON_PLAN_CXX_STANDARD})
  endforeach()
  # Sections, so that the linker leaves out what nobody calls: most of a libstdc++ that is linked in whole objects.
  pelton_host_options(${target} -Wall -Wextra -ffunction-sections -fdata-sections)
  # GCC finds its own AVX-512 headers' undefined vectors in every caller (its bug 105593): thousands of lines.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-Wno-uninitialized;-Wno-maybe-uninitialized>"
      "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wno-uninitialized,-Wno-maybe-uninitialized>")
  endif()
  # nvcc knows no such warning, so that GPU sources are not written for it.
  target_compile_options(${target} INTERFACE "$<$<COMPILE_LANGUAGE:HIP>:-Wno-sign-compare>")
  target_link_options(${target} INTERFACE
    LINKER:--as-needed LINKER:--gc-sections LINKER:--exclude-libs,ALL
    LINKER:-z,noexecstack LINKER:-z,relro LINKER:-z,now)
  pelton_hide_folders(${target}
    "${CMAKE_CURRENT_SOURCE_DIR}=." "${CMAKE_CURRENT_BINARY_DIR}=build" ${PELTON_PLAN_HIDDEN_FOLDERS})
endfunction()

# pelton_host_options(<interface target> <option>...)
#
# Options of the host compiler, which nvcc has to be told to hand on.
function(pelton_host_options target)
  foreach(option IN LISTS ARGN)
    target_compile_options(${target} INTERFACE
      "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${option}>" "$<$<NOT:$<COMPILE_LANGUAGE:CUDA>>:${option}>")
  endforeach()
endfunction()

# pelton_hide_folders(<interface target> <folder>=<name>...)
#
# Writes <name> wherever the compiler would write <folder> into a binary, under the folder's real path too: a
# checkout can be reached through a symbolic link. The options stand in a file, beside which compilers run: nvcc
# hands options on through a shell, which does not survive every folder's name.
function(pelton_hide_folders target)
  set(text "")
  foreach(pair IN LISTS ARGN)
    string(REGEX MATCH "^(.*)=([^=]*)$" matched "${pair}")
    set(folder "${CMAKE_MATCH_1}")
    set(name "${CMAKE_MATCH_2}")
    file(REAL_PATH "${folder}" real)
    foreach(path IN ITEMS "${folder}" "${real}")
      string(REGEX REPLACE "([\"\\])" "\\\\\\1" quoted "${path}")
      string(APPEND text "\"-ffile-prefix-map=${quoted}=${name}\"\n")
    endforeach()
  endforeach()
  file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/hidden_folders.rsp" "${text}")
  pelton_host_options(${target} @hidden_folders.rsp)
endfunction()

# pelton_harden(<target>)
#
# Properties of every target whose code ends up in a wheel.
function(pelton_harden target)
  set_target_properties(${target} PROPERTIES
    CXX_EXTENSIONS OFF
    CXX_VISIBILITY_PRESET hidden
    CUDA_EXTENSIONS OFF
    CUDA_VISIBILITY_PRESET hidden
    CUDA_RUNTIME_LIBRARY None
    HIP_EXTENSIONS OFF
    HIP_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON
    POSITION_INDEPENDENT_CODE ON
    JOB_POOL_COMPILE compile
    SKIP_BUILD_RPATH ON)
endfunction()

# pelton_install(<target>)
#
# Installs a module into the package. The mode is stated, because CMake's own depends on the distribution.
function(pelton_install target)
  install(TARGETS ${target} LIBRARY DESTINATION "${PELTON_PLAN_PACKAGE}" PERMISSIONS
    OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
endfunction()
