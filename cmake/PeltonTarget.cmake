# What all targets have in common.
include_guard(GLOBAL)

# pelton_add_options(<target>)
#
# An interface target with the C++ standard, the warnings, and the folders of this machine kept out of the binaries.
function(pelton_add_options target)
  add_library(${target} INTERFACE)
  target_compile_features(${target} INTERFACE cxx_std_${PELTON_PLAN_CXX_STANDARD})
  # Sections, so that the linker leaves out what nobody calls: most of a libstdc++ that is linked in whole objects.
  target_compile_options(${target} INTERFACE -Wall -Wextra -ffunction-sections -fdata-sections)
  # GCC finds its own AVX-512 headers' undefined vectors in every caller (its bug 105593): thousands of lines.
  target_compile_options(${target} INTERFACE
    $<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized> $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  target_link_options(${target} INTERFACE
    LINKER:--as-needed LINKER:--gc-sections LINKER:--exclude-libs,ALL
    LINKER:-z,noexecstack LINKER:-z,relro LINKER:-z,now)
  pelton_hide_folder(${target} "${CMAKE_CURRENT_SOURCE_DIR}" ".")
  pelton_hide_folder(${target} "${CMAKE_CURRENT_BINARY_DIR}" "build")
  foreach(pair IN LISTS PELTON_PLAN_HIDDEN_FOLDERS)
    string(REGEX MATCH "^(.*)=([^=]*)$" matched "${pair}")
    pelton_hide_folder(${target} "${CMAKE_MATCH_1}" "${CMAKE_MATCH_2}")
  endforeach()
endfunction()

# pelton_hide_folder(<interface target> <folder> <name>)
#
# Writes <name> wherever the compiler would write <folder> into a binary, under the folder's real path too: a
# checkout can be reached through a symbolic link.
function(pelton_hide_folder target folder name)
  file(REAL_PATH "${folder}" real)
  foreach(path IN ITEMS "${folder}" "${real}")
    target_compile_options(${target} INTERFACE "-ffile-prefix-map=${path}=${name}")
  endforeach()
endfunction()

# pelton_harden(<target>)
#
# Properties of every target whose code ends up in a wheel.
function(pelton_harden target)
  set_target_properties(${target} PROPERTIES
    CXX_EXTENSIONS OFF
    CXX_VISIBILITY_PRESET hidden
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
