# CUDA sources as HIP sources in the build folder.
include_guard(GLOBAL)

# pelton_hipify(<python> <project> <torch> <folder> NAMES <name>... OUTPUTS <name>...)
#
# One command for each file of the project (NAMES): it makes the file of the same position in OUTPUTS below <folder>,
# when its source has changed. <torch> is the folder of the torch package, whose hipify is used, <project> that of pelton.
function(pelton_hipify python project torch folder)
  cmake_parse_arguments(PARSE_ARGV 4 arg "" "" "NAMES;OUTPUTS")
  foreach(name output IN ZIP_LISTS arg_NAMES arg_OUTPUTS)
    add_custom_command(
      OUTPUT "${folder}/${output}"
      COMMAND "${CMAKE_COMMAND}" -E env --unset=PYTHONSAFEPATH
        "${python}" -X utf8 -m pelton_build hipify --torch "${torch}" --name "${name}"
        "${project}/${name}" "${folder}/${output}"
      WORKING_DIRECTORY "${project}/python"
      DEPENDS "${project}/${name}" "${project}/python/pelton_build/hipify.py"
      COMMENT "Hipify ${name}"
      VERBATIM)
  endforeach()
endfunction()
