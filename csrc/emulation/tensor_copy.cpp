// TMA: tiles of a tensor map into and out of shared memory, and plain bulk copies.
#include "block.h"
#include "memory.h"

namespace emu {
namespace {

// Visits the rows (innermost runs) of the map's box at `coordinates`: f(offset in the dense tile, first, count, global row),
// where [first, first + count) are the elements inside the tensor, row null if the whole run is outside.
template <class F>
void each_row(const TensorMap& map, const int* coordinates, F f) {
  uint32_t rows = 1;
  for (int d = 1; d < map.rank; d++) rows *= map.box[d];
  const size_t row_bytes = static_cast<size_t>(map.box[0]) * map.element_bytes;
  const int64_t low = coordinates[0], size0 = static_cast<int64_t>(map.size[0]);
  const int64_t first = low < 0 ? -low : 0;
  const int64_t last = size0 - low < map.box[0] ? size0 - low : map.box[0];
  for (uint32_t r = 0; r < rows; r++) {
    const unsigned char* row = map.base;
    bool inside = last > first;
    uint32_t rest = r;
    for (int d = 1; d < map.rank; d++) {
      const int64_t at = coordinates[d] + static_cast<int64_t>(rest % map.box[d]);
      rest /= map.box[d];
      inside &= at >= 0 && at < static_cast<int64_t>(map.size[d]);
      row += at * static_cast<int64_t>(map.stride_bytes[d]);
    }
    if (!inside) {
      f(r * row_bytes, int64_t{0}, int64_t{0}, static_cast<const unsigned char*>(nullptr));
    } else {
      f(r * row_bytes, first, last - first, row + (low + first) * map.element_bytes);
    }
  }
}

size_t box_bytes(const TensorMap& map) {
  size_t n = static_cast<size_t>(map.element_bytes);
  for (int d = 0; d < map.rank; d++) n *= map.box[d];
  return n;
}

// The pattern repeats every 8 rows of the swizzle's span: the tile must start on a repeat.
bool check_tile(Block& b, const TensorMap& map, uint32_t at, const char* what, Site where) {
  static constexpr size_t kAlignment[] = {128, 256, 512, 1024};
  return b.check_shared(at, box_bytes(map), kAlignment[static_cast<int>(map.swizzle)], what, where);
}

bool check_rank(Block& b, const TensorMap& map, int rank, Site where) {
  if (map.rank == rank) return true;
  b.fault(FaultKind::tensor_map, where, 0, -1, "%d coordinates for a tensor map of rank %d", rank, map.rank);
  return false;
}

}  // namespace

// XOR of the 16-byte chunk index with bits 7 and up of the shared address.
uint32_t swizzled(uint32_t address, Swizzle mode) {
  static constexpr uint32_t kMask[] = {0, 1, 3, 7};
  return address ^ (address >> 7 & kMask[static_cast<int>(mode)]) << 4;
}

// The mbarrier that a bulk load reports to, checked: null after a fault.
static Mbarrier* load_barrier(Block& b, uint32_t mbarrier, Site where) {
  Mbarrier* m = b.find_mbarrier(mbarrier, where);
  if (m && b.settings.races && b.proxy_fenced[m->init_thread] < m->init_clock) {
    b.fault(FaultKind::proxy_fence, where, m->where, m->init_thread, "a bulk copy on an mbarrier whose init was not followed by a fence");
  }
  return m;
}

static void send_load(Block& b, Delivery d, const Mbarrier& m) {
  const int me = fiber()->thread;
  d.engine = b.clocks.mbarrier_engine(m.slot);
  d.clock = b.clocks.tick(d.engine);
  d.thread = me;
  b.counters.tma_bytes += d.data.size();
  b.touch_as({Touch::engine_write, me, d.engine, d.clock, d.where, false}, d.to, d.data.size());
  if (b.settings.async == AsyncMode::poison) std::memset(b.shared + d.to, 0xff, d.data.size());
  b.send(std::move(d));
}

void tensor_load(uint32_t to, const TensorMap* map, const int* coordinates, int rank, uint32_t mbarrier, Site where) {
  Block& b = *block();
  if (!check_rank(b, *map, rank, where)) return;
  const Mbarrier* m = load_barrier(b, mbarrier, where);
  if (!m || !check_tile(b, *map, to, "TMA destination", where)) return;
  Delivery d;
  d.to = to;
  d.mbarrier = mbarrier;
  d.where = where;
  d.data.assign(box_bytes(*map), 0);
  each_row(*map, coordinates, [&](size_t at, int64_t first, int64_t count, const unsigned char* row) {
    if (!row) return;
    const auto n = static_cast<size_t>(count) * map->element_bytes;
    if (!find_range(row, n)) {
      b.fault(FaultKind::global_out_of_bounds, where, 0, -1, "TMA reads %zu bytes: %s", n, describe_address(row, n).c_str());
      return;
    }
    const size_t start = at + static_cast<size_t>(first) * map->element_bytes;
    for (size_t i = 0; i < n; i++) { d.data[swizzled(to + static_cast<uint32_t>(start + i), map->swizzle) - to] = row[i]; }
  });
  send_load(b, std::move(d), *m);
}

void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t mbarrier, Site where) {
  Block& b = *block();
  const Mbarrier* m = load_barrier(b, mbarrier, where);
  if (!m || !b.check_shared(to, bytes, 16, "bulk copy destination", where)) return;
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) {
    b.fault(FaultKind::misaligned, where, 0, -1, "a bulk copy moves multiples of 16 bytes from addresses that are multiples of 16");
    return;
  }
  if (!find_range(from, bytes)) {
    b.fault(FaultKind::global_out_of_bounds, where, 0, -1, "bulk copy reads %u bytes: %s", bytes, describe_address(from, bytes).c_str());
    return;
  }
  Delivery d;
  d.to = to;
  d.mbarrier = mbarrier;
  d.where = where;
  const auto* source = static_cast<const unsigned char*>(from);
  d.data.assign(source, source + bytes);
  send_load(b, std::move(d), *m);
}

