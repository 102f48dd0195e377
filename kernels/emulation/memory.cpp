// What the emulation knows of memory: every access that a kernel makes is reported here, because kernels are
// compiled with the compiler's hooks for data races (-fsanitize=thread) and wrong accesses
// (-fsanitize=bounds,alignment). This file takes the place of the compiler's own runtime for them.
//
// For each byte the last write and the last read are recorded, with the thread and a time that grows at each
// barrier. Two accesses of different threads, one of them a write, must have a barrier between them
// (__syncwarp within a warp), else they are a race, whichever came first in this run. Blocks are never
// ordered among themselves, except by a
// __threadfence and an atomic operation on the same address.
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <unordered_map>

#include "buffers.h"
#include "internal.h"

#define PELTON_EXPORT extern "C" __attribute__((visibility("default")))

namespace pelton::emulation {

const void* reading_for = nullptr;

namespace {

// Fills the library's thread-local memory even when no kernel has static shared memory.
thread_local volatile unsigned char anchor[16];

// --- records ---

constexpr uint16_t kPending = 0x8000, kAtomic = 0x4000, kThreadBits = 0x3ff;  // of `writer`
constexpr uint16_t kWarp = 0x4000, kSeveral = 0x7fff;                         // of `reader`

struct Record {
  uint32_t write_time = 0, read_time = 0;
  uint16_t writer = 0, write_sync = 0;  // sync: of the thread's warp, within the time
  uint16_t reader = 0, read_sync = 0;
};

uint32_t now = 1, block_begin = 1, run_begin = 1;

// Within the time between two barriers: how often the lanes of each warp have waited for each other, and when
// all of them did so last, or two of them.
struct WarpSync {
  uint16_t count = 0, all = 0;
  std::unique_ptr<uint16_t[][32]> pairs;
};
WarpSync warps[kMaxThreads / 32];

bool ordered_in_warp(int warp, int a, int b, uint16_t sync) {
  const WarpSync& w = warps[warp];
  return sync < w.all || (w.pairs && sync < w.pairs[a % 32][b % 32]);
}

// --- order of blocks ---

struct BlockRun {
  uint32_t begin;  // its first time
  Index index;
};
std::vector<BlockRun> blocks;                                // of this run, in the order in which they ran
std::vector<bool> seen;                                      // blocks whose writes the running one may see
std::unordered_map<uintptr_t, std::vector<bool>> published;  // by the address of the atomic operation
bool fenced = false;

size_t block_at(uint32_t time) {
  const auto after = std::upper_bound(blocks.begin(), blocks.end(), time,
                                      [](uint32_t t, const BlockRun& run) { return t < run.begin; });
  return size_t(after - blocks.begin()) - 1;
}

void merge(std::vector<bool>& into, const std::vector<bool>& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) into[i] = into[i] || from[i];
}

void synchronize_on(uintptr_t address) {
  std::vector<bool>& there = published[address];
  merge(seen, there);
  if (!fenced) return;
  seen.resize(std::max(seen.size(), blocks.size()));
  seen[blocks.size() - 1] = true;
  merge(there, seen);
}

// --- regions ---

struct Region {
  uintptr_t begin = 0;
  size_t bytes = 0;
  bool has(uintptr_t address) const { return address - begin < bytes; }
};

Region static_shared, library;
std::vector<Record> static_records, dynamic_records;

// Dynamic shared memory lies at the end of its pages, with pages that nobody can access on both sides.
constexpr size_t kArenaGuard = size_t(1) << 20, kArenaBytes = size_t(1) << 18;
Region arena;
uintptr_t dynamic_begin = 0;
size_t dynamic_bytes = 0;

struct Buffer {
  std::string name;
  uintptr_t begin;
  size_t bytes;
  void* pages = nullptr;  // of a guarded buffer
  size_t page_bytes = 0;
};
std::vector<Buffer> allowed, guarded;
std::string allowed_for;  // the operator

int find_library(dl_phdr_info* info, size_t, void*) {
  const auto own = reinterpret_cast<uintptr_t>(&find_library);
  uintptr_t low = UINTPTR_MAX, high = 0;
  size_t tls = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type == PT_LOAD) {
      low = std::min<uintptr_t>(low, info->dlpi_addr + header.p_vaddr);
      high = std::max<uintptr_t>(high, info->dlpi_addr + header.p_vaddr + header.p_memsz);
    } else if (header.p_type == PT_TLS) {
      tls = header.p_memsz;
    }
  }
  if (own < low || own >= high) return 0;
  library = {low, high - low};
  static_shared = {reinterpret_cast<uintptr_t>(info->dlpi_tls_data), tls};
  return 1;
}

