// Barriers, copies and products of hopper.h, and the order that they make between accesses to shared memory.
//
// A block that has such a barrier is checked otherwise than memory.cpp says: its threads are ordered in
// pairs, not all at once. A warp's time grows whenever one of its lanes lets others know what it has done (an
// arrival, __syncwarp, __syncthreads). `knows` of a thread says up to which time it knows of each other
// thread; an access is ordered after another one when the thread knows of a later time than that one's. The
// copy engine counts as one more thread.
#include <algorithm>
#include <unordered_map>

#include "internal.h"

namespace pelton::emulation {
namespace {

using Time = uint32_t;
using Knowledge = std::vector<Time>;  // by thread; the last is the copy engine

struct ThreadSide {
  Knowledge knows;
  Time fenced = 0;  // ordinary stores before this time are visible to wgmma
};

struct ByteBarrier {
  int arrivals = 0, missing = 0;
  int64_t bytes = 0;  // expected and not there
  unsigned phase = 0;
  Knowledge gathered, known;  // of those that arrived; of all phases that are over
  std::vector<int> waiting;
};

struct NamedBarrier {
  int arrived = 0, threads = 0;
  Knowledge gathered;
  std::vector<int> waiting;
};

struct BulkCopy {
  std::vector<unsigned char> bytes;  // of shared memory from `to` on, as they lie there
  std::vector<size_t> places;        // of pieces of 16 bytes: in the window of shared memory
  uintptr_t barrier;
  Time time;
};

struct Product {
  float* d;
  int n, group;
  bool add, is_bf16, rows_of_n, a_is_shared;
  uint32_t a_tile, b_tile;
  float a[2][16];
  std::vector<float> before;  // of the sums, when no product that runs has them already
};

struct Lane {
  std::vector<Product> products;
  int group = 0;
};

// The last write of a byte of shared memory.
struct Write {
  Time time = 0;
  uint16_t writer = 0;
  bool there = false, pending = false, atomic = false, ordinary = false;
};
// The lanes of a warp that have read it since, at this time or before.
struct Reads {
  uint32_t lanes = 0;
  Time time = 0;
};

bool active = false;
int threads = 0, warps = 0;
std::vector<ThreadSide> sides;
std::vector<Lane> lanes;
std::vector<Time> times;  // of warps, then of the copy engine
std::unordered_map<uintptr_t, ByteBarrier> barriers;
std::vector<NamedBarrier> named;
std::vector<BulkCopy> copies;  // under way
std::vector<Write> writes;     // of shared memory, static and then dynamic
std::vector<Reads> reads;      // the same, for each warp

Time& time_of(int thread) { return times[thread == threads ? warps : thread / 32]; }

void learn(Knowledge& into, const Knowledge& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

// The running thread lets `into` know what it has done.
void tell(Knowledge& into) {
  const int me = running.current;
  Knowledge& own = sides[me].knows;
  own[me] = ++time_of(me);
  learn(into, own);
}

bool ordered(int thread, Time time) { return sides[running.current].knows[thread] > time; }

void begin() {
  active = true;
  threads = running.threads;
  warps = (threads + 31) / 32;
  sides.assign(threads, {Knowledge(threads + 1), 0});
  lanes.assign(threads, {});
  times.assign(warps + 1, 1);
  named.assign(16, {});
  const size_t bytes = shared_bytes();
  writes.assign(bytes, {});
  reads.assign(bytes * warps, {});
  // What was written before is before the first barrier for all.
  for (size_t i = 0; i < bytes; ++i) writes[i].there = shared_is_written(i);
}

ByteBarrier& barrier_at(const void* address, const void* place) {
  const auto found = barriers.find(reinterpret_cast<uintptr_t>(address));
  if (found == barriers.end()) fail_at(place, "a barrier that was not initialised");
  return found->second;
}

std::string bytes_text(int64_t count) { return std::to_string(count) + (count == 1 ? " byte" : " bytes"); }

// Ends the phase when everything is there.
void settle(ByteBarrier& b) {
  if (b.missing > 0 || b.bytes != 0) return;
  b.missing = b.arrivals;
  ++b.phase;
  b.known = b.gathered;
  std::sort(b.waiting.begin(), b.waiting.end());
  if (!b.waiting.empty()) make_ready(b.waiting);
  b.waiting.clear();
}

void arrive_at(AsyncBarrier* barrier, int bytes, const void* place) {
  ByteBarrier& b = barrier_at(barrier, place);
  if (b.missing == 0) {
    fail_at(place, "more arrivals at a barrier than the " + std::to_string(b.arrivals) +
                       " that it was initialised for, or bytes that never come");
  }
  tell(b.gathered);
  --b.missing;
  b.bytes += bytes;
  settle(b);
}

void land(const BulkCopy& copy) {
  for (size_t i = 0; i < copy.places.size(); ++i) {
    memcpy(shared_at(copy.places[i]), copy.bytes.data() + 16 * i, 16);
    for (int k = 0; k < 16; ++k) writes[copy.places[i] + k].pending = false;
  }
  ByteBarrier& b = barriers[copy.barrier];
  b.gathered.resize(threads + 1);
  b.gathered[threads] = std::max(b.gathered[threads], copy.time + 1);
  b.bytes -= int64_t(copy.bytes.size());
  settle(b);
}

// Starts a copy whose bytes are known already. Its target must be nobody's any more.
void start(BulkCopy copy, AsyncBarrier& barrier, const void* place) {
  barrier_at(&barrier, place);
  const int engine = threads;
  copy.barrier = reinterpret_cast<uintptr_t>(&barrier);
  copy.time = time_of(engine)++;
  for (size_t at : copy.places) {
    check_async(at, 16, Access::write, place);
    for (int k = 0; k < 16; ++k) {
      writes[at + k] = {copy.time, uint16_t(engine), true, true, false, false};
    }
    memset(shared_at(at), 0xff, 16);
  }
  if (running.order == Order::forward) return land(copy);
  copies.push_back(std::move(copy));
}

// --- products ---

// Where the address after swizzling is: bits 4 to 6 are changed by bits 7 to 9.
uint32_t swizzled(uint32_t at) { return at ^ (at >> 7 & 7) << 4; }

// The offset in the window of element (row, k) of a tile: rows of K, or rows of N.
uint32_t element_at(uint32_t tile, bool rows_of_n, int row, int k) {
  const uint32_t start = (tile & 0x3fff) << 4, next_columns = (tile >> 16 & 0x3fff) << 4;
  const uint32_t at = rows_of_n ? start + row / 64 * next_columns + k / 8 * 1024 + k % 8 * 128 + row % 64 * 2
                                : start + row / 8 * 1024 + row % 8 * 128 + k * 2;
  return swizzled(at);
}

// Elements from `at` on, as numbers.
void read_elements(const Product& p, uint32_t at, int count, float* to) {
  uint16_t bits[8];
  memcpy(bits, shared_window() + at, 2 * count);
  for (int i = 0; i < count; ++i) to[i] = p.is_bf16 ? half_value<true>(bits[i]) : half_value<false>(bits[i]);
}

void check_elements(uint32_t at, size_t bytes, const void* place) {
  const unsigned char* address = shared_window() + at;
  size_t index;
  if (!shared_index(address, bytes, index)) {
    fail_at(place, "wgmma reads outside of the block's dynamic shared memory");
  }
  check_async(index, bytes, Access::read, place, true);
}

void execute(Product& p, const void* place) {
  const int lane = running.current % 32, warp = running.current / 32 % 4;
  const int group = lane / 4, pair = lane % 4;
  if (p.a_is_shared) {
    for (int r = 0; r < 2; ++r) {
      for (int k = 0; k < 16; k += 8) {
        const uint32_t at = element_at(p.a_tile, false, 16 * warp + group + 8 * r, k);
        if (pair == 0) check_elements(at, 16, place);
        read_elements(p, at, 8, p.a[r] + k);
      }
    }
  }
  if (!p.before.empty()) std::copy(p.before.begin(), p.before.end(), p.d);
  for (int i = 0; i < p.n / 8; ++i) {
    const int column = 8 * i + 2 * pair;
    // A warp reads each element once: its first four lanes check all columns.
    float b[2][16];
    for (int k = 0; p.rows_of_n && k < 16; ++k) {
      const uint32_t at = element_at(p.b_tile, true, column, k);
      if (group == 0) check_elements(at, 4, place);
      float both[2];
      read_elements(p, at, 2, both);
      b[0][k] = both[0], b[1][k] = both[1];
    }
    for (int e = 0; e < 2; ++e) {
      for (int k = 0; !p.rows_of_n && k < 16; k += 8) {
        const uint32_t at = element_at(p.b_tile, false, column + e, k);
        if (group == 0) check_elements(at, 16, place);
        read_elements(p, at, 8, b[e] + k);
      }
      double sums[2] = {};
      for (int k = 0; k < 16; ++k) {
        for (int r = 0; r < 2; ++r) sums[r] += double(p.a[r][k]) * double(b[e][k]);
      }
      for (int r = 0; r < 2; ++r) {
        float& d = p.d[4 * i + 2 * r + e];
        d = float(p.add ? d + sums[r] : sums[r]);
      }
    }
  }
}

void issue(Product p) {
  Lane& own = lanes[running.current];
  p.group = own.group;
  bool runs = false;
  for (const Product& other : own.products) runs = runs || other.d == p.d;
  if (p.add && !runs) p.before.assign(p.d, p.d + p.n / 2);
  std::fill(p.d, p.d + p.n / 2, NAN);
  own.products.push_back(std::move(p));
}

// Gives each lane its two rows of A.
void finish_rows(Lanes& all) {
  uint16_t a[16][16];
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 8; ++i) {
      a[lane / 4 + 8 * (i / 2 % 2)][2 * (lane % 4) + i % 2 + 8 * (i / 4)] = all.input<uint16_t>(lane, 2 * i);
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int r = 0; r < 2; ++r) memcpy(all.out[lane] + 32 * r, a[lane / 4 + 8 * r], 32);
  }
}

void begin_once() {
  if (!active) begin();
}

}  // namespace

