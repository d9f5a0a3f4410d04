// mbarriers, and the asynchronous deliveries that complete them.
#include "block.h"

namespace emu {

Mbarrier* Block::find_mbarrier(uint32_t address, Site where) {
  if (!check_shared(address, 8, 8, "mbarrier", where)) return nullptr;
  const auto found = mbarriers.find(address);
  if (found == mbarriers.end()) {
    fault(FaultKind::mbarrier, where, 0, -1, "no mbarrier was initialised at shared offset %u", address);
    return nullptr;
  }
  touch(Touch::mbarrier_use, address, 8, where);
  return &found->second;
}

void Block::flip_if_complete(uint32_t address, Mbarrier& m) {
  if (m.pending != 0 || m.bytes != 0) return;
  m.phase++;
  m.pending = m.expected;
  clocks.drop(m.completed);
  m.completed = clocks.share(m.gathered.sum);
  clocks.clear(m.gathered);
  idle_yields = 0;
  for (int i = 0; i < threads; i++) {
    Fiber& f = fiber(i);
    if (f.state == State::in_mbarrier && f.mbarrier == address && static_cast<int>(m.phase & 1) != f.parity) make_ready(f);
  }
}

void mbarrier_init(uint32_t address, int arrivals, Site where) {
  Block& b = *block();
  if (!b.check_shared(address, 8, 8, "mbarrier.init", where)) return;
  if (arrivals <= 0 || arrivals >= 1 << 20) b.fault(FaultKind::mbarrier, where, 0, -1, "mbarrier.init with a count of %d", arrivals);
  b.touch(Touch::mbarrier_init, address, 8, where);
  Mbarrier m;
  m.expected = m.pending = arrivals;
  m.slot = static_cast<int>(b.mbarriers.size());
  m.where = where;
  m.init_thread = fiber()->thread;
  m.init_clock = b.clocks.now(m.init_thread);
  if (!b.mbarriers.emplace(address, m).second) {
    b.fault(FaultKind::mbarrier, where, b.mbarriers[address].where, -1, "mbarrier.init of a live mbarrier at shared offset %u", address);
  }
}

void mbarrier_invalidate(uint32_t address, Site where) {
  Block& b = *block();
  Mbarrier* m = b.find_mbarrier(address, where);
  if (!m) return;
  b.clocks.clear(m->gathered);
  b.clocks.drop(m->completed);
  b.mbarriers.erase(address);
  b.touch(Touch::mbarrier_init, address, 8, where);
  b.shadow.retire_mbarrier(address);
}

void mbarrier_expect(uint32_t address, int bytes, Site where) {
  Block& b = *block();
  if (Mbarrier* m = b.find_mbarrier(address, where)) m->bytes += bytes;
}

void mbarrier_arrive(uint32_t address, int count, int expected_bytes, Site where) {
  Block& b = *block();
  Mbarrier* m = b.find_mbarrier(address, where);
  if (!m) return;
  if (m->pending < count) {
    b.fault(FaultKind::mbarrier, where, m->where, -1, "more arrivals at the mbarrier (shared offset %u) than its count of %d in phase %u",
            address, m->expected, m->phase);
    return;
  }
  m->bytes += expected_bytes;
  m->pending -= count;
  b.clocks.release(fiber()->thread, m->gathered);
  b.flip_if_complete(address, *m);
}

bool mbarrier_test(uint32_t address, int parity, Site where) {
  Block& b = *block();
  Mbarrier* m = b.find_mbarrier(address, where);
  if (!m) return true;
  if (static_cast<int>(m->phase & 1) == parity) {
    b.yield_current(where);
    return false;
  }
  b.clocks.acquire(fiber()->thread, m->completed);
  return true;
}

void mbarrier_wait(uint32_t address, int parity, Site where) {
  Block& b = *block();
  if (!b.find_mbarrier(address, where)) return;
  Fiber& me = *fiber();
  for (;;) {
    const auto m = b.mbarriers.find(address);
    if (m == b.mbarriers.end()) return;
    if (static_cast<int>(m->second.phase & 1) != parity) {
      b.clocks.acquire(me.thread, m->second.completed);
      return;
    }
    me.mbarrier = address;
    me.parity = parity;
    b.block_current(State::in_mbarrier, "an mbarrier phase", where);
  }
}

// fence.proxy.async and fence.mbarrier_init: this thread's plain stores become visible to asynchronous engines.
void proxy_fence() {
  Block& b = *block();
  const int me = fiber()->thread;
  b.proxy_fenced[me] = b.clocks.now(me);
  b.clocks.tick(me);
}

void Block::send(Delivery d) {
  if (settings.async == AsyncMode::eager)
    deliver(d);
  else
    deliveries.push_back(std::move(d));
}

void Block::deliver(Delivery& d) {
  idle_yields = 0;
  if (!d.data.empty()) {
    std::memcpy(shared + d.to, d.data.data(), d.data.size());
    shadow.land(d.to, d.data.size());
  }
  for (const PendingCopy& c : d.copies) {
    std::memcpy(shared + c.to, c.data, static_cast<size_t>(c.bytes));
    touch_as({Touch::landing, d.thread, d.thread, d.clock, c.where, false}, c.to, static_cast<size_t>(c.bytes));
  }
  const auto found = mbarriers.find(d.mbarrier);
  if (found != mbarriers.end()) {
    Mbarrier& m = found->second;
    m.bytes -= static_cast<int64_t>(d.data.size());
    if (d.engine >= 0) clocks.add(d.engine, d.clock, m.gathered);
    if (d.arrives) {
      clocks.merge(d.history, m.gathered);
      if (m.pending == 0)
        fault(FaultKind::mbarrier, d.where, m.where, -1, "more arrivals at the mbarrier (shared offset %u) than its count of %d",
              d.mbarrier, m.expected);
      else
        m.pending--;
    }
    flip_if_complete(d.mbarrier, m);
  }
  clocks.drop(d.history);
  d.history = nullptr;
}

bool Block::deliver_one() {
  if (deliveries.empty()) return false;
  size_t index = 0;
  if (settings.schedule == Schedule::reverse) index = deliveries.size() - 1;
  if (settings.schedule == Schedule::random) index = random() % deliveries.size();
  Delivery d = std::move(deliveries[index]);
  deliveries.erase(deliveries.begin() + static_cast<long>(index));
  deliver(d);
  return true;
}

}  // namespace emu
