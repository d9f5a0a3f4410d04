// wgmma: asynchronous products of a warpgroup.
//
// From issue to wait the accumulator registers hold a NaN pattern, and the operands in shared memory count as being read. The
// product is computed when the wait retires it, the latest moment that the hardware may.
#include <cmath>

#include "numeric.h"
#include "wgmma_queue.h"

namespace emu {

uint32_t swizzled(uint32_t address, Swizzle mode);  // tensor_copy.cpp

namespace {

constexpr uint32_t kPoison = 0x7fc0dead;

enum Meeting { kIssue = 1, kFence, kCommit, kWait };

WgmmaQueue& queue(Block& b, int group) {
  if (!b.wgmma[group]) b.wgmma[group] = std::make_unique<WgmmaQueue>();
  return *b.wgmma[group];
}

// The meeting of the 128 threads of a warpgroup; the last to arrive executes.
template <class F>
void meet(int operation, const WarpgroupMma* argument, const char* what, Site where, F execute) {
  Block& b = *block();
  Fiber& me = *fiber();
  const int group = me.thread / 128, first = group * 128;
  WgmmaQueue& q = queue(b, group);
  if (b.threads < first + 128) {
    b.fault(FaultKind::wgmma, where, 0, -1, "%s needs a whole warpgroup; the block has %d threads", what, b.threads);
    return;
  }
  if (q.arrived > 0 && (q.operation != operation || q.where != where)) {
    b.fault(FaultKind::warp_divergence, where, q.where, -1, "threads of a warpgroup meet in %s and in %s", what, q.what);
    b.abort_block();
    b.block_current(State::in_warp_collective, what, where);
  }
  q.operation = operation;
  q.where = where;
  q.what = what;
  q.arguments[me.thread - first] = argument;
  if (++q.arrived < 128) {
    b.block_current(State::in_warp_collective, what, where);
    return;
  }
  q.arrived = 0;
  execute(b, q, group);
  for (int i = first; i < first + 128; i++) {
    if (i != me.thread) b.make_ready(b.fiber(i));
  }
}

// A matrix in shared memory by its 64-bit descriptor; (mn, k) addresses 16-bit elements. The layouts are the canonical ones
// of the PTX manual ("Strides", "Canonical Layouts"), leading and stride byte offsets as defined there.
struct Operand {
  uint32_t start, leading, stride;
  Swizzle swizzle;
  bool transposed;  // M- or N-major

  Operand(uint64_t descriptor, bool transposed_)
      : start(static_cast<uint32_t>(descriptor & 0x3fff) << 4),
        leading(static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4),
        stride(static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4),
        swizzle(mode(descriptor >> 62)),
        transposed(transposed_) {}

  static Swizzle mode(uint64_t bits) {
    static constexpr Swizzle kModes[] = {Swizzle::none, Swizzle::bytes128, Swizzle::bytes64, Swizzle::bytes32};
    return kModes[bits];
  }

  // Byte address of the 16-byte chunk that holds (mn, k): eight elements along the major dimension.
  uint32_t chunk(uint32_t mn, uint32_t k) const {
    static constexpr uint32_t kSpan[] = {16, 32, 64, 128};  // bytes of a row of the swizzle pattern
    const uint32_t span = kSpan[static_cast<int>(swizzle)];
    uint32_t at;
    if (swizzle == Swizzle::none) {
      at = transposed ? mn / 8 * stride + k / 8 * leading + k % 8 * 16 : mn / 8 * stride + k / 8 * leading + mn % 8 * 16;
    } else if (transposed) {
      const uint32_t per_span = span / 2;
      at = mn / per_span * leading + k / 8 * stride + k % 8 * span + mn % per_span / 8 * 16;
    } else {
      at = mn / 8 * stride + mn % 8 * span + k / 8 * 16;
    }
    return swizzled(start + at, swizzle);
  }

