// Block barriers, and threads that leave while others wait.
#include "collective.h"

namespace emu {

void Block::complete(Barrier& b) {
  counters.barriers++;
  idle_yields = 0;
  for (Fiber* f : b.waiting) {
    f->votes = b.votes;
    f->voters = static_cast<int>(b.waiting.size());
    clocks.adopt(f->thread, b.gathered);
    make_ready(*f);
  }
  clocks.clear(b.gathered);
  b = Barrier();
}

static const char* const kSyncThreads = "__syncthreads";
static const char* const kNamed = "a named barrier";

// Joins barrier `id`; returns when it completes.
static void join(int id, int needed, bool counted, bool waits, Site where) {
  Block& block_ = *block();
  Fiber* me = fiber();
  Barrier& b = block_.barriers[id];
  if (b.arrived == 0) {
    b.where = where;
    b.first_thread = me->thread;
    b.needed = needed;
    b.counted = counted;
  } else if (!counted && !b.counted && b.where != where) {
    block_.fault(FaultKind::barrier_divergence, where, b.where, b.first_thread, "threads of a block meet at different __syncthreads");
  } else if (counted != b.counted || (counted && b.needed != needed)) {
    block_.fault(FaultKind::barrier_divergence, where, b.where, b.first_thread, "barrier %d joined for %d threads by some and %d by others",
                 id, needed, b.needed);
  }
  block_.clocks.release(me->thread, b.gathered);
  b.arrived++;
  if (waits) b.waiting.push_back(me);
  const int target = b.counted ? b.needed : block_.live;
  if (b.arrived < target) {
    if (!waits) return;
    me->barrier = id;
    block_.block_current(State::in_barrier, b.counted ? kNamed : kSyncThreads, where);
    return;
  }
  if (!b.counted && block_.live < block_.threads && block_.settings.strict) {
    block_.fault(FaultKind::barrier_exited, where, 0, -1, "__syncthreads completes although %d of %d threads have exited",
                 block_.threads - block_.live, block_.threads);
  }
  block_.complete(b);
}

void sync_threads(Site where) { join(0, 0, false, true, where); }

int sync_threads_reduce(int predicate, int kind, Site where) {
  Barrier& barrier = block()->barriers[0];
  barrier.votes += predicate != 0;
  sync_threads(where);
  const Fiber& me = *fiber();
  return kind == 0 ? me.votes : kind == 1 ? me.votes == me.voters : me.votes > 0;
}

// A warp comes to a named barrier as one, or not at all: no lane may be counted for two rounds. That orders no memory.
static bool valid_named(int id, int threads, Site where) {
  Block& b = *block();
  collective(~0u, Operation::barrier, nullptr, kNamed, where, [](Block&, int, const Collective&, unsigned) {});
  if (id < 0 || id > 15 || threads <= 0 || threads % 32 != 0 || threads > b.threads) {
    b.fault(FaultKind::barrier_divergence, where, 0, -1,
            "barrier %d for %d threads: ids are 0 to 15, counts multiples of 32 up to the block's %d", id, threads, b.threads);
    return false;
  }
  return true;
}

void barrier_sync(int id, int threads, Site where) {
  if (valid_named(id, threads, where)) join(id, threads, true, true, where);
}

void barrier_arrive(int id, int threads, Site where) {
  if (valid_named(id, threads, where)) join(id, threads, true, false, where);
}

// A thread exits: on the hardware a __syncthreads then waits for one thread less.
void Block::barrier_exit(Fiber&) {
  Barrier& b = barriers[0];
  if (b.arrived == 0 || b.counted || b.arrived < live) return;
  if (settings.strict) {
    fault(FaultKind::barrier_exited, b.where, 0, b.first_thread,
          "__syncthreads completes because the other threads exited: %d of %d joined it", b.arrived, threads);
  }
  complete(b);
}

void yield(Site where) { block()->yield_current(where); }

}  // namespace emu