// --- global memory ---

struct Page {
  Record records[kPage];
  uint64_t kept[kPage / 64] = {};  // one bit for each byte that the launch has written
  uint32_t keep_number = 0;
  unsigned char before[kPage], result[kPage];
};
std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
constexpr size_t kCache = 256, kMostPages = 4096;
struct {
  uintptr_t number;
  Page* page;
} cache[kCache];

bool keeping = false, first_run = true;
uint32_t keep_number = 0;
std::vector<uintptr_t> kept_pages;

Page& page_of(uintptr_t address) {
  const uintptr_t number = address / kPage;
  auto& entry = cache[number % kCache];
  if (entry.number == number && entry.page != nullptr) return *entry.page;
  auto& page = pages[number];
  if (!page) page = std::make_unique<Page>();
  entry = {number, page.get()};
  return *page;
}

// Before a write: keeps what is there, byte by byte, because what lies beside it may be somebody else's.
void keep_bytes(Page& page, uintptr_t address, size_t bytes) {
  if (page.keep_number != keep_number) {
    page.keep_number = keep_number;
    std::fill(std::begin(page.kept), std::end(page.kept), 0);
    kept_pages.push_back(address / kPage);
  }
  const auto* from = reinterpret_cast<const unsigned char*>(address);
  for (size_t i = 0, at = address % kPage; i < bytes; ++i, ++at) {
    if (page.kept[at / 64] >> at % 64 & 1) continue;
    page.before[at] = from[i];
    if (!first_run) page.result[at] = from[i];  // the first run left it as it was
    page.kept[at / 64] |= uint64_t(1) << at % 64;
  }
}

// Calls f with the page, the byte's address, and its place in the page.
template <class F>
void for_each_kept_byte(F f) {
  for (uintptr_t number : kept_pages) {
    Page& page = *pages[number];
    for (size_t at = 0; at < kPage; ++at) {
      if (page.kept[at / 64] >> at % 64 & 1) f(page, number * kPage + at, at);
    }
  }
}

// --- texts ---

std::string number(size_t n) { return std::to_string(n); }

// "12 bytes past the end of 'out' (48 bytes)", or where in a buffer an address is.
std::string position(uintptr_t address, const Buffer& buffer) {
  const std::string name = "'" + buffer.name + "' (" + number(buffer.bytes) + " bytes)";
  if (address < buffer.begin) return number(buffer.begin - address) + " bytes before the start of " + name;
  const size_t offset = address - buffer.begin;
  if (offset < buffer.bytes) return "at byte " + number(offset) + " of " + name;
  return number(offset - buffer.bytes) + " bytes past the end of " + name;
}

// Of the buffer that is nearest; empty without buffers.
std::string nearest(uintptr_t address) {
  const Buffer* best = nullptr;
  uintptr_t best_distance = UINTPTR_MAX;
  for (const auto* list : {&allowed, &guarded}) {
    for (const Buffer& buffer : *list) {
      const uintptr_t distance = address < buffer.begin ? buffer.begin - address
                                 : address - buffer.begin < buffer.bytes
                                     ? 0
                                     : address - buffer.begin - buffer.bytes + 1;
      if (distance < best_distance) {
        best = &buffer;
        best_distance = distance;
      }
    }
  }
  return best == nullptr ? "" : position(address, *best);
}

