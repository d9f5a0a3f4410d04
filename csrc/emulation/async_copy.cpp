// cp.async: issued now, landing when its thread waits.
#include "block.h"
#include "memory.h"

namespace emu {

static void land(Block& b, const PendingCopy& c, const Fiber& owner) {
  const Toucher by{Touch::landing, owner.thread, owner.thread, b.clocks.now(owner.thread), c.where, false};
  b.touch_as(by, c.to, static_cast<size_t>(c.bytes));
  std::memcpy(b.shared + c.to, c.data, static_cast<size_t>(c.bytes));
}

void async_copy(uint32_t to, const void* from, int bytes, int valid, Site where) {
  Block& b = *block();
  Fiber& me = *fiber();
  const auto size = static_cast<size_t>(bytes);
  if (!b.check_shared(to, size, size, "cp.async destination", where)) return;
  PendingCopy copy{to, bytes, {}, where};
  if (valid > 0) {
    if (reinterpret_cast<uintptr_t>(from) % size != 0) {
      b.fault(FaultKind::misaligned, where, 0, -1, "cp.async source is not a multiple of %d bytes", bytes);
    }
    if (!find_range(from, static_cast<size_t>(valid))) {
      b.fault(FaultKind::global_out_of_bounds, where, 0, -1, "cp.async reads %d bytes: %s", valid,
              describe_address(from, static_cast<size_t>(valid)).c_str());
      return;
    }
    std::memcpy(copy.data, from, static_cast<size_t>(valid));
    if (b.settings.profile)
      b.profile.record(me.warp, me.lane, b.warps[me.warp].alive, false, false, reinterpret_cast<uintptr_t>(from), bytes, where);
  }
  if (b.settings.profile) b.profile.record(me.warp, me.lane, b.warps[me.warp].alive, true, true, to, bytes, where);
  b.counters.async_copy_bytes += static_cast<uint64_t>(valid);
  b.touch(Touch::engine_write, to, size, where);
  if (b.settings.async == AsyncMode::eager) std::memcpy(b.shared + to, copy.data, size);
  if (b.settings.async == AsyncMode::poison) std::memset(b.shared + to, 0xff, size);
  me.uncommitted.push_back(copy);
}

void async_commit() {
  Fiber& me = *fiber();
  me.groups.push_back(std::move(me.uncommitted));
  me.uncommitted.clear();
}

void async_wait(int groups_left) {
  Fiber& me = *fiber();
  while (static_cast<int>(me.groups.size()) > groups_left) {
    for (const PendingCopy& c : me.groups.front()) land(*block(), c, me);
    me.groups.pop_front();
  }
}

// cp.async.mbarrier.arrive.noinc: the copies so far land on their own, then count one arrival.
void async_arrive(uint32_t mbarrier, Site where) {
  Block& b = *block();
  Fiber& me = *fiber();
  if (!b.find_mbarrier(mbarrier, where)) return;
  Delivery d;
  d.mbarrier = mbarrier;
  d.thread = me.thread;
  d.arrives = true;
  d.where = where;
  for (auto& group : me.groups) d.copies.insert(d.copies.end(), group.begin(), group.end());
  d.copies.insert(d.copies.end(), me.uncommitted.begin(), me.uncommitted.end());
  me.groups.clear();
  me.uncommitted.clear();
  d.clock = b.clocks.now(me.thread);
  Clocks::Gathering history;
  b.clocks.release(me.thread, history);
  d.history = b.clocks.share(history.sum);
  b.clocks.clear(history);
  b.send(std::move(d));
}

}  // namespace emu
