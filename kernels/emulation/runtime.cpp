// Runs kernels on the CPU: a block's threads as fibers, its barriers and warp operations, launches and their
// errors.
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <unordered_map>

#include "internal.h"

// Saves what a function must keep on the stack, and goes on where another fiber did the same. (ucontext does
// the same with a system call a switch, ten times slower.)
extern "C" void pelton_emulation_switch(void** save, void* load);
asm(R"(
.text
.hidden pelton_emulation_switch
.globl pelton_emulation_switch
.type pelton_emulation_switch, @function
pelton_emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size pelton_emulation_switch, .-pelton_emulation_switch
)");

namespace pelton::emulation {

Running running;
unsigned char* stacks = nullptr;

namespace {

// --- fibers ---

Thread& self() { return running.thread[running.current]; }

uint64_t bit(int i) { return uint64_t(1) << i; }

// Goes on with the next thread that is ready, or with the scheduler when there is none.
void switch_away(void** save) {
  Running& b = running;
  while (b.ready.empty() && land_next_copy()) {
  }
  if (b.ready.empty()) {
    b.current = -1;
    pelton_emulation_switch(save, b.scheduler);
    return;
  }
  b.current = b.ready.back();
  b.ready.pop_back();
  void** const next = &b.thread[b.current].stack_pointer;
  if (next != save) pelton_emulation_switch(save, *next);
}

}  // namespace

void make_ready(std::vector<int>& threads) {
  Running& b = running;
  for (int t : threads) b.thread[t].state = State::ready;
  bool behind =
      false;  // behind those that are ready: else a warp runs to the next barrier before others begin
  if (b.order == Order::forward) {
    std::reverse(threads.begin(), threads.end());
  } else if (b.order == Order::shuffled) {
    for (size_t i = threads.size(); i > 1; --i) std::swap(threads[i - 1], threads[next_random() % i]);
    behind = next_random() % 2 == 0;
  }
  b.ready.insert(behind ? b.ready.begin() : b.ready.end(), threads.begin(), threads.end());
}

void wait_async() {
  self().state = State::in_async_wait;
  switch_away(&self().stack_pointer);
}

namespace {

std::string place_text(const Barrier& barrier) {
  return std::string(barrier.name) + "() at " + barrier.file + ":" + std::to_string(barrier.line);
}

void finish_meeting(Meeting& m);
bool is_complete(const Meeting& m);

[[noreturn]] void end_thread() {
  Running& b = running;
  Thread& me = self();
  const int t = b.current;
  me.state = State::done;
  --b.live_count;
  b.live[t / 64] &= ~bit(t % 64);
  if (b.at_barrier > 0) {
    fail_at(nullptr,
            "divergent barrier: this thread has returned from the kernel, and others wait for it in " +
                place_text(b.barrier));
  }
  auto& waiting = b.meetings[t / 64];
  for (size_t i = 0; i < waiting.size();) {
    if (is_complete(*waiting[i])) {
      finish_meeting(*waiting[i]);
    } else {
      ++i;
    }
  }
  switch_away(&me.stack_pointer);
  __builtin_unreachable();
}

[[noreturn]] void begin_thread() {
  running.launch.call(running.launch.closure);
  end_thread();
}

void prepare_thread(int t) {
  Running& b = running;
  Thread& thread = b.thread[t];
  const unsigned x = b.block_size.x, y = b.block_size.y;
  thread.index = {t % x, t / x % y, t / (x * y)};
  thread.meeting = nullptr;
  thread.copies.clear();
  thread.copy_group = 0;
  thread.atomics = 0;
  // As after a call of the switch: six registers, the address to return to, and the stack as a function finds
  // it.
  void** top = reinterpret_cast<void**>(stacks + size_t(t + 1) * kStackBytes) - 8;
  std::fill(top, top + 8, nullptr);
  top[6] = reinterpret_cast<void*>(&begin_thread);
  thread.stack_pointer = top;
}

// --- warp operations ---

std::vector<std::unique_ptr<Meeting>> all_meetings;
std::vector<Meeting*> free_meetings;

uint64_t live_of(unsigned base, int width) {
  const uint64_t live = running.live[base / 64] >> base % 64;
  return width == 64 ? live : live & 0xffffffffu;
}

bool is_complete(const Meeting& m) { return m.arrived == (m.call.mask & live_of(m.base, m.call.width)); }

std::string lanes_text(unsigned base, uint64_t lanes) {
  std::string text;
  int count = 0;
  for (int i = 0; i < 64; ++i) {
    if (!(lanes >> i & 1)) continue;
    if (++count > 4) return text + " and others";
    text += (count > 1 ? ", " : "") + thread_text(int(base) + i);
  }
  return text;
}

// All lanes are there: makes the results and lets the waiting ones go on.
void finish_meeting(Meeting& m) {
  Running& b = running;
  m.lanes.present = m.arrived;
  m.to_leave = __builtin_popcountll(m.arrived);
  if (m.call.needs_all && m.arrived != (m.call.width == 64 ? ~uint64_t(0) : 0xffffffffu)) {
    fail_at(nullptr, std::string(m.call.name) + " needs all " + std::to_string(m.call.width) +
                         " lanes, and some have returned or do not exist");
  }
  if (m.call.finish != nullptr) {
    b.checks = false;
    m.call.finish(m.lanes);
    b.checks = true;
  }
  if (m.call.orders_memory) order_warp(m.base, m.arrived);
  auto& waiting = b.meetings[m.base / 64];
  waiting.erase(std::find(waiting.begin(), waiting.end(), &m));
  static std::vector<int> released;
  released.clear();
  for (int i = 0; i < m.call.width; ++i) {
    const int t = int(m.base) + i;
    if (m.arrived >> i & 1 && t != b.current) released.push_back(t);
  }
  make_ready(released);
}

Meeting& new_meeting(const WarpCall& call, unsigned base) {
  if (free_meetings.empty()) {
    all_meetings.push_back(std::make_unique<Meeting>());
    free_meetings.push_back(all_meetings.back().get());
  }
  Meeting& m = *free_meetings.back();
  free_meetings.pop_back();
  m.call = call;
  m.base = base;
  m.arrived = 0;
  running.meetings[base / 64].push_back(&m);
  return m;
}

std::string mask_text(uint64_t mask, int width) {
  char text[32];
  snprintf(text, sizeof text, width == 64 ? "0x%016llx" : "0x%08llx", static_cast<unsigned long long>(mask));
  return text;
}

// The meeting that the calling lane belongs to by its mask; a new one when it is the first.
Meeting& meeting_for(const WarpCall& call, unsigned base, int lane) {
  for (Meeting* m : running.meetings[base / 64]) {
    if (m->base != base || m->call.width != call.width) continue;
    const bool concerns = m->call.mask >> lane & 1 || m->arrived & call.mask;
    if (!concerns) continue;
    if (m->call.mask == call.mask && m->call.finish == call.finish &&
        (m->call.name == call.name || strcmp(m->call.name, call.name) == 0))
      return *m;
    fail_at(nullptr, std::string("divergent warp operation: this thread is in ") + call.name + " with mask " +
                         mask_text(call.mask, call.width) + ", and " + lanes_text(base, m->arrived) + " in " +
                         m->call.name + " with mask " + mask_text(m->call.mask, m->call.width));
  }
  return new_meeting(call, base);
}

// --- a block ---

// What a thread that does not go on waits for.
std::string whereabouts(int t) {
  const Thread& thread = running.thread[t];
  if (thread.state == State::at_barrier) return "waits in " + place_text(thread.barrier);
  if (thread.state == State::in_warp_call) return std::string("waits in ") + thread.meeting->call.name;
  if (thread.state == State::in_async_wait) return async_whereabouts(t);
  return "has returned from the kernel";
}

// Nobody can go on: says why.
void explain_deadlock() {
  Running& b = running;
  for (const auto& waiting : b.meetings) {
    for (const Meeting* m : waiting) {
      const uint64_t missing = m->call.mask & live_of(m->base, m->call.width) & ~m->arrived;
      const int first = int(m->base) + __builtin_ctzll(missing);
      b.failure = {std::string("divergent warp operation: ") + lanes_text(m->base, m->arrived) + " wait in " +
                       m->call.name + " (mask " + mask_text(m->call.mask, m->call.width) + ") for " +
                       thread_text(first) + ", which " + whereabouts(first),
                   -1, nullptr};
      return;
    }
  }
  // A thread for each thing that is waited for.
  std::string text, last;
  for (int t = 0; t < b.threads; ++t) {
    if (b.thread[t].state != State::in_async_wait) continue;
    const std::string here = whereabouts(t);
    if (here != last) text += (text.empty() ? ": " : "; ") + thread_text(t) + " " + here;
    last = here;
  }
  b.failure = {"deadlock" + text, -1, nullptr};
}

void run_block() {
  Running& b = running;
  begin_block();
  b.live_count = b.threads;
  b.at_barrier = b.barrier_sum = 0;
  b.ready.clear();
  for (auto& waiting : b.meetings) {
    free_meetings.insert(free_meetings.end(), waiting.begin(), waiting.end());  // of a block that failed
    waiting.clear();
  }
  std::fill(b.live.begin(), b.live.end(), 0);
  static std::vector<int> all;
  all.resize(b.threads);
  std::iota(all.begin(), all.end(), 0);
  for (int t = 0; t < b.threads; ++t) {
    b.live[t / 64] |= bit(t % 64);
    prepare_thread(t);
  }
  make_ready(all);
  b.checks = true;
  switch_away(&b.scheduler);
  b.checks = false;
  if (b.failure.text.empty()) report_uninitialised();
  if (b.failure.text.empty() && b.live_count > 0) explain_deadlock();
}

// --- faults ---

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
struct sigaction old_actions[4];
pthread_t launching_thread;
struct {
  int signal;
  void* address;
  void* place;
} fault;

// Where a thread goes on after a fault, on its own stack, which nobody needs any more.
[[noreturn]] void after_fault() {
  // Like an address to return to.
  const void* place = reading_for != nullptr ? reading_for : static_cast<const char*>(fault.place) + 1;
  reading_for = nullptr;
  switch (fault.signal) {
    case SIGFPE:
      fail_at(place, "integer division by zero");
    case SIGILL:
      fail_at(place, "undefined behaviour that the compiler turned into a trap");
    default:
      fail_at(place, fault_text(fault.address));
  }
}

void on_signal(int signal, siginfo_t* info, void* context) {
  if (running.current < 0 || !pthread_equal(pthread_self(), launching_thread)) {
    for (int i = 0; i < 4; ++i) {
      if (kSignals[i] == signal) sigaction(signal, &old_actions[i], nullptr);  // it happens again, there
    }
    return;
  }
  auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  fault = {signal, info->si_addr, reinterpret_cast<void*>(registers[REG_RIP])};
  const auto top = reinterpret_cast<uintptr_t>(stacks) + size_t(running.current + 1) * kStackBytes;
  registers[REG_RSP] = greg_t(top - 8);
  registers[REG_RIP] = greg_t(&after_fault);
}

// While it lives, faults of this thread are errors of the kernel.
class FaultsCaught {
 public:
  FaultsCaught() {
    static unsigned char stack[1 << 16];
    launching_thread = pthread_self();
    stack_t own{};
    own.ss_sp = stack;
    own.ss_size = sizeof stack;
    sigaltstack(&own, &old_stack_);
    struct sigaction action{};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 4; ++i) sigaction(kSignals[i], &action, &old_actions[i]);
  }
  ~FaultsCaught() {
    for (int i = 0; i < 4; ++i) sigaction(kSignals[i], &old_actions[i], nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  stack_t old_stack_;
};

// --- settings ---

struct OrderChoice {
  Order order;
  uint64_t seed;
  std::string text;
};

struct Settings {
  int wave = 32;
  bool is_sm90 = false;
  std::vector<OrderChoice> orders;
  std::string error;
};

// From the environment, because the tests set it and nothing of it belongs into an operator.
Settings read_settings() {
  Settings s;
  if (const char* wave = getenv("PELTON_EMULATION_WAVE"); wave != nullptr && *wave != '\0') {
    s.wave = atoi(wave);
    if (strcmp(wave, "32") != 0 && strcmp(wave, "64") != 0) {
      s.error = std::string("PELTON_EMULATION_WAVE must be 32 or 64, found ") + wave;
    }
  }
  if (const char* arch = getenv("PELTON_EMULATION_ARCH"); arch != nullptr && *arch != '\0') {
    s.is_sm90 = strcmp(arch, "sm_90") == 0;
    if (!s.is_sm90 && strcmp(arch, "sm_80") != 0) {
      s.error = std::string("PELTON_EMULATION_ARCH must be sm_80 or sm_90, found ") + arch;
    }
  }
  const char* orders = getenv("PELTON_EMULATION_ORDERS");
  std::string text = orders == nullptr || *orders == '\0' ? "forward" : orders;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    begin = end + 1;
    if (word == "forward") {
      s.orders.push_back({Order::forward, 0, word});
    } else if (word == "reverse") {
      s.orders.push_back({Order::reverse, 0, word});
    } else if (word.rfind("shuffled:", 0) == 0 && word.size() > 9 &&
               word.find_first_not_of("0123456789", 9) == std::string::npos) {
      s.orders.push_back({Order::shuffled, strtoull(word.c_str() + 9, nullptr, 10), word});
    } else {
      s.error =
          "PELTON_EMULATION_ORDERS must list forward, reverse and shuffled:SEED with commas between, found " +
          text;
      return s;
    }
  }
  return s;
}

// --- launches ---

constexpr int kMultiprocessors = 8;
constexpr int kSharedWithoutAsking = 48 * 1024;

std::mutex launching;
hipError_t last_error = hipSuccess;
std::string last_text;
std::unordered_map<const void*, int> allowed_shared;

int most_shared(const Settings& s) { return s.is_sm90 ? 227 * 1024 : s.wave == 64 ? 64 * 1024 : 163 * 1024; }

void set_error(hipError_t error, std::string text) {
  last_error = error;
  last_text = std::move(text);
}

// "(3,0,0)"
std::string index_text(Index i) {
  return "(" + std::to_string(i.x) + "," + std::to_string(i.y) + "," + std::to_string(i.z) + ")";
}

// The kernel as the source names it, without the parentheses that hipify puts around it.
std::string kernel_text(const char* name) {
  std::string text = name;
  while (!text.empty() && (text.front() == '(' || text.front() == ' ')) text.erase(0, 1);
  while (!text.empty() && (text.back() == ')' || text.back() == ' ')) text.pop_back();
  return text;
}

// Lines of the source for an address to return to; empty when nothing tells them.
std::string source_text(const void* place) {
  Dl_info info;
  if (place == nullptr || dladdr(place, &info) == 0 || info.dli_fname == nullptr) return "";
  const auto offset = static_cast<const char*>(place) - static_cast<const char*>(info.dli_fbase) - 1;
  std::string quoted;
  for (const char* c = info.dli_fname; *c != '\0'; ++c)
    quoted += *c == '\'' ? std::string("'\\''") : std::string(1, *c);
  char address[32];
  snprintf(address, sizeof address, "0x%tx", offset);
  std::string text;
  if (FILE* pipe = popen(("addr2line -i -e '" + quoted + "' " + address + " 2>/dev/null").c_str(), "r")) {
    char line[512];
    for (int frames = 0; frames < 4 && fgets(line, sizeof line, pipe) != nullptr;) {
      std::string one = line;
      one = one.substr(0, one.find_first_of(" \n"));
      for (const char* top : {"/kernels/", "/tests/"}) {  // sources are named from the project's folder on
        if (const size_t at = one.rfind(top); at != std::string::npos) one.erase(0, at + 1);
      }
      if (one.rfind("??", 0) == 0 || one.find("/c++/") != std::string::npos ||
          one.find("kernels/emulation/") != std::string::npos) {
        continue;
      }
      text += (frames++ == 0 ? "" : ", called at ") + one;
    }
    pclose(pipe);
  }
  return text.empty() ? std::string(info.dli_fname) + "+" + address : text;
}

std::string failure_text(const OrderChoice& order) {
  const Running& b = running;
  const Failure& f = b.failure;
  std::string text =
      kernel_text(b.launch.name) + ", block " + index_text(b.block) + " of " + index_text(b.grid_size);
  if (f.thread >= 0) text += ", " + thread_text(f.thread) + " of " + index_text(b.block_size);
  if (order.order != Order::forward) text += ", order " + order.text;
  text += ": " + f.text;
  if (const std::string source = source_text(f.place); !source.empty()) text += " [" + source + "]";
  return text;
}

// What the runtime refuses to launch; empty when nothing is wrong.
std::string refusal(const Launch& l, const Settings& settings) {
  const uint64_t threads = uint64_t(l.block.x) * l.block.y * l.block.z;
  const auto grid = Index{l.grid.x, l.grid.y, l.grid.z}, block = Index{l.block.x, l.block.y, l.block.z};
  if (threads == 0 || threads > kMaxThreads || l.block.z > 64) {
    return "a block must have 1 to 1024 threads, at most 64 in z, found " + index_text(block);
  }
  if (l.grid.x == 0 || l.grid.y == 0 || l.grid.z == 0 || l.grid.x > INT_MAX || l.grid.y > 65535 ||
      l.grid.z > 65535) {
    return "a grid must have 1 to 2147483647 blocks in x and 1 to 65535 in y and z, found " +
           index_text(grid);
  }
  const auto found = allowed_shared.find(l.kernel);
  const size_t most = found == allowed_shared.end() ? kSharedWithoutAsking : size_t(found->second);
  if (l.shared > most || l.shared > size_t(most_shared(settings))) {
    return std::to_string(l.shared) + " bytes of dynamic shared memory are more than the " +
           std::to_string(most) +
           " that the kernel may use; a kernel asks for more than 49152 with allow_shared_memory";
  }
  return "";
}

void run_grid(const OrderChoice& order) {
  Running& b = running;
  const uint64_t count = uint64_t(b.grid_size.x) * b.grid_size.y * b.grid_size.z;
  b.order = order.order;
  b.random = order.seed * 2 + 1;
  std::vector<uint32_t> shuffled;
  if (order.order == Order::shuffled) {
    shuffled.resize(count);
    std::iota(shuffled.begin(), shuffled.end(), 0);
    for (size_t i = count; i > 1; --i) std::swap(shuffled[i - 1], shuffled[next_random() % i]);
  }
  for (uint64_t i = 0; i < count && b.failure.text.empty(); ++i) {
    b.block_number = order.order == Order::forward   ? i
                     : order.order == Order::reverse ? count - 1 - i
                                                     : shuffled[i];
    const uint64_t x = b.grid_size.x, y = b.grid_size.y, n = b.block_number;
    b.block = {unsigned(n % x), unsigned(n / x % y), unsigned(n / (x * y))};
    run_block();
  }
}

void allocate_stacks() {
  if (stacks != nullptr) return;
  void* memory = mmap(nullptr, kMaxThreads * kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) abort();
  stacks = static_cast<unsigned char*>(memory);
  for (int t = 0; t < kMaxThreads; ++t) mprotect(stacks + size_t(t) * kStackBytes, kPage, PROT_NONE);
  running.thread.resize(kMaxThreads);
}

}  // namespace

// --- what threads call ---

Index thread_index() noexcept { return self().index; }
Index block_index() noexcept { return running.block; }
Index block_size() noexcept { return running.block_size; }
Index grid_size() noexcept { return running.grid_size; }
int wave_size() noexcept { return running.wave; }
int wanted_wave() {
  const char* wave = getenv("PELTON_EMULATION_WAVE");
  return wave == nullptr ? 0 : atoi(wave);
}
int lane_of(int width) noexcept { return running.current % width; }
uint64_t live_lanes(int width) { return live_of(unsigned(running.current / width * width), width); }

std::string thread_text(int thread) { return "thread " + index_text(running.thread[thread].index); }

uint64_t next_random() {  // xorshift64*
  uint64_t& x = running.random;
  x ^= x >> 12;
  x ^= x << 25;
  x ^= x >> 27;
  return (x * 0x2545f4914f6cdd1dull) >> 32;
}

void fail_at(const void* place, std::string text) {
  Running& b = running;
  if (text.rfind("race", 0) != 0) report_uninitialised();  // what follows from it is less to the point
  if (b.failure.text.empty()) b.failure = {std::move(text), b.current, place};
  b.checks = false;
  b.current = -1;
  void* unused;
  pelton_emulation_switch(&unused, b.scheduler);
  __builtin_unreachable();
}

void fail(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  fail_at(__builtin_return_address(0), text);
}

void yield() {
  Running& b = running;
  if (b.ready.empty()) return;
  b.ready.insert(b.ready.begin(), b.current);
  switch_away(&self().stack_pointer);
}

int sync_threads(const char* name, const char* file, int line, int value) {
  Running& b = running;
  Thread& me = self();
  const Barrier here{name, file, line};
  if (b.live_count < b.threads) {
    int gone = 0;
    while (b.live[gone / 64] >> gone % 64 & 1) ++gone;
    fail_at(nullptr, "divergent barrier: this thread waits in " + place_text(here) + ", and " +
                         thread_text(gone) + " has returned from the kernel");
  }
  if (b.at_barrier == 0) {
    b.barrier = here;
  } else if (b.barrier.line != line || strcmp(b.barrier.file, file) != 0 ||
             strcmp(b.barrier.name, name) != 0) {
    fail_at(nullptr, "divergent barrier: this thread waits in " + place_text(here) + ", and others in " +
                         place_text(b.barrier));
  }
  b.barrier_sum += value;
  me.atomics = 0;
  if (++b.at_barrier < b.threads) {
    me.barrier = here;
    me.state = State::at_barrier;
    switch_away(&me.stack_pointer);
    return b.barrier_result;
  }
  b.barrier_result = b.barrier_sum;
  b.at_barrier = b.barrier_sum = 0;
  order_block();
  static std::vector<int> others;
  others.clear();
  for (int t = 0; t < b.threads; ++t) {
    if (t != b.current) others.push_back(t);
  }
  make_ready(others);
  return b.barrier_result;
}

void meet(const WarpCall& given, const void* in, void* out) {
  Running& b = running;
  Thread& me = self();
  WarpCall call = given;
  const unsigned base = unsigned(b.current / call.width * call.width);
  const int lane = b.current - int(base);
  if (call.width == 32) call.mask &= 0xffffffffu;
  if (!(call.mask >> lane & 1)) {
    fail_at(__builtin_return_address(0), std::string(call.name) + ": the mask " +
                                             mask_text(call.mask, call.width) +
                                             " does not name the calling lane, " + std::to_string(lane));
  }
  Meeting& m = meeting_for(call, base, lane);
  if (call.in_bytes > 0) memcpy(m.lanes.in[lane], in, call.in_bytes);
  m.arrived |= bit(lane);
  if (is_complete(m)) {
    finish_meeting(m);
  } else {
    me.meeting = &m;
    me.state = State::in_warp_call;
    switch_away(&me.stack_pointer);
  }
  const int source = call.source;
  if (call.out_bytes > 0 && call.finish != nullptr) {
    memcpy(out, m.lanes.out[lane], call.out_bytes);
  } else if (call.out_bytes > 0) {
    if (source < 0 || source >= call.width || !(m.arrived >> source & 1)) {
      fail_at(__builtin_return_address(0), std::string(call.name) + ": reads lane " + std::to_string(source) +
                                               ", which is inactive: it is not in the mask " +
                                               mask_text(call.mask, call.width) + " or has returned");
    }
    memcpy(out, m.lanes.in[source], call.out_bytes);
  }
  if (--m.to_leave == 0) free_meetings.push_back(&m);
}

uint64_t vote(const char* name, uint64_t mask, int width, bool predicate) {
  const auto finish = [](Lanes& lanes) {
    uint64_t bits = 0;
    for (int i = 0; i < 64; ++i) {
      if (lanes.present >> i & 1) bits |= uint64_t(lanes.in[i][0]) << i;
    }
    for (int i = 0; i < 64; ++i) lanes.output(i, bits);
  };
  const unsigned char in = predicate;
  uint64_t bits;
  meet({name, mask, width, 1, sizeof bits, finish, 0}, &in, &bits);
  return bits;
}

void before_atomic(void* address, size_t bytes) {
  constexpr unsigned kTurn = 64, kTooMany = 1u << 22;
  Thread& me = self();
  check_access(address, bytes, Access::atomic, __builtin_return_address(0));
  if (++me.atomics % kTurn != 0) return;
  if (me.atomics > kTooMany) {
    fail_at(__builtin_return_address(0),
            "waits without end in a loop of atomic operations; blocks run one after another here, so a block "
            "must not "
            "wait for a later one");
  }
  yield();
}

// --- launch ---

void run(const Launch& launch) {
  const std::lock_guard<std::mutex> lock(launching);
  if (last_error != hipSuccess) return;  // as a device that has failed
  const Settings settings = read_settings();
  if (!settings.error.empty()) return set_error(hipErrorInvalidValue, settings.error);
  if (const std::string reason = refusal(launch, settings); !reason.empty()) {
    return set_error(hipErrorInvalidConfiguration, kernel_text(launch.name) + ": " + reason);
  }
  allocate_stacks();
  Running& b = running;
  b.launch = launch;
  b.wave = settings.wave;
  b.block_size = {launch.block.x, launch.block.y, launch.block.z};
  b.grid_size = {launch.grid.x, launch.grid.y, launch.grid.z};
  b.threads = int(launch.block.x * launch.block.y * launch.block.z);
  b.live.assign(size_t(b.threads + 63) / 64, 0);
  b.meetings.resize(b.live.size());
  b.failure = {};
  const FaultsCaught caught;
  for (size_t i = 0; i < settings.orders.size(); ++i) {
    begin_launch(launch.shared, settings.orders.size() > 1);
    run_grid(settings.orders[i]);
    end_launch();
    if (!b.failure.text.empty()) {
      set_error(hipErrorLaunchFailure, failure_text(settings.orders[i]));
      forget_results();
      return;
    }
    if (settings.orders.size() == 1) return;
    if (i == 0) {
      keep_results();
    } else if (const std::string difference = compare_results(); !difference.empty()) {
      set_error(hipErrorLaunchFailure, kernel_text(launch.name) +
                                           ": the result depends on the order of threads: " + difference +
                                           " after order " + settings.orders[0].text +
                                           " and another after order " + settings.orders[i].text);
      forget_results();
      return;
    }
    if (i + 1 < settings.orders.size()) restore_inputs();
  }
  forget_results();
}

}  // namespace pelton::emulation