enum class Space { static_shared, dynamic_shared, global };

std::string where(uintptr_t address, Space space) {
  if (space == Space::static_shared) return "static shared memory";
  if (space == Space::dynamic_shared) return "dynamic shared memory, byte " + number(address - dynamic_begin);
  const std::string text = nearest(address);
  char hex[32];
  snprintf(hex, sizeof hex, "0x%zx", size_t(address));
  return "global memory, " + (text.empty() ? std::string(hex) : text);
}

std::string bytes_text(Access access, size_t bytes) {
  const char* does[] = {"reads ", "writes ", "atomically changes "};
  return does[int(access)] + number(bytes) + (bytes == 1 ? " byte" : " bytes");
}

// --- races ---

// The first read of shared memory that nobody had written since the last barrier. A write may still follow:
// then there is a race, and that is what should be said.
Failure uninitialised;

struct Check {
  uintptr_t address;
  size_t bytes;
  Access access;
  Space space;
  const void* place;

  std::string text(const std::string& what, const std::string& end) const {
    return what + ": this thread " + bytes_text(access, bytes) + " of " + where(address, space) + end;
  }
  [[noreturn]] void fail(const std::string& what, const std::string& end) const {
    fail_at(place, text(what, end));
  }
  void note_uninitialised() const {
    if (!uninitialised.text.empty()) return;
    uninitialised = {text("uninitialised shared memory", ", which no thread of the block has written"),
                     running.current, place};
  }
};

// Whether what `thread` did at a time may be at the same time as what the running thread does now.
bool is_unordered(uint32_t time, int thread, uint16_t sync, Space space) {
  if (time < run_begin || time == 0) return false;
  const int me = running.current;
  if (time >= block_begin && async_block()) {
    return time == now && thread != me && !is_async_ordered(thread, sync);
  }
  if (time >= block_begin) {
    return time == now && thread != me &&
           !(thread / 32 == me / 32 && ordered_in_warp(me / 32, thread, me, sync));
  }
  if (space != Space::global) return false;
  const size_t block = block_at(time);
  return !(block < seen.size() && seen[block]);
}

std::string who(uint32_t time, uint16_t code, bool reader) {
  std::string text;
  if (reader && code == kSeveral) {
    text = "several threads";
  } else if (reader && code & kWarp) {
    text = "several lanes of its warp";
    if ((code & kThreadBits) != running.current / 32)
      text = "several lanes of warp " + number(code & kThreadBits);
  } else {
    text = thread_text(code & kThreadBits);
  }
  if (time < block_begin) {
    const Index b = blocks[block_at(time)].index;
    char of[64];
    snprintf(of, sizeof of, " of block (%u,%u,%u)", b.x, b.y, b.z);
    return text + of;
  }
  return text;
}

[[noreturn]] void fail_race(const Check& check, uint32_t time, uint16_t code, const char* did, bool reader) {
  const bool other_block = time < block_begin;
  check.fail(other_block ? "race between blocks" : "race",
             std::string(", which ") + who(time, code, reader) + " " + did +
                 (other_block ? ", and blocks have no order" : ", with no barrier between"));
}

bool reader_is_unordered(const Record& r, Space space) {
  if (r.read_time < run_begin || r.read_time == 0) return false;
  const bool same_time = r.read_time == now;
  // Who has read what before whom is recorded for shared memory alone (check_async).
  if (same_time && async_block() && (r.reader == kSeveral || r.reader & kWarp)) return false;
  if (same_time && r.reader == kSeveral) return true;
  if (same_time && r.reader & kWarp) {
    const int warp = r.reader & kThreadBits;
    return warp != running.current / 32 || r.read_sync >= warps[warp].all;
  }
  return is_unordered(r.read_time, r.reader & kThreadBits, r.read_sync, space);
}

// Whether something that happened at a time can matter: between the same two barriers, or in another block.
inline bool may_be_unordered(uint32_t time) {
  return time >= run_begin && (time == now || time < block_begin);
}

