// CPU graphs: a recorded sequence of kernel steps, run again by one call.
// Capture records each op's step with the tensors it uses; replay walks the list without Python.
// The idea is CUDA graphs' (stream capture), so the engine drives both the same way.
#include <memory>
#include <mutex>
#include <unordered_map>

#include "op.h"

namespace pelton {
namespace {

struct Graph {
  std::vector<std::function<void()>> steps;
  std::vector<Tensor> uses;  // keeps the memory that the steps point into
};

thread_local std::unique_ptr<Graph> capturing;
std::mutex mutex;
std::unordered_map<int64_t, std::shared_ptr<const Graph>> graphs;
int64_t next_id = 1;

void graph_begin_capture() {
  PELTON_CHECK(!capturing, "cpu_graph_begin: this thread is capturing a graph already");
  capturing = std::make_unique<Graph>();
}

int64_t graph_end_capture() {
  PELTON_CHECK(capturing, "cpu_graph_end: no capture was begun on this thread");
  std::shared_ptr<const Graph> graph = std::move(capturing);
  const std::lock_guard lock(mutex);
  graphs.emplace(next_id, std::move(graph));
  return next_id++;
}

void graph_abort_capture() { capturing.reset(); }

std::shared_ptr<const Graph> find(const char* op, int64_t id) {
  const std::lock_guard lock(mutex);
  const auto it = graphs.find(id);
  PELTON_CHECK(it != graphs.end(), op, ": there is no graph ", id);
  return it->second;
}

void graph_replay(int64_t id) {
  PELTON_CHECK(!capturing, "cpu_graph_replay: not while capturing");
  const auto graph = find("cpu_graph_replay", id);  // held, should another thread free it meanwhile
  for (const auto& step : graph->steps) step();
}

int64_t graph_num_steps(int64_t id) { return int64_t(find("cpu_graph_num_steps", id)->steps.size()); }

void graph_free(int64_t id) {
  find("cpu_graph_free", id);
  const std::lock_guard lock(mutex);
  graphs.erase(id);
}

}  // namespace

void submit(std::function<void()> step, std::initializer_list<std::reference_wrapper<const Tensor>> uses) {
  step();
  if (!capturing) return;
  capturing->uses.insert(capturing->uses.end(), uses.begin(), uses.end());
  capturing->steps.push_back(std::move(step));
}

}  // namespace pelton

STABLE_TORCH_LIBRARY_FRAGMENT(pelton, m) {
  m.def("cpu_graph_begin() -> ()");
  m.def("cpu_graph_end() -> int");
  m.def("cpu_graph_abort() -> ()");
  m.def("cpu_graph_replay(int graph) -> ()");
  m.def("cpu_graph_num_steps(int graph) -> int");
  m.def("cpu_graph_free(int graph) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(pelton, CompositeExplicitAutograd, m) {
  m.impl("cpu_graph_begin", TORCH_BOX(&pelton::graph_begin_capture));
  m.impl("cpu_graph_end", TORCH_BOX(&pelton::graph_end_capture));
  m.impl("cpu_graph_abort", TORCH_BOX(&pelton::graph_abort_capture));
  m.impl("cpu_graph_replay", TORCH_BOX(&pelton::graph_replay));
  m.impl("cpu_graph_num_steps", TORCH_BOX(&pelton::graph_num_steps));
  m.impl("cpu_graph_free", TORCH_BOX(&pelton::graph_free));
}