using namespace pelton::emulation;

hipError_t hipGetLastError() {
  const hipError_t error = last_error;
  last_error = hipSuccess;
  return error;
}
hipError_t hipPeekAtLastError() { return last_error; }

const char* hipGetErrorString(hipError_t error) {
  if (error == hipSuccess) return "no error";
  return last_text.c_str();
}

const char* hipGetErrorName(hipError_t error) {
  switch (error) {
    case hipSuccess:
      return "hipSuccess";
    case hipErrorInvalidValue:
      return "hipErrorInvalidValue";
    case hipErrorInvalidConfiguration:
      return "hipErrorInvalidConfiguration";
    case hipErrorLaunchFailure:
      return "hipErrorLaunchFailure";
  }
  return "unknown error";
}

hipError_t hipFuncSetAttribute(const void* kernel, hipFuncAttribute attribute, int value) {
  if (attribute != hipFuncAttributeMaxDynamicSharedMemorySize) return hipSuccess;
  const Settings settings = read_settings();
  if (value < 0 || value > most_shared(settings)) {
    last_text = "a kernel asked for " + std::to_string(value) +
                " bytes of dynamic shared memory, and a block has " + std::to_string(most_shared(settings));
    return hipErrorInvalidValue;
  }
  const std::lock_guard<std::mutex> lock(launching);
  allowed_shared[kernel] = std::max(value, kSharedWithoutAsking);
  return hipSuccess;
}