// --- what the runtime calls ---

bool async_block() { return active; }

void begin_async_block() {
  active = false;
  barriers.clear();
  copies.clear();
}

bool land_next_copy() {
  if (copies.empty()) return false;
  const BulkCopy copy = std::move(copies.front());
  copies.erase(copies.begin());
  land(copy);
  return true;
}

void order_async_block() {
  Knowledge all(threads + 1);
  for (int t = 0; t < threads; ++t) {
    sides[t].knows[t] = time_of(t) + 1;
    learn(all, sides[t].knows);
  }
  for (int w = 0; w < warps; ++w) ++times[w];
  for (ThreadSide& side : sides) side.knows = all;
}

void order_async_warp(unsigned base, uint64_t present) {
  Knowledge all;
  for (int i = 0; i < 32; ++i) {
    if (!(present >> i & 1)) continue;
    Knowledge& knows = sides[base + i].knows;
    knows[base + i] = times[base / 32] + 1;
    learn(all, knows);
  }
  ++times[base / 32];
  for (int i = 0; i < 32; ++i) {
    if (present >> i & 1) sides[base + i].knows = all;
  }
}

uint16_t async_time() { return uint16_t(std::min<Time>(time_of(running.current), UINT16_MAX)); }

bool is_async_ordered(int thread, uint16_t time) { return time == UINT16_MAX || ordered(thread, time); }

