#include "shadow.h"

namespace emu {

struct Shadow::Judge {
  Shadow& shadow;
  Clocks& clocks;
  const std::vector<uint32_t>& proxy_fence;  // per thread: the clock up to which its stores are fenced for the async proxy
  const Toucher& by;
  Conflict found{};

  bool ordered(const Access& past) const { return past.who < 0 || clocks.ordered(by.thread, past.who, past.clock); }

  void report(FaultKind kind, const char* what, const Access& past) {
    if (!found.what) found = {kind, what, past.who, past.where};
  }

  Access self(bool atomic = false, bool generic = false) const {
    return {by.where, by.clock, static_cast<int16_t>(by.who), atomic, generic};
  }

  template <class F>
  void each_reader(Cell& cell, F f) {
    for (int i = 0; i < cell.count; i++) f(cell.readers[i]);
    if (cell.more >= 0) {
      for (Access& a : shadow.overflow_[cell.more]) f(a);
    }
  }

  void clear_readers(Cell& cell) {
    cell.count = 0;
    if (cell.more >= 0) {
      shadow.overflow_[cell.more].clear();
      shadow.free_overflow_.push_back(cell.more);
      cell.more = -1;
    }
  }

  // Keeps only the readers that the new one does not subsume: whoever is ordered after it is ordered after those before it.
  void add_reader(Cell& cell, bool atomic) {
    auto stays = [&](const Access& a) { return a.who != by.who && !(clocks.ordered(by.thread, a.who, a.clock) && by.who == by.thread); };
    int kept = 0;
    for (int i = 0; i < cell.count; i++) {
      if (stays(cell.readers[i]) || (cell.readers[i].atomic && !atomic)) cell.readers[kept++] = cell.readers[i];
    }
    cell.count = static_cast<uint8_t>(kept);
    if (cell.more >= 0) {
      auto& list = shadow.overflow_[cell.more];
      size_t kept_more = 0;
      for (const Access& a : list) {
        if (stays(a) || (a.atomic && !atomic)) list[kept_more++] = a;
      }
      list.resize(kept_more);
    }
    if (cell.count < Cell::kInline) {
      cell.readers[cell.count++] = self(atomic);
      return;
    }
    if (cell.more < 0) {
      if (shadow.free_overflow_.empty()) {
        cell.more = static_cast<int32_t>(shadow.overflow_.size());
        shadow.overflow_.emplace_back();
      } else {
        cell.more = shadow.free_overflow_.back();
        shadow.free_overflow_.pop_back();
      }
    }
    shadow.overflow_[cell.more].push_back(self(atomic));
  }

  void check_write_before(Cell& cell, const char* what) {
    if (!ordered(cell.write)) report(FaultKind::race, what, cell.write);
  }

  void check_flight(Cell& cell, const char* what) {
    if (cell.in_flight >= 0) report(FaultKind::async_in_flight, what, cell.write);
  }

  void read(Cell& cell) {
    const bool engine = by.touch == Touch::engine_read;
    if (cell.mbarrier) report(FaultKind::mbarrier, "a plain access to the bytes of an mbarrier", cell.write);
    check_flight(cell, "read of an asynchronous copy that has not been waited for");
    check_write_before(cell, engine ? "asynchronous read not ordered after a write" : "read not ordered after a write");
    if (by.check_initialised && !cell.initialised) {
      report(FaultKind::uninitialised_shared, "read of shared memory that nobody wrote", Access());
    }
    each_reader(cell, [&](Access& a) {
      if (a.atomic && !ordered(a)) report(FaultKind::race, "read not ordered after an atomic update", a);
    });
    if (engine && cell.write.generic && cell.write.who >= 0 && proxy_fence[cell.write.who] < cell.write.clock) {
      report(FaultKind::proxy_fence, "asynchronous read of a plain store without fence.proxy.async after the store", cell.write);
    }
    add_reader(cell, false);
  }

  void atomic(Cell& cell) {
    if (cell.mbarrier) report(FaultKind::mbarrier, "a plain access to the bytes of an mbarrier", cell.write);
    check_flight(cell, "atomic update of an asynchronous copy that has not been waited for");
    check_write_before(cell, "atomic update not ordered after a write");
    if (by.check_initialised && !cell.initialised) {
      report(FaultKind::uninitialised_shared, "atomic update of shared memory that nobody wrote", Access());
    }
    each_reader(cell, [&](Access& a) {
      if (!a.atomic && !ordered(a)) report(FaultKind::race, "atomic update not ordered after a read", a);
    });
    add_reader(cell, true);
  }