int Block::store_engine(int thread) {
  const auto [slot, inserted] = store_slots.try_emplace(thread, static_cast<int>(store_slots.size()));
  return clocks.store_engine(slot->second);
}

void tensor_store(const TensorMap* map, const int* coordinates, int rank, uint32_t from, Site where) {
  Block& b = *block();
  if (!check_rank(b, *map, rank, where)) return;
  Fiber& me = *fiber();
  if (!check_tile(b, *map, from, "TMA source", where)) return;
  PendingStore s{map, {}, from, static_cast<uint32_t>(box_bytes(*map)), b.store_engine(me.thread), 0, where};
  for (int d = 0; d < map->rank; d++) s.coordinates[d] = coordinates[d];
  s.clock = b.clocks.tick(s.engine);
  b.counters.tma_bytes += s.bytes;
  b.touch_as({Touch::engine_read, me.thread, s.engine, s.clock, where, b.spec->instrumented}, from, s.bytes);
  me.bulk_uncommitted.push_back(s);
}

// Reads the source as late as the hardware may: a tile that is overwritten before the wait reaches the output.
static void perform(Block& b, const PendingStore& s) {
  each_row(*s.map, s.coordinates, [&](size_t at, int64_t first, int64_t count, const unsigned char* row) {
    if (!row) return;
    const auto n = static_cast<size_t>(count) * s.map->element_bytes;
    const Range* range = find_range(row, n);
    if (!range || !range->writable) {
      b.fault(range ? FaultKind::read_only_write : FaultKind::global_out_of_bounds, s.where, 0, -1, "TMA writes %zu bytes: %s", n,
              range ? range->label.c_str() : describe_address(row, n).c_str());
      return;
    }
    const size_t start = at + static_cast<size_t>(first) * s.map->element_bytes;
    for (size_t i = 0; i < n; i++) {
      const_cast<unsigned char*>(row)[i] = b.shared[swizzled(s.from + static_cast<uint32_t>(start + i), s.map->swizzle)];
    }
  });
}

void bulk_commit() {
  Fiber& me = *fiber();
  if (!me.bulk_uncommitted.empty()) me.bulk_groups.push_back(std::move(me.bulk_uncommitted));
  me.bulk_uncommitted.clear();
}

void bulk_wait(int groups_left) {
  Block& b = *block();
  Fiber& me = *fiber();
  while (static_cast<int>(me.bulk_groups.size()) > groups_left) {
    for (const PendingStore& s : me.bulk_groups.front()) {
      perform(b, s);
      b.clocks.acquire(me.thread, s.engine, s.clock);
    }
    me.bulk_groups.pop_front();
  }
}

}  // namespace emu