void check_async(size_t index, size_t bytes, Access access, const void* place, bool by_product) {
  const int me = running.current, warp = me / 32;
  for (size_t i = index; i < index + bytes; ++i) {
    Write& w = writes[i];
    if (w.pending)
      fail_async(index, bytes, access, place, "bulk copy not waited for", "which it has still to fill");
    const bool both_atomic = access == Access::atomic && w.atomic;
    if (w.there && w.time > 0 && w.writer != me && !both_atomic && !ordered(w.writer, w.time)) {
      fail_async(index, bytes, access, place, "race",
                 (w.writer == threads ? std::string("which a bulk copy") : "which " + thread_text(w.writer)) +
                     " wrote, with no barrier between");
    }
    if (by_product && w.ordinary && w.writer != threads && sides[w.writer].fenced <= w.time) {
      fail_async(index, bytes, access, place, "wgmma reads what ordinary stores wrote",
                 "and " + thread_text(w.writer) + " has not called fence_shared_stores after them");
    }
    // A product may read rows of a tile that nobody has written and nobody needs: their sums are poison.
    if (access != Access::write && !w.there && !by_product)
      note_async_uninitialised(index, bytes, access, place);
    Reads* const of_warps = &reads[i * warps];
    if (access == Access::read) {
      Reads& r = of_warps[warp];
      // Readers that this thread comes after are covered by it.
      uint32_t left = 0;
      for (uint32_t rest = r.lanes; rest != 0; rest &= rest - 1) {
        const int lane = __builtin_ctz(rest);
        if (!ordered(32 * warp + lane, r.time)) left |= 1u << lane;
      }
      r = {left | 1u << me % 32, time_of(me)};
      continue;
    }
    for (int other = 0; other < warps; ++other) {
      Reads& r = of_warps[other];
      for (uint32_t rest = r.lanes; rest != 0; rest &= rest - 1) {
        const int reader = 32 * other + __builtin_ctz(rest);
        if (reader != me && !ordered(reader, r.time)) {
          fail_async(index, bytes, access, place, "race",
                     "which " + thread_text(reader) + " read, with no barrier between");
        }
      }
      r = {};
    }
    w = {time_of(me), uint16_t(me), true, false, access == Access::atomic, true};
  }
}