void check_write(const Record& r, const Check& check, bool written) {
  if (written && r.writer & kPending && r.write_time >= block_begin && check.access != Access::atomic) {
    check.fail("cp.async not waited for",
               ", which a copy of " + thread_text(r.writer & kThreadBits) +
                   " has still to fill; that thread must wait for its group first");
  }
  const bool both_atomic = check.access == Access::atomic && r.writer & kAtomic;
  if (!both_atomic && is_unordered(r.write_time, r.writer & kThreadBits, r.write_sync, check.space)) {
    fail_race(check, r.write_time, r.writer, r.writer & kAtomic ? "changed atomically" : "wrote", false);
  }
}

void note_read(Record& r, int me, uint16_t sync, Space space) {
  if (r.read_time == now && r.reader != me && reader_is_unordered(r, space)) {
    const int warp = r.reader == kSeveral ? -1 : r.reader & kWarp ? r.reader & kThreadBits : r.reader / 32;
    r.reader = warp == me / 32 ? uint16_t(kWarp | warp) : kSeveral;
  } else {
    r.reader = uint16_t(me);
  }
  r.read_time = now;
  r.read_sync = sync;
}

void check_records(Record* records, const Check& check) {
  const int me = running.current;
  const uint16_t sync = async_block() ? async_time() : warps[me / 32].count;
  const bool global = check.space == Space::global;
  for (size_t i = 0; i < check.bytes; ++i) {
    Record& r = records[i];
    const bool written = global || r.write_time >= block_begin;
    if (r.writer & kPending || may_be_unordered(r.write_time)) check_write(r, check, written);
    if (check.access != Access::write && !written) check.note_uninitialised();
    if (check.access == Access::read) {
      note_read(r, me, sync, check.space);
      continue;
    }
    if (may_be_unordered(r.read_time) && reader_is_unordered(r, check.space)) {
      fail_race(check, r.read_time, r.reader, "read", true);
    }
    r.write_time = now;
    r.writer = uint16_t(me | (check.access == Access::atomic ? kAtomic : 0));
    r.write_sync = sync;
  }
}

// Marks shared memory as filled by a copy of the running thread that has not been waited for, or no more so.
void mark_pending(uintptr_t address, size_t bytes, bool pending) {
  for (size_t i = 0; i < bytes; ++i) {
    Record& r = static_shared.has(address) ? static_records[address - static_shared.begin + i]
                                           : dynamic_records[address - dynamic_begin + i];
    r.writer = uint16_t(pending ? r.writer | kPending : r.writer & ~kPending);
  }
}

void check_global(const Check& check) {
  if (!allowed.empty()) {
    bool inside = false;
    for (size_t i = 0; i < allowed.size() && !inside; ++i) {
      const uintptr_t offset = check.address - allowed[i].begin;
      inside = offset < allowed[i].bytes && check.bytes <= allowed[i].bytes - offset;
      if (inside && i > 0) std::swap(allowed[0], allowed[i]);  // the next access is likely there, too
    }
    if (!inside) {
      fail_at(check.place, "out of bounds: this thread " + bytes_text(check.access, check.bytes) + " " +
                               nearest(check.address) + ", outside of all tensors of the operator");
    }
  }
  uintptr_t address = check.address;
  for (size_t left = check.bytes; left > 0;) {
    Page& page = page_of(address);
    Check part = check;
    part.address = address;
    part.bytes = std::min(left, kPage - address % kPage);
    if (keeping && check.access != Access::read) {
      reading_for = check.place;  // the address may be wrong: the fault is the kernel's then
      keep_bytes(page, address, part.bytes);
      reading_for = nullptr;
    }
    check_records(page.records + address % kPage, part);
    address += part.bytes;
    left -= part.bytes;
  }
}

}  // namespace

