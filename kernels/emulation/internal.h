// What the parts of the emulation's runtime share.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "emulation.h"

namespace pelton::emulation {

constexpr int kMaxThreads = 1024;
constexpr size_t kStackBytes = size_t(1) << 17, kPage = 4096;

template <bool IsBf16>
float half_value(uint16_t bits) {
  if constexpr (IsBf16) {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
  } else {
    _Float16 value;
    memcpy(&value, &bits, 2);
    return float(value);
  }
}

// Of a thread, in the order of the block: x fastest.
enum class State : uint8_t { ready, in_warp_call, at_barrier, in_async_wait, done };

struct Barrier {
  const char* name = nullptr;
  const char* file = nullptr;
  int line = 0;
};

struct Meeting {
  WarpCall call;
  unsigned base = 0;  // the group's first thread
  uint64_t arrived = 0;
  int to_leave = 0;
  Lanes lanes;
};

struct AsyncCopy {
  void* shared;
  const void* global;  // null: zeros
  int group;
};

struct Thread {
  void* stack_pointer = nullptr;
  State state = State::ready;
  Index index{};
  Meeting* meeting = nullptr;  // that it waits in
  Barrier barrier;             // that it waits at
  std::vector<AsyncCopy> copies;
  int copy_group = 0;
  unsigned atomics = 0;  // since it last waited
};

enum class Order { forward, reverse, shuffled };

struct Failure {
  std::string text;             // empty: none
  int thread = -1;              // -1: of the whole block
  const void* place = nullptr;  // in the code
};

// The launch that runs now. There is one at a time in the process.
struct Running {
  Launch launch;
  Index block{}, block_size{}, grid_size{};
  int threads = 0;
  int wave = 32;
  Order order = Order::forward;
  uint64_t random = 0;
  uint64_t block_number = 0;  // x fastest

  std::vector<Thread> thread;
  int current = -1;                             // the thread that runs; -1: the scheduler
  bool checks = false;                          // accesses are those of a kernel
  std::vector<int> ready;                       // the next one at the back
  std::vector<uint64_t> live;                   // by 64 threads
  std::vector<std::vector<Meeting*>> meetings;  // that lanes wait in, by 64 threads
  int live_count = 0, at_barrier = 0, barrier_sum = 0, barrier_result = 0;
  Barrier barrier;
  void* scheduler = nullptr;  // its stack pointer
  Failure failure;
};

extern Running running;

// Ends the calling thread's kernel with an error. `place` is an address in the code that did it, or null.
[[noreturn]] void fail_at(const void* place, std::string text);

// "thread (3,0,0)"
std::string thread_text(int thread);

// The next number of the launch's pseudorandom sequence.
uint64_t next_random();

extern unsigned char* stacks;  // of all threads

// --- memory.cpp ---

enum class Access : uint8_t { read, write, atomic };

// Before a launch, and after: memory as the checks see it.
void begin_launch(size_t dynamic_bytes, bool keep);
void end_launch();
// A new block, whose shared memory holds poison.
void begin_block();
// All threads of the block, or the lanes of a warp, have waited for each other.
void order_block();
void order_warp(unsigned base, uint64_t lanes);

// A read of shared memory that nobody had written becomes the block's failure, unless a race explained it
// before.
void report_uninitialised();

// One access of the running thread.
void check_access(const void* address, size_t bytes, Access access, const void* place);

// Where in a kernel the access is that the checks themselves read memory for; null at other times.
extern const void* reading_for;

// Shared memory by number of byte, static and then dynamic; false for what does not lie in it.
bool shared_index(const void* address, size_t bytes, size_t& index);
unsigned char* shared_at(size_t index);
size_t shared_bytes();
bool shared_is_written(size_t index);  // since the block began
std::string shared_text(uintptr_t address);
unsigned char* shared_window();  // from here on dynamic shared memory is numbered for wgmma

// The text for an address that cannot be accessed.
std::string fault_text(const void* address);

// --- hopper.cpp ---

// Whether the block has barriers that count bytes, and its accesses are checked by check_async.
bool async_block();
void begin_async_block();
void order_async_block();
void order_async_warp(unsigned base, uint64_t lanes);
// Lets a bulk copy that is under way land; false when there is none.
bool land_next_copy();
void check_async(size_t index, size_t bytes, Access access, const void* place, bool by_product = false);
// For global memory: the time of an access of the running thread, and whether it comes after one.
uint16_t async_time();
bool is_async_ordered(int thread, uint16_t time);
// What a thread in State::in_async_wait waits for.
std::string async_whereabouts(int thread);

// Of memory.cpp, for check_async: an access that is wrong, or that reads what nobody has written.
[[noreturn]] void fail_async(size_t index, size_t bytes, Access access, const void* place,
                             const std::string& what, const std::string& end);
void note_async_uninitialised(size_t index, size_t bytes, Access access, const void* place);

// Of runtime.cpp: makes threads ready, in ascending order, and lets the running one wait until that happens.
void make_ready(std::vector<int>& threads);
void wait_async();

// With `keep`, what a launch writes can be undone, so that it may run again and be compared with its first
// run.
void keep_results();            // after the first run
std::string compare_results();  // after another one: empty when both wrote the same
void restore_inputs();          // before another one
void forget_results();

}  // namespace pelton::emulation