std::string async_whereabouts(int thread) {
  for (const auto& [address, b] : barriers) {
    if (std::find(b.waiting.begin(), b.waiting.end(), thread) == b.waiting.end()) continue;
    return "waits for phase " + std::to_string(b.phase) + " of the barrier at " + shared_text(address) +
           ": " + std::to_string(b.missing) + " arrivals and " + bytes_text(b.bytes) + " are missing";
  }
  for (size_t i = 0; i < named.size(); ++i) {
    const NamedBarrier& b = named[i];
    if (std::find(b.waiting.begin(), b.waiting.end(), thread) == b.waiting.end()) continue;
    return "waits at named barrier " + std::to_string(i) + ", where " + std::to_string(b.arrived) + " of " +
           std::to_string(b.threads) + " threads have arrived";
  }
  return "waits";
}

// --- what kernels call ---

void AsyncBarrier::init(int arrivals) {
  const void* place = __builtin_return_address(0);
  if (reinterpret_cast<uintptr_t>(this) % 8 != 0)
    fail_at(place, "misaligned barrier: must be a multiple of 8");
  if (arrivals < 1) fail_at(place, "a barrier needs at least one arrival");
  begin_once();
  ByteBarrier& b = barriers[reinterpret_cast<uintptr_t>(this)];
  b = {};
  b.arrivals = b.missing = arrivals;
  b.gathered.assign(threads + 1, 0);
}

void AsyncBarrier::arrive() { arrive_at(this, 0, __builtin_return_address(0)); }
void AsyncBarrier::arrive_and_expect(int bytes) { arrive_at(this, bytes, __builtin_return_address(0)); }