void check_access(const void* pointer, size_t bytes, Access access, const void* place) {
  if (!running.checks) return;  // host code
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const uintptr_t on_stack = address - reinterpret_cast<uintptr_t>(stacks);
  if (on_stack < kMaxThreads * kStackBytes) {
    const int owner = int(on_stack / kStackBytes);
    if (owner != running.current) {
      fail_at(place, "this thread " + bytes_text(access, bytes) + " of a local variable of " +
                         (owner < running.threads ? thread_text(owner) : "another thread"));
    }
    return;
  }
  if (size_t index; async_block() && shared_index(pointer, bytes, index)) {
    return check_async(index, bytes, access, place);
  }
  if (static_shared.has(address)) {
    return check_records(&static_records[address - static_shared.begin],
                         {address, bytes, access, Space::static_shared, place});
  }
  if (arena.has(address)) {
    const uintptr_t offset = address - dynamic_begin;
    if (offset >= dynamic_bytes || bytes > dynamic_bytes - offset) {
      fail_at(place, "out of bounds: this thread " + bytes_text(access, bytes) + " " +
                         position(address, {"dynamic shared memory", dynamic_begin, dynamic_bytes}));
    }
    return check_records(&dynamic_records[offset], {address, bytes, access, Space::dynamic_shared, place});
  }
  if (library.has(address)) return;  // tables of constants
  const auto closure = reinterpret_cast<uintptr_t>(running.launch.closure);
  if (address - closure < running.launch.closure_bytes) return;  // the kernel's arguments
  if (access == Access::atomic) synchronize_on(address);
  check_global({address, bytes, access, Space::global, place});
}

// --- launches, blocks, barriers ---

void begin_launch(size_t bytes, bool keep) {
  anchor[0] = 0;
  dl_iterate_phdr(find_library, nullptr);
  if (arena.bytes == 0) {
    void* memory =
        mmap(nullptr, 2 * kArenaGuard + kArenaBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) abort();
    arena = {reinterpret_cast<uintptr_t>(memory), 2 * kArenaGuard + kArenaBytes};
    mprotect(static_cast<unsigned char*>(memory) + kArenaGuard, kArenaBytes, PROT_READ | PROT_WRITE);
  }
  dynamic_bytes = bytes;
  dynamic_begin = arena.begin + kArenaGuard + kArenaBytes - (bytes + 1023) / 1024 * 1024;
  if (static_records.size() < static_shared.bytes) static_records.resize(static_shared.bytes);
  if (dynamic_records.size() < bytes) dynamic_records.resize(bytes);
  run_begin = now + 1;
  blocks.clear();
  published.clear();
  keeping = keep;
  if (keep && first_run) ++keep_number;
}

void end_launch() {
  if (!keeping) forget_results();
}

void begin_block() {
  // Not a number, or far away, in every type; not the same in the next block.
  const unsigned char poison = blocks.size() % 2 == 0 ? 0xff : 0xfd;
  memset(reinterpret_cast<void*>(static_shared.begin), poison, static_shared.bytes);
  memset(reinterpret_cast<void*>(dynamic_begin), poison, dynamic_bytes);
  block_begin = ++now;
  blocks.push_back({now, running.block});
  seen.clear();
  fenced = false;
  uninitialised = {};
  for (WarpSync& w : warps) w = {};
  begin_async_block();
}

void report_uninitialised() {
  if (uninitialised.text.empty()) return;
  running.failure = std::move(uninitialised);
  uninitialised = {};
}

void order_block() {
  if (!uninitialised.text.empty()) fail_at(nullptr, "");
  ++now;
  for (int w = 0; w <= (running.threads - 1) / 32; ++w) warps[w] = {};
  if (async_block()) order_async_block();
}

void order_warp(unsigned base, uint64_t lanes) {
  if (async_block()) order_async_warp(base, lanes);
  WarpSync& w = warps[base / 32];
  ++w.count;
  if ((lanes & live_lanes(32)) == live_lanes(32)) {
    w.all = w.count;
    return;
  }
  if (!w.pairs) w.pairs = std::make_unique<uint16_t[][32]>(32);
  for (int a = 0; a < 32; ++a) {
    for (int b = 0; b < 32; ++b) {
      if (lanes >> a & lanes >> b & 1) w.pairs[a][b] = w.count;
    }
  }
}

