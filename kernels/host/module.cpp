// pelton._host: what is host-only and ours, built once for each Python. Nothing here knows torch.
// Its twin in Python is pelton/_host_py.py; both give equal results, and pelton/host.py chooses.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "blake2b.h"
#include "cpu_probe.h"

namespace py = pybind11;

// Which Python this file was built for, to be read from the file before it is loaded (pelton/host.py, the
// audit).
static constexpr char kMark[] = "PELTON_HOST_SOABI=" PELTON_HOST_SOABI;

namespace pelton::host {
namespace {

constexpr std::size_t kDigest = 16;

py::list names(const std::vector<std::string>& texts) {
  py::list list;
  for (const std::string& text : texts) list.append(py::str(text));
  return list;
}

py::dict cpu_features() {
  const CpuFeatures found = probe_cpu();
  py::dict result;
  result["vendor"] = py::str(found.vendor);
  result["flags"] = names(found.flags);
  result["off"] = names(found.off);
  return result;
}

std::vector<int64_t> to_tokens(const py::sequence& token_ids) {
  std::vector<int64_t> tokens;
  tokens.reserve(token_ids.size());
  for (const py::handle id : token_ids) {
    // Python's own conversion, so that errors are the twin's: TypeError and OverflowError.
    const long long token = PyLong_AsLongLong(id.ptr());
    if (token == -1 && PyErr_Occurred()) throw py::error_already_set();
    tokens.push_back(token);
  }
  return tokens;
}

py::list chain_block_hashes(const py::bytes& parent, const py::sequence& token_ids, int64_t block_size) {
  if (block_size < 1)
    throw py::value_error("block_size must be at least 1, found " + std::to_string(block_size));
  const std::vector<int64_t> tokens = to_tokens(token_ids);
  std::string before = parent;
  py::list hashes;
  for (std::size_t end = std::size_t(block_size); end <= tokens.size(); end += std::size_t(block_size)) {
    Blake2b hash(kDigest);
    hash.update(std::as_bytes(std::span(before)));
    hash.update(
        std::as_bytes(std::span(tokens).subspan(end - std::size_t(block_size), std::size_t(block_size))));
    before.assign(kDigest, '\0');
    hash.finish(reinterpret_cast<std::byte*>(before.data()));
    hashes.append(py::bytes(before));
  }
  return hashes;
}

py::dict module_info() {
  py::dict result;
  result["implementation"] = "extension";
  result["python"] = py::str(kMark).attr("partition")("=").attr("__getitem__")(2);
  result["compiler"] = PELTON_HOST_COMPILER;
  return result;
}

}  // namespace
}  // namespace pelton::host

PYBIND11_MODULE(_host, m, py::mod_gil_not_used()) {
  m.doc() = "Host-only parts of pelton in C++; use them through pelton.host.";
  m.def("cpu_features", &pelton::host::cpu_features,
        "vendor, flags (usable on this system, as Linux names them) and off (the system does not save their "
        "registers)");
  m.def("chain_block_hashes", &pelton::host::chain_block_hashes, py::arg("parent"), py::arg("token_ids"),
        py::arg("block_size"),
        "BLAKE2b-128 of each full block of int64 tokens, chained: hash(parent + tokens). Returns a list of "
        "bytes.");
  m.def("module_info", &pelton::host::module_info,
        "implementation, python (SOABI) and compiler of this module");
}