void AsyncBarrier::wait(int parity) {
  ByteBarrier& b = barrier_at(this, __builtin_return_address(0));
  if (int(b.phase & 1) == parity) {
    b.waiting.push_back(running.current);
    wait_async();
  }
  learn(sides[running.current].knows, b.known);
}

void fence_shared_stores() {
  begin_once();
  sides[running.current].fenced = ++time_of(running.current);
}

namespace {
NamedBarrier& arrive_named(int barrier, int count, const void* place) {
  begin_once();
  if (barrier < 1 || barrier > 15) fail_at(place, "named barriers have the numbers 1 to 15");
  if (count % 32 != 0 || count < 32) fail_at(place, "a named barrier is for whole warps");
  NamedBarrier& b = named[barrier];
  if (b.arrived > 0 && b.threads != count) {
    fail_at(place, "named barrier " + std::to_string(barrier) + " is for " + std::to_string(count) +
                       " threads here and for " + std::to_string(b.threads) + " where others wait");
  }
  b.threads = count;
  tell(b.gathered);
  if (++b.arrived < count) return b;
  std::sort(b.waiting.begin(), b.waiting.end());
  for (int t : b.waiting) learn(sides[t].knows, b.gathered);
  learn(sides[running.current].knows, b.gathered);
  if (!b.waiting.empty()) make_ready(b.waiting);
  b = {};
  return b;
}
}  // namespace

void named_sync(int barrier, int count) {
  NamedBarrier& b = arrive_named(barrier, count, __builtin_return_address(0));
  if (b.arrived == 0) return;  // this was the last
  b.waiting.push_back(running.current);
  wait_async();
}
void named_arrive(int barrier, int count) { arrive_named(barrier, count, __builtin_return_address(0)); }

bool make_map(TensorMap& map, const void* data, int rank, const uint64_t* sizes, const uint64_t* strides,
              const uint32_t* box) {
  map = {};
  map.data = static_cast<const unsigned char*>(data);
  map.rank = rank;
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0 || box[0] * 2 != 128) return false;
  for (int i = 0; i < rank; ++i) {
    map.sizes[i] = sizes[i];
    map.strides[i] = i == 0 ? 2 : strides[i - 1];
    map.box[i] = box[i];
    if (sizes[i] == 0 || sizes[i] > uint64_t(1) << 32 || box[i] == 0 || box[i] > 256) return false;
    if (i > 0 && (map.strides[i] % 16 != 0 || map.strides[i] >= uint64_t(1) << 40)) return false;
  }
  return true;
}

void copy_box(void* to, const TensorMap& map, AsyncBarrier& barrier, const int* at) {
  const void* place = __builtin_return_address(0);
  begin_once();
  size_t rows = 1;
  for (int i = 1; i < map.rank; ++i) rows *= map.box[i];
  size_t first;
  if (!shared_index(to, rows * 128, first))
    fail_at(place, "a bulk copy to outside of the block's shared memory");
  const auto begin = uint32_t(static_cast<unsigned char*>(to) - shared_window());
  if (begin % 128 != 0) fail_at(place, "misaligned bulk copy: a box must begin at a multiple of 128");
  BulkCopy copy{};
  for (size_t row = 0; row < rows; ++row) {
    const unsigned char* from = map.data;
    bool inside = true;
    size_t rest = row;
    for (int i = 1; i < map.rank; ++i) {
      const int64_t x = at[i] + int64_t(rest % map.box[i]);
      rest /= map.box[i];
      inside = inside && x >= 0 && uint64_t(x) < map.sizes[i];
      from += x * int64_t(map.strides[i]);
    }
    for (int piece = 0; piece < 8; ++piece) {
      unsigned char bytes[16] = {};
      for (int e = 0; e < 8; ++e) {
        const int64_t x = at[0] + int64_t(8 * piece + e);
        if (!inside || x < 0 || uint64_t(x) >= map.sizes[0]) continue;
        check_access(from + 2 * x, 2, Access::read, place);
        memcpy(bytes + 2 * e, from + 2 * x, 2);
      }
      copy.bytes.insert(copy.bytes.end(), bytes, bytes + 16);
      size_t index;
      shared_index(shared_window() + swizzled(uint32_t(begin + 128 * row + 16 * piece)), 16, index);
      copy.places.push_back(index);
    }
  }
  start(std::move(copy), barrier, place);
}

