#include "collective.h"

#include <algorithm>

namespace emu {
namespace {

// Runs the operation of warp.open[index] and lets its lanes go on.
void finish(Block& b, int warp, size_t index) {
  Warp& w = b.warps[warp];
  const Collective done = w.open[index];
  w.open.erase(w.open.begin() + static_cast<long>(index));
  done.execute(b, warp, done, done.arrived);
  for (int lane = 0; lane < 32; lane++) {
    if (!(done.arrived >> lane & 1)) continue;
    Fiber& f = b.fiber(warp * 32 + lane);
    if (&f != fiber()) b.make_ready(f);
  }
}

// Lanes of `mask` that exist in the block's last warp.
unsigned existing(const Block& b, int warp) {
  const int lanes = b.threads - warp * 32;
  return lanes >= 32 ? ~0u : (1u << lanes) - 1;
}

}  // namespace

void collective(unsigned mask, Operation operation, void* argument, const char* what, Site where, Execute execute) {
  Block& b = *block();
  Fiber* me = fiber();
  Warp& w = b.warps[me->warp];
  const unsigned bit = 1u << me->lane;
  mask &= existing(b, me->warp);
  if (!(mask & bit)) {
    b.fault(FaultKind::lane_outside_mask, where, 0, -1, "%s called by lane %d, which its mask %08x leaves out", what, me->lane, mask);
    mask |= bit;
  }
  const unsigned gone = mask & ~w.alive;
  if (gone) b.fault(FaultKind::exited_lane, where, 0, -1, "%s for lanes %08x, of which %08x have exited", what, mask, gone);
  size_t index = 0;
  for (; index < w.open.size(); index++) {
    const Collective& other = w.open[index];
    if (other.operation == static_cast<int>(operation) && other.mask == mask && other.where == where && !(other.arrived & bit)) break;
  }
  if (index == w.open.size()) {
    for (const Collective& other : w.open) {
      if (!(other.mask & mask)) continue;
      b.fault(FaultKind::warp_divergence, where, other.where, me->warp * 32 + __builtin_ctz(other.arrived),
              "%s for lanes %08x while lanes %08x wait in %s for lanes %08x", what, mask, other.arrived, other.what, other.mask);
      b.abort_block();
      b.block_current(State::in_warp_collective, what, where);
    }
    w.open.emplace_back();
    Collective& c = w.open.back();
    c.operation = static_cast<int>(operation);
    c.mask = mask;
    c.where = where;
    c.what = what;
    c.execute = execute;
  }
  Collective& c = w.open[index];
  c.arrived |= bit;
  c.argument[me->lane] = argument;
  if ((c.arrived & w.alive) == (mask & w.alive))
    finish(b, me->warp, index);
  else
    b.block_current(State::in_warp_collective, what, where);
}

void Block::collective_exit(Fiber& leaver) {
  Warp& w = warps[leaver.warp];
  const unsigned bit = 1u << leaver.lane;
  for (size_t i = 0; i < w.open.size();) {
    const Collective& c = w.open[i];
    if (!(c.mask & bit)) {
      i++;
      continue;
    }
    fault(FaultKind::exited_lane, c.where, 0, leaver.thread, "%s for lanes %08x, of which lane %d exits without joining", c.what, c.mask,
          leaver.lane);
    if ((c.arrived & w.alive) == (c.mask & w.alive))
      finish(*this, leaver.warp, i);
    else
      i++;
  }
}

void sync_warp(unsigned mask, Site where) {
  collective(mask, Operation::sync, nullptr, "__syncwarp", where, [](Block& b, int warp, const Collective&, unsigned lanes) {
    Clocks::Gathering gathered;
    for (int lane = 0; lane < 32; lane++) {
      if (lanes >> lane & 1) b.clocks.release(warp * 32 + lane, gathered);
    }
    for (int lane = 0; lane < 32; lane++) {
      if (lanes >> lane & 1) b.clocks.adopt(warp * 32 + lane, gathered);
    }
    b.clocks.clear(gathered);
  });
}

namespace {
struct ShuffleArgument {
  uint64_t value, result;
  Shuffle kind;
  int operand, width;
};

int source_lane(const ShuffleArgument& x, int lane) {
  const int segment = lane & ~(x.width - 1), end = segment + x.width;
  switch (x.kind) {
    case Shuffle::index:
      return segment + (x.operand & (x.width - 1));
    case Shuffle::up:
      return lane - x.operand < segment ? lane : lane - x.operand;
    case Shuffle::down:
      return lane + x.operand >= end ? lane : lane + x.operand;
    default:
      return (lane ^ x.operand) >= end ? lane : lane ^ x.operand;
  }
}
}  // namespace

uint64_t shuffle(unsigned mask, uint64_t value, Shuffle kind, int operand, int width, Site where) {
  ShuffleArgument a{value, value, kind, operand, width};
  collective(mask, Operation::shuffle, &a, "__shfl_sync", where, [](Block& b, int, const Collective& c, unsigned lanes) {
    b.counters.shuffles++;
    for (int lane = 0; lane < 32; lane++) {
      if (!(lanes >> lane & 1)) continue;
      auto& x = *static_cast<ShuffleArgument*>(c.argument[lane]);
      const int from = source_lane(x, lane);
      if (lanes >> from & 1) {
        x.result = static_cast<ShuffleArgument*>(c.argument[from])->value;
      } else if (c.mask >> from & 1) {
        x.result = 0x7ff8dead7fc0deadull;  // an exited lane, reported already: its register is garbage
      } else {
        b.fault(FaultKind::lane_outside_mask, c.where, 0, -1, "__shfl_sync of lane %d reads lane %d, which the mask %08x leaves out", lane,
                from, c.mask);
      }
    }
  });
  return a.result;
}

namespace {
struct Vote {
  uint64_t value;
  unsigned result;
};
}  // namespace

unsigned ballot(unsigned mask, bool predicate, Site where) {
  Vote a{predicate, 0};
  collective(mask, Operation::ballot, &a, "a warp vote", where, [](Block&, int, const Collective& c, unsigned lanes) {
    unsigned votes = 0;
    for (int lane = 0; lane < 32; lane++) {
      if ((lanes >> lane & 1) && static_cast<Vote*>(c.argument[lane])->value) votes |= 1u << lane;
    }
    for (int lane = 0; lane < 32; lane++) {
      if (lanes >> lane & 1) static_cast<Vote*>(c.argument[lane])->result = votes;
    }
  });
  return a.result;
}

unsigned match_any(unsigned mask, uint64_t value, Site where) {
  Vote a{value, 0};
  collective(mask, Operation::match, &a, "__match_any_sync", where, [](Block&, int, const Collective& c, unsigned lanes) {
    for (int lane = 0; lane < 32; lane++) {
      if (!(lanes >> lane & 1)) continue;
      auto& x = *static_cast<Vote*>(c.argument[lane]);
      for (int other = 0; other < 32; other++) {
        if ((lanes >> other & 1) && static_cast<Vote*>(c.argument[other])->value == x.value) x.result |= 1u << other;
      }
    }
  });
  return a.result;
}

namespace {
struct ReduceArgument {
  uint32_t value;
  Reduce kind;
};

uint32_t combine(Reduce kind, uint32_t a, uint32_t b) {
  switch (kind) {
    case Reduce::add:
      return a + b;
    case Reduce::min:
      return std::min(a, b);
    case Reduce::max:
      return std::max(a, b);
    case Reduce::min_signed:
      return static_cast<uint32_t>(std::min(static_cast<int32_t>(a), static_cast<int32_t>(b)));
    case Reduce::max_signed:
      return static_cast<uint32_t>(std::max(static_cast<int32_t>(a), static_cast<int32_t>(b)));
    case Reduce::bit_and:
      return a & b;
    case Reduce::bit_or:
      return a | b;
    default:
      return a ^ b;
  }
}
}  // namespace

uint32_t reduce(unsigned mask, uint32_t value, Reduce kind, Site where) {
  ReduceArgument a{value, kind};
  collective(mask, Operation::reduce, &a, "__reduce_sync", where, [](Block&, int, const Collective& c, unsigned lanes) {
    const int first = __builtin_ctz(lanes);
    uint32_t sum = static_cast<ReduceArgument*>(c.argument[first])->value;
    const Reduce kind_ = static_cast<ReduceArgument*>(c.argument[first])->kind;
    for (int lane = first + 1; lane < 32; lane++) {
      if (lanes >> lane & 1) sum = combine(kind_, sum, static_cast<ReduceArgument*>(c.argument[lane])->value);
    }
    for (int lane = 0; lane < 32; lane++) {
      if (lanes >> lane & 1) static_cast<ReduceArgument*>(c.argument[lane])->value = sum;
    }
  });
  return a.value;
}

bool elect_one(unsigned mask, Site where) {
  bool elected = false;
  collective(mask, Operation::elect, &elected, "elect.sync", where,
             [](Block&, int, const Collective& c, unsigned lanes) { *static_cast<bool*>(c.argument[__builtin_ctz(lanes)]) = true; });
  return elected;
}

unsigned active_mask() { return block()->warps[fiber()->warp].alive; }

}  // namespace emu