void fence() { fenced = true; }

// --- shared memory by number of byte ---

bool shared_index(const void* pointer, size_t bytes, size_t& index) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (static_shared.has(address)) {
    index = address - static_shared.begin;
    return bytes <= static_shared.bytes - index;
  }
  const uintptr_t offset = address - dynamic_begin;
  if (offset >= dynamic_bytes) return false;
  index = static_shared.bytes + offset;
  return bytes <= dynamic_bytes - offset;
}
unsigned char* shared_at(size_t index) {
  return reinterpret_cast<unsigned char*>(index < static_shared.bytes
                                              ? static_shared.begin + index
                                              : dynamic_begin + (index - static_shared.bytes));
}
size_t shared_bytes() { return static_shared.bytes + dynamic_bytes; }
bool shared_is_written(size_t index) {
  const Record& r =
      index < static_shared.bytes ? static_records[index] : dynamic_records[index - static_shared.bytes];
  return r.write_time >= block_begin;
}
std::string shared_text(uintptr_t address) {
  return where(address, static_shared.has(address) ? Space::static_shared : Space::dynamic_shared);
}
unsigned char* shared_window() { return reinterpret_cast<unsigned char*>(arena.begin + kArenaGuard); }

namespace {
Check async_check(size_t index, size_t bytes, Access access, const void* place) {
  return {reinterpret_cast<uintptr_t>(shared_at(index)), bytes, access,
          index < static_shared.bytes ? Space::static_shared : Space::dynamic_shared, place};
}
}  // namespace
void fail_async(size_t index, size_t bytes, Access access, const void* place, const std::string& what,
                const std::string& end) {
  async_check(index, bytes, access, place).fail(what, ", " + end);
}
void note_async_uninitialised(size_t index, size_t bytes, Access access, const void* place) {
  async_check(index, bytes, access, place).note_uninitialised();
}

void* dynamic_shared() { return reinterpret_cast<void*>(dynamic_begin); }

// --- several runs ---

void keep_results() {
  first_run = false;
  for_each_kept_byte([](Page& page, uintptr_t address, size_t at) {
    page.result[at] = *reinterpret_cast<const unsigned char*>(address);
  });
}

void restore_inputs() {
  for_each_kept_byte([](Page& page, uintptr_t address, size_t at) {
    *reinterpret_cast<unsigned char*>(address) = page.before[at];
  });
}

std::string compare_results() {
  std::string text;
  for_each_kept_byte([&](Page& page, uintptr_t address, size_t at) {
    if (!text.empty() || *reinterpret_cast<const unsigned char*>(address) == page.result[at]) return;
    char was[16];
    snprintf(was, sizeof was, "0x%02x", page.result[at]);
    text = where(address, Space::global) + " is " + was;
  });
  return text;
}

void forget_results() {
  first_run = true;
  kept_pages.clear();
  if (pages.size() <= kMostPages) return;
  pages.clear();
  std::fill(std::begin(cache), std::end(cache), std::remove_reference_t<decltype(cache[0])>{});
}

// --- asynchronous copies ---

void copy_async16(void* shared, const void* global, bool valid) {
  const void* place = __builtin_return_address(0);
  const auto to = reinterpret_cast<uintptr_t>(shared), from = reinterpret_cast<uintptr_t>(global);
  if (to % 16 != 0 || (valid && from % 16 != 0)) {
    fail_at(place, "misaligned cp.async: both addresses must be multiples of 16");
  }
  if (!static_shared.has(to) && !arena.has(to))
    fail_at(place, "cp.async: the target is not in shared memory");
  check_access(shared, 16, Access::write, place);
  if (valid) check_access(global, 16, Access::read, place);
  memset(shared, 0xff, 16);
  mark_pending(to, 16, true);
  Thread& me = running.thread[running.current];
  me.copies.push_back({shared, valid ? global : nullptr, me.copy_group});
}

void copy_async_commit() { ++running.thread[running.current].copy_group; }

