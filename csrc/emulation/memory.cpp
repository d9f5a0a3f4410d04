#include "memory.h"

#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <shared_mutex>

#include "emu.h"

namespace emu {
namespace {

constexpr size_t kArenaBytes = 1ull << 34;  // address space only: pages come on first touch
constexpr size_t kGap = 64 << 10;           // between allocations: an index that is off by a page still lands in nobody's buffer

struct Memory {
  std::shared_mutex mutex;
  std::map<uintptr_t, Range> ranges;  // by base
  std::atomic<uint64_t> version{1};
  unsigned char* arena = nullptr;
  size_t used = 0;
};

Memory& memory() {
  static Memory m;
  return m;
}

struct Cache {
  const Range* range = nullptr;
  uint64_t version = 0;
};
thread_local Cache cache;

}  // namespace

void* allocate(size_t bytes, const char* label) {
  Memory& m = memory();
  std::unique_lock lock(m.mutex);
  if (!m.arena) {
    void* base = mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return nullptr;
    m.arena = static_cast<unsigned char*>(base);
    m.used = kGap;
  }
  if (bytes > kArenaBytes - m.used - kGap) return nullptr;
  unsigned char* p = m.arena + m.used;
  m.used = (m.used + bytes + kGap + 255) & ~static_cast<size_t>(255);
  std::memset(p, 0xff, bytes + 256);
  m.ranges[reinterpret_cast<uintptr_t>(p)] = {p, bytes, true, label ? label : "allocation"};
  m.version++;
  return p;
}

void register_range(const void* base, size_t bytes, bool writable, const char* label) {
  Memory& m = memory();
  std::unique_lock lock(m.mutex);
  m.ranges[reinterpret_cast<uintptr_t>(base)] = {static_cast<const unsigned char*>(base), bytes, writable, label ? label : "buffer"};
  m.version++;
}

void free_all() {
  Memory& m = memory();
  std::unique_lock lock(m.mutex);
  m.ranges.clear();
  if (m.arena && m.used > kGap) madvise(m.arena, (m.used + 4095) & ~static_cast<size_t>(4095), MADV_DONTNEED);
  m.used = m.arena ? kGap : 0;
  m.version++;
}

const Range* find_range(const void* p, size_t n) {
  Memory& m = memory();
  const auto* c = static_cast<const unsigned char*>(p);
  if (cache.version == m.version.load(std::memory_order_acquire) && cache.range && c >= cache.range->base &&
      c + n <= cache.range->base + cache.range->bytes) {
    return cache.range;
  }
  std::shared_lock lock(m.mutex);
  auto after = m.ranges.upper_bound(reinterpret_cast<uintptr_t>(p));
  if (after == m.ranges.begin()) return nullptr;
  const Range& range = std::prev(after)->second;
  if (c + n > range.base + range.bytes) return nullptr;
  cache = {&range, m.version.load(std::memory_order_acquire)};
  return &range;
}

std::string describe_address(const void* p, size_t n) {
  Memory& m = memory();
  std::shared_lock lock(m.mutex);
  const auto a = reinterpret_cast<uintptr_t>(p);
  auto after = m.ranges.upper_bound(a);
  std::string out = "not in any registered buffer";
  uintptr_t nearest = kGap;
  if (after != m.ranges.begin()) {
    const Range& range = std::prev(after)->second;
    const uintptr_t end = reinterpret_cast<uintptr_t>(range.base) + range.bytes;
    const uintptr_t past = a + n - end;
    if (past < nearest) {
      nearest = past;
      out = std::to_string(past) + " bytes past the end of `" + range.label + "` (" + std::to_string(range.bytes) + " bytes)";
    }
  }
  if (after != m.ranges.end()) {
    const uintptr_t before = after->first - a;
    if (before < nearest) {
      out = std::to_string(before) + " bytes before `" + after->second.label + "` (" + std::to_string(after->second.bytes) + " bytes)";
    }
  }
  return out;
}

}  // namespace emu