  void write(Cell& cell) {
    const bool engine = by.touch == Touch::engine_write;
    if (cell.mbarrier && by.touch != Touch::mbarrier_init) {
      report(FaultKind::mbarrier, "a plain access to the bytes of an mbarrier", cell.write);
    }
    check_flight(cell, engine ? "asynchronous copy over one that has not landed" : "write over an asynchronous copy in flight");
    check_write_before(cell, engine ? "asynchronous copy not ordered after a write" : "write not ordered after a write");
    each_reader(cell, [&](Access& a) {
      if (!ordered(a)) {
        report(FaultKind::race, engine ? "asynchronous copy over data that may still be read" : "write over data that may still be read",
               a);
      }
    });
    clear_readers(cell);
    cell.write = self(false, by.touch == Touch::write);
    cell.initialised = true;
    cell.mbarrier = by.touch == Touch::mbarrier_init;
    cell.in_flight = engine ? static_cast<int16_t>(by.thread) : static_cast<int16_t>(-1);
  }

  void apply(Cell& cell) {
    switch (by.touch) {
      case Touch::read:
      case Touch::engine_read:
        read(cell);
        break;
      case Touch::atomic:
        atomic(cell);
        break;
      case Touch::write:
      case Touch::engine_write:
      case Touch::mbarrier_init:
        write(cell);
        break;
      case Touch::landing:
        cell.in_flight = -1;
        cell.write = self(false, true);  // cp.async writes through the generic proxy
        break;
      case Touch::mbarrier_use:
        check_write_before(cell, "use of an mbarrier not ordered after its init");
        break;
    }
  }
};

void Shadow::reset(size_t bytes) {
  bytes_ = bytes;
  const size_t needed = (bytes + 15) / 16;
  if (granules_.size() < needed) granules_.resize(needed);
  if (++generation_ == 0) {
    granules_.assign(needed, Granule());
    generation_ = 1;
  }
  children_.clear();
  free_children_.clear();
  overflow_.clear();
  free_overflow_.clear();
}

Shadow::Granule& Shadow::granule(size_t index) {
  Granule& g = granules_[index];
  if (g.generation != generation_) {
    g = Granule();
    g.generation = generation_;
  }
  return g;
}

void Shadow::visit(Judge& judge, Node& node, size_t size, size_t low, size_t high) {
  const Touch touch = judge.by.touch;
  const bool whole = low == 0 && high == size;
  if (whole && node.children < 0) {
    judge.apply(node.cell);
    return;
  }
  if (node.children < 0) {
    int32_t first;
    if (free_children_.empty()) {
      first = static_cast<int32_t>(children_.size());
      children_.resize(children_.size() + 4);
    } else {
      first = free_children_.back();
      free_children_.pop_back();
    }
    for (int i = 0; i < 4; i++) {
      Node& child = children_[first + i];
      child.cell = node.cell;
      child.children = -1;
      if (node.cell.more >= 0) {  // each part keeps its own list
        const std::vector<Access> copy = overflow_[node.cell.more];
        child.cell.more = static_cast<int32_t>(overflow_.size());
        overflow_.push_back(copy);
      }
    }
    node.children = first;
  }
  const size_t part = size / 4;
  for (size_t i = 0; i < 4; i++) {
    const size_t begin = i * part, end = begin + part;
    if (high <= begin || low >= end) continue;
    const int32_t child = node.children + static_cast<int32_t>(i);
    Node copy = children_[child];  // children_ may grow below
    visit(judge, copy, part, low > begin ? low - begin : 0, (high < end ? high : end) - begin);
    children_[child] = copy;
  }
  const bool replaces = touch == Touch::write || touch == Touch::engine_write;
  if (whole && replaces && size > 1) {
    node.cell = children_[node.children].cell;
    free_children_.push_back(node.children);
    node.children = -1;
  }
}

Conflict Shadow::access(Clocks& clocks, const std::vector<uint32_t>& proxy_fence, size_t offset, size_t n, const Toucher& by) {
  Judge judge{*this, clocks, proxy_fence, by};
  const size_t end = offset + n;
  for (size_t at = offset; at < end;) {
    const size_t index = at / 16, base = index * 16;
    const size_t stop = end < base + 16 ? end : base + 16;
    visit(judge, granule(index).node, 16, at - base, stop - base);
    at = stop;
  }
  return judge.found;
}

template <class F>
void Shadow::each_cell(Node& node, F f) {
  f(node.cell);
  if (node.children < 0) return;
  for (int i = 0; i < 4; i++) each_cell(children_[node.children + i], f);
}

template <class F>
void Shadow::each_cell(size_t offset, size_t n, F f) {
  for (size_t index = offset / 16; index < (offset + n + 15) / 16; index++) each_cell(granule(index).node, f);
}

void Shadow::land(size_t offset, size_t n) {
  each_cell(offset, n, [](Cell& c) { c.in_flight = -1; });
}

void Shadow::retire_mbarrier(size_t offset) {
  Node& node = granule(offset / 16).node;
  for (int word = offset % 16 / 4, end = word + 2; node.children >= 0 && word < end; word++) {
    each_cell(children_[node.children + word], [](Cell& c) { c.mbarrier = false; });
  }
}

}  // namespace emu