void copy_async_wait(int pending) {
  const void* place = __builtin_return_address(0);
  Thread& me = running.thread[running.current];
  const auto is_due = [&](const AsyncCopy& copy) { return copy.group < me.copy_group - pending; };
  for (const AsyncCopy& copy : me.copies) {
    if (!is_due(copy)) continue;
    mark_pending(reinterpret_cast<uintptr_t>(copy.shared), 16, false);
    check_access(copy.shared, 16, Access::write, place);
    if (copy.global != nullptr) {
      memcpy(copy.shared, copy.global, 16);
    } else {
      memset(copy.shared, 0, 16);
    }
  }
  me.copies.erase(std::remove_if(me.copies.begin(), me.copies.end(), is_due), me.copies.end());
}

void read_matrix_row(const void* row, unsigned char (&bytes)[16], const void* place) {
  const auto address = reinterpret_cast<uintptr_t>(row);
  if (address % 16 != 0) fail_at(place, "misaligned ldmatrix: the address of a row must be a multiple of 16");
  if (!static_shared.has(address) && !arena.has(address))
    fail_at(place, "ldmatrix: the row is not in shared memory");
  check_access(row, 16, Access::read, place);
  memcpy(bytes, row, 16);
}

// --- buffers ---

void allow_buffer(const char* op, const char* name, const void* begin, size_t bytes) {
  if (allowed_for != op) allowed.clear();  // those of an operator that failed before its launch
  allowed_for = op;
  if (bytes > 0) allowed.push_back({name, reinterpret_cast<uintptr_t>(begin), bytes});
}
void forget_buffers() { allowed.clear(); }

std::string fault_text(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  char hex[32];
  snprintf(hex, sizeof hex, "0x%zx", size_t(address));
  const uintptr_t on_stack = address - reinterpret_cast<uintptr_t>(stacks);
  if (on_stack < kMaxThreads * kStackBytes && on_stack % kStackBytes < kPage) {
    return "stack overflow: a thread has " + number(kStackBytes) + " bytes for local variables here";
  }
  if (arena.has(address)) {
    return "out of bounds: an access " +
           position(address, {"dynamic shared memory", dynamic_begin, dynamic_bytes});
  }
  if (address < kPage) return "an access through a null pointer";
  const std::string text = nearest(address);
  return std::string("out of bounds: an access to address ") + hex +
         (text.empty() ? ", which is no memory of this process" : ", " + text);
}

}  // namespace pelton::emulation

using namespace pelton::emulation;

// A buffer between pages that nobody can access: it ends at the second one, or begins at the first.
PELTON_EXPORT void* pelton_emulation_allocate(const char* name, size_t bytes, int at_end) {
  const size_t inner = std::max(kPage, (bytes + kPage - 1) / kPage * kPage), all = inner + 2 * kPage;
  void* memory = mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  auto* begin = static_cast<unsigned char*>(memory) + kPage;
  mprotect(begin, inner, PROT_READ | PROT_WRITE);
  if (at_end != 0) begin += inner - bytes;
  guarded.push_back({name, reinterpret_cast<uintptr_t>(begin), bytes, memory, all});
  return begin;
}

PELTON_EXPORT void pelton_emulation_release(void* begin) {
  const auto address = reinterpret_cast<uintptr_t>(begin);
  for (size_t i = 0; i < guarded.size(); ++i) {
    if (guarded[i].begin != address) continue;
    munmap(guarded[i].pages, guarded[i].page_bytes);
    guarded.erase(guarded.begin() + long(i));
    return;
  }
}

// --- the compiler's hooks ---