void copy_bulk(void* to, const void* from, int bytes, AsyncBarrier& barrier) {
  const void* place = __builtin_return_address(0);
  begin_once();
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0 ||
      bytes % 16 != 0) {
    fail_at(place, "misaligned bulk copy: addresses and size must be multiples of 16");
  }
  size_t first;
  if (!shared_index(to, size_t(bytes), first))
    fail_at(place, "a bulk copy to outside of the block's shared memory");
  BulkCopy copy{};
  for (int i = 0; i < bytes; i += 16) {
    const auto* piece = static_cast<const unsigned char*>(from) + i;
    check_access(piece, 16, Access::read, place);
    copy.bytes.insert(copy.bytes.end(), piece, piece + 16);
    copy.places.push_back(first + size_t(i));
  }
  start(std::move(copy), barrier, place);
}

uint32_t tile_descriptor(const void* tile, int next_columns) {
  const auto at = uint32_t(static_cast<const unsigned char*>(tile) - shared_window());
  if (at % 16 != 0 || at >= 1u << 18) {
    fail_at(__builtin_return_address(0), "a tile of wgmma outside of dynamic shared memory, or misaligned");
  }
  return uint32_t(next_columns >> 4) << 16 | at >> 4;
}

template <bool IsBf16>
void product_registers(float* d, int n, const uint32_t* a, uint32_t b, bool rows_of_n, bool add) {
  begin_once();
  uint16_t rows[2][16];
  meet({"wgmma.mma_async", ~uint64_t(0), 32, 16, sizeof rows, finish_rows, 0, false, true}, a, rows);
  Product p{};
  p.d = d, p.n = n, p.add = add, p.is_bf16 = IsBf16, p.rows_of_n = rows_of_n, p.b_tile = b;
  for (int r = 0; r < 2; ++r) {
    for (int k = 0; k < 16; ++k) p.a[r][k] = half_value<IsBf16>(rows[r][k]);
  }
  issue(std::move(p));
}
template <bool IsBf16>
void product_shared(float* d, int n, uint32_t a, uint32_t b, bool add) {
  begin_once();
  meet({"wgmma.mma_async", ~uint64_t(0), 32, 0, 0, nullptr, -1, false, true}, nullptr, nullptr);
  Product p{};
  p.d = d, p.n = n, p.add = add, p.is_bf16 = IsBf16, p.a_is_shared = true, p.a_tile = a, p.b_tile = b;
  issue(std::move(p));
}
template void product_registers<false>(float*, int, const uint32_t*, uint32_t, bool, bool);
template void product_registers<true>(float*, int, const uint32_t*, uint32_t, bool, bool);
template void product_shared<false>(float*, int, uint32_t, uint32_t, bool);
template void product_shared<true>(float*, int, uint32_t, uint32_t, bool);

void product_commit() {
  begin_once();
  ++lanes[running.current].group;
}

void product_wait(int pending) {
  const void* place = __builtin_return_address(0);
  begin_once();
  Lane& own = lanes[running.current];
  const auto is_due = [&](const Product& p) { return p.group < own.group - pending; };
  for (Product& p : own.products) {
    if (is_due(p)) execute(p, place);
  }
  own.products.erase(std::remove_if(own.products.begin(), own.products.end(), is_due), own.products.end());
  // All lanes come here together, so that one of them may say for the warp that a tile has been read.
  meet({"wgmma.wait_group", ~uint64_t(0), 32, 0, 0, nullptr, -1, true, true}, nullptr, nullptr);
}

}  // namespace pelton::emulation