  uint32_t address(uint32_t mn, uint32_t k) const { return chunk(mn, k) + (transposed ? mn % 8 : k % 8) * 2; }
};

// Marks every chunk of a rows x 16 operand as read by the group's engine.
bool touch_operand(Block& b, const Operand& operand, int rows, const Toucher& by) {
  for (int mn = 0; mn < rows; mn += operand.transposed ? 8 : 1) {
    for (int k = 0; k < 16; k += operand.transposed ? 1 : 8) {
      const uint32_t at = operand.chunk(static_cast<uint32_t>(mn), static_cast<uint32_t>(k));
      if (!b.check_shared(at, 16, 16, "wgmma operand", by.where)) return false;
      b.touch_as(by, at, 16);
    }
  }
  return true;
}

void fetch(const Block& b, const Operand& operand, int rows, Element type, bool k_major_out, float* out) {
  for (int mn = 0; mn < rows; mn++) {
    for (int k = 0; k < 16; k++) {
      uint16_t bits;
      std::memcpy(&bits, b.shared + operand.address(static_cast<uint32_t>(mn), static_cast<uint32_t>(k)), 2);
      out[k_major_out ? mn * 16 + k : k * rows + mn] = widen16(bits, type);
    }
  }
}

// Accumulator element (row, column) of the 64 x n tile: which thread holds it, in which register.
struct Holder {
  int thread, index;
};
Holder holder(int row, int column) { return {row / 16 * 32 + row % 8 * 4 + column % 8 / 2, column / 8 * 4 + row / 8 % 2 * 2 + column % 2}; }

Accumulator& hold(Block& b, WgmmaQueue& q, int group) {
  const WarpgroupMma& first = *q.arguments[0];
  for (Accumulator& a : q.accumulators) {
    if (a.d[0] == first.d) return a;
  }
  q.accumulators.emplace_back();
  Accumulator& a = q.accumulators.back();
  a.n = first.n;
  for (int i = 0; i < 128; i++) a.d[i] = q.arguments[i]->d;
  a.values.resize(static_cast<size_t>(64) * first.n);
  for (int row = 0; row < 64; row++) {
    for (int column = 0; column < first.n; column++) {
      const Holder h = holder(row, column);
      a.values[static_cast<size_t>(row) * first.n + column] = a.d[h.thread][h.index];
    }
  }
  for (int i = 0; i < 128; i++) {
    auto* low = reinterpret_cast<unsigned char*>(a.d[i]);
    b.fiber(group * 128 + i).accumulators.emplace_back(low, low + sizeof(float) * static_cast<size_t>(first.n / 2));
    for (int j = 0; j < first.n / 2; j++) std::memcpy(&a.d[i][j], &kPoison, sizeof kPoison);
  }
  return a;
}

void let_go(Block& b, WgmmaQueue& q, int group, size_t index) {
  Accumulator& a = q.accumulators[index];
  for (int i = 0; i < 128; i++) {
    Fiber& f = b.fiber(group * 128 + i);
    const auto* low = reinterpret_cast<const unsigned char*>(a.d[i]);
    for (size_t k = 0; k < f.accumulators.size(); k++) {
      if (f.accumulators[k].first == low) {
        f.accumulators.erase(f.accumulators.begin() + static_cast<long>(k));
        break;
      }
    }
  }
  for (int row = 0; row < 64; row++) {
    for (int column = 0; column < a.n; column++) {
      const Holder h = holder(row, column);
      a.d[h.thread][h.index] = a.values[static_cast<size_t>(row) * a.n + column];
    }
  }
  q.accumulators.erase(q.accumulators.begin() + static_cast<long>(index));
}

void issue(Block& b, WgmmaQueue& q, int group) {
  const WarpgroupMma first = *q.arguments[0];
  for (int i = 1; i < 128; i++) {
    const WarpgroupMma& x = *q.arguments[i];
    if (x.b_descriptor != first.b_descriptor || x.a_descriptor != first.a_descriptor || x.accumulate != first.accumulate) {
      b.fault(FaultKind::wgmma, q.where, 0, group * 128 + i, "descriptors or flags differ between the threads of a warpgroup");
      break;
    }
  }
  if (!q.fenced) b.fault(FaultKind::wgmma, q.where, 0, -1, "wgmma without wgmma.fence since its registers could last be used");
  const int engine = b.clocks.warpgroup_engine(group);
  WgmmaOperation op{first, {}, {}, b.clocks.tick(engine), q.where};
  const Toucher by{Touch::engine_read, group * 128, engine, op.clock, q.where, b.spec->instrumented};
  bool valid = touch_operand(b, Operand(first.b_descriptor, first.b_transposed), first.n, by);
  if (!first.a) valid &= touch_operand(b, Operand(first.a_descriptor, first.a_transposed), 64, by);
  if (!valid) return;
  if (first.a) {
    for (int i = 0; i < 128; i++) {
      op.a.push_back(q.arguments[i]->a);
      op.a_registers.insert(op.a_registers.end(), op.a.back(), op.a.back() + 4);
    }
  }
  hold(b, q, group).in_flight++;
  b.counters.wgmma++;
  q.uncommitted.push_back(std::move(op));
}

// A from registers: thread t of the warpgroup holds rows 16 * (t / 32) + group and + 8, as in mma.m16n8k16.
void fetch_a_registers(const WgmmaOperation& op, float* a) {
  for (int t = 0; t < 128; t++) {
    const int group = t % 32 / 4, quad = t % 4, row = t / 32 * 16 + group;
    for (int r = 0; r < 4; r++) {
      const uint32_t bits = op.a_registers[static_cast<size_t>(t) * 4 + r];
      for (int e = 0; e < 2; e++) {
        a[(row + 8 * (r & 1)) * 16 + 2 * quad + 8 * (r >> 1) + e] = widen16(static_cast<uint16_t>(bits >> (16 * e)), op.shape.type);
      }
    }
  }
}

// The hardware may read them until the wait.
void check_a_registers(Block& b, int group, const WgmmaOperation& op) {
  for (size_t i = 0; i < op.a.size(); i++) {
    if (std::memcmp(op.a[i], &op.a_registers[4 * i], 4 * sizeof(uint32_t)) == 0) continue;
    b.fault(FaultKind::wgmma, op.where, 0, group * 128 + static_cast<int>(i), "registers of A changed while the wgmma was in flight");
    return;
  }
}

void retire(Block& b, WgmmaQueue& q, int group, const WgmmaOperation& op) {
  const WarpgroupMma& s = op.shape;
  check_a_registers(b, group, op);
  std::vector<float> a(64 * 16), bm(static_cast<size_t>(16) * s.n), product(static_cast<size_t>(64) * s.n);
  if (s.a)
    fetch_a_registers(op, a.data());
  else
    fetch(b, Operand(s.a_descriptor, s.a_transposed), 64, s.type, true, a.data());
  fetch(b, Operand(s.b_descriptor, s.b_transposed), s.n, s.type, false, bm.data());
  multiply(product.data(), a.data(), bm.data(), 64, s.n, 16);
  for (size_t i = 0; i < q.accumulators.size(); i++) {
    Accumulator& acc = q.accumulators[i];
    if (acc.d[0] != s.d) continue;
    for (size_t e = 0; e < product.size(); e++) acc.values[e] = (s.accumulate ? acc.values[e] : 0.f) + product[e];
    if (--acc.in_flight == 0) let_go(b, q, group, i);
    break;
  }
  for (int i = 0; i < 128; i++) b.clocks.acquire(group * 128 + i, b.clocks.warpgroup_engine(group), op.clock);
}

}  // namespace

void wgmma(const WarpgroupMma& operation, Site where) { meet(kIssue, &operation, "wgmma", where, issue); }

void wgmma_fence(Site where) {
  meet(kFence, nullptr, "wgmma.fence", where, [](Block&, WgmmaQueue& q, int) { q.fenced = true; });
}

void wgmma_commit(Site where) {
  meet(kCommit, nullptr, "wgmma.commit_group", where, [](Block&, WgmmaQueue& q, int) {
    q.groups.push_back(std::move(q.uncommitted));
    q.uncommitted.clear();
  });
}

void wgmma_wait(int groups_left, Site where) {
  meet(kWait, nullptr, "wgmma.wait_group", where, [groups_left](Block& b, WgmmaQueue& q, int group) {
    while (static_cast<int>(q.groups.size()) > groups_left) {
      for (const WgmmaOperation& op : q.groups.front()) retire(b, q, group, op);
      q.groups.pop_front();
      q.fenced = false;  // the registers are the threads' again
    }
  });
}

}  // namespace emu
