// The wgmmas of one warpgroup: what is in flight, and the registers it holds.
#pragma once
#include <deque>
#include <vector>

#include "block.h"

namespace emu {

struct WgmmaOperation {
  WarpgroupMma shape;                 // of thread 0 of the group: descriptors and flags are the same in all
  std::vector<uint32_t> a_registers;  // [128][4] when A comes from registers, as they were at issue
  std::vector<const uint32_t*> a;     // [128], where they are
  uint32_t clock;                     // the group's engine
  Site where;
};

// The accumulator of a chain of wgmmas: its values while the registers are poisoned.
struct Accumulator {
  float* d[128];
  int n = 0;
  int in_flight = 0;
  std::vector<float> values;  // [64][n]
};

struct WgmmaQueue {
  int arrived = 0;
  int operation = 0;
  Site where = 0;
  const char* what = "";
  const WarpgroupMma* arguments[128] = {};
  bool fenced = false;
  std::vector<WgmmaOperation> uncommitted;
  std::deque<std::vector<WgmmaOperation>> groups;
  std::vector<Accumulator> accumulators;  // found by d[0]
};

}  // namespace emu