#define PELTON_PLACE __builtin_return_address(0)
#define PELTON_ACCESS(size)                                                                           \
  extern "C" void __tsan_read##size(void* p) { check_access(p, size, Access::read, PELTON_PLACE); }   \
  extern "C" void __tsan_write##size(void* p) { check_access(p, size, Access::write, PELTON_PLACE); } \
  extern "C" void __tsan_unaligned_read##size(void* p) {                                              \
    check_access(p, size, Access::read, PELTON_PLACE);                                                \
  }                                                                                                   \
  extern "C" void __tsan_unaligned_write##size(void* p) {                                             \
    check_access(p, size, Access::write, PELTON_PLACE);                                               \
  }                                                                                                   \
  extern "C" void __tsan_volatile_read##size(void* p) { before_atomic(p, size); }                     \
  extern "C" void __tsan_volatile_write##size(void* p) { before_atomic(p, size); }                    \
  extern "C" void __tsan_unaligned_volatile_read##size(void* p) { before_atomic(p, size); }           \
  extern "C" void __tsan_unaligned_volatile_write##size(void* p) { before_atomic(p, size); }
PELTON_ACCESS(1)
PELTON_ACCESS(2)
PELTON_ACCESS(4)
PELTON_ACCESS(8)
PELTON_ACCESS(16)

extern "C" void __tsan_read_range(void* p, size_t size) { check_access(p, size, Access::read, PELTON_PLACE); }
extern "C" void __tsan_write_range(void* p, size_t size) {
  check_access(p, size, Access::write, PELTON_PLACE);
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_vptr_update(void**, void*) {}

// std::atomic, in host code of a gpu.cu.
#define PELTON_HOST_ATOMIC(bits, type)                                                                       \
  extern "C" type __tsan_atomic##bits##_load(const volatile type* p, int) {                                  \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                             \
  }                                                                                                          \
  extern "C" void __tsan_atomic##bits##_store(volatile type* p, type value, int) {                           \
    __atomic_store_n(p, value, __ATOMIC_SEQ_CST);                                                            \
  }                                                                                                          \
  extern "C" type __tsan_atomic##bits##_exchange(volatile type* p, type value, int) {                        \
    return __atomic_exchange_n(p, value, __ATOMIC_SEQ_CST);                                                  \
  }                                                                                                          \
  extern "C" type __tsan_atomic##bits##_fetch_add(volatile type* p, type value, int) {                       \
    return __atomic_fetch_add(p, value, __ATOMIC_SEQ_CST);                                                   \
  }                                                                                                          \
  extern "C" int __tsan_atomic##bits##_compare_exchange_strong(volatile type* p, type* old, type value, int, \
                                                               int) {                                        \
    return __atomic_compare_exchange_n(p, old, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);            \
  }
PELTON_HOST_ATOMIC(8, uint8_t)
PELTON_HOST_ATOMIC(16, uint16_t)
PELTON_HOST_ATOMIC(32, uint32_t)
PELTON_HOST_ATOMIC(64, uint64_t)

struct SourcePlace {
  const char* file;
  uint32_t line, column;
};
struct TypeText {
  uint16_t kind, info;
  char name[1];
};
struct OutOfBounds {
  SourcePlace place;
  const TypeText* array;
  const TypeText* index;
};
struct TypeMismatch {
  SourcePlace place;
  const TypeText* type;
  unsigned char log_alignment, kind;
};

// In host code nothing can be ended: it goes on, and the access shows what is wrong.
extern "C" void __ubsan_handle_out_of_bounds(OutOfBounds* data, uintptr_t index) {
  if (!running.checks) return;
  const bool is_signed = data->index->info & 1;
  fail_at(PELTON_PLACE, "out of bounds: index " +
                            (is_signed ? std::to_string(intptr_t(index)) : std::to_string(index)) +
                            " of an array " + data->array->name);
}
extern "C" void __ubsan_handle_type_mismatch_v1(TypeMismatch* data, uintptr_t address) {
  if (!running.checks) return;
  const size_t alignment = size_t(1) << data->log_alignment;
  if (address == 0) fail_at(PELTON_PLACE, "an access through a null pointer");
  if (address % alignment == 0) return;
  fail_at(PELTON_PLACE, "misaligned access: " + nearest(address) + ", address " +
                            std::to_string(address % 64) + " modulo 64, must be a multiple of " +
                            number(alignment) + " for " + data->type->name);
}