hipError_t hipGetDevice(int* device) {
  *device = 0;
  return hipSuccess;
}

hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int) {
  const Settings settings = read_settings();
  switch (attribute) {
    case hipDeviceAttributeMultiprocessorCount:
      *value = kMultiprocessors;
      return hipSuccess;
    case hipDeviceAttributeMaxSharedMemoryPerBlock:
      *value = most_shared(settings);
      return hipSuccess;
    case hipDeviceAttributeComputeCapabilityMajor:
      *value = settings.is_sm90 ? 9 : 8;
      return hipSuccess;
    case hipDeviceAttributeComputeCapabilityMinor:
      *value = 0;
      return hipSuccess;
    case hipDeviceAttributeWarpSize:
      *value = settings.wave;
      return hipSuccess;
  }
  return hipErrorInvalidValue;
}

hipError_t hipMemcpyAsync(void* to, const void* from, size_t bytes, hipMemcpyKind, hipStream_t) {
  memmove(to, from, bytes);
  return hipSuccess;
}

hipError_t hipMemsetAsync(void* to, int value, size_t bytes, hipStream_t) {
  memset(to, value, bytes);
  return hipSuccess;
}

hipError_t hipPointerGetAttributes(hipPointerAttribute_t* attributes, const void* pointer) {
  void* same = const_cast<void*>(pointer);
  *attributes = {hipMemoryTypeHost, same, same};
  return hipSuccess;
}
