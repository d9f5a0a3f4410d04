// One row after its scan: what the chunks say together, and what temperature, min-p, top-k and top-p keep of it.
#pragma once
#include "device/token_select.cuh"
#include "token_scan.h"

namespace pk::cuda {

using device::Candidates, device::SelectSpace;

struct RowFilters {
  const float *temperature, *top_p, *min_p;
  const int32_t* top_k;
  int64_t temperature_stride, top_p_stride, min_p_stride, top_k_stride;
};

// The distribution of a row: candidates from `last` up, and what their weights sum to.
struct KeptRow {
  uint64_t last;
  double mass;  // 1 is the weight of the first token
  float top, heat, min_p;
  uint32_t valid;
};

struct Combined {
  uint64_t first;
  float mass;
  bool valid;
};

// Of the row's chunks, in an order that depends on their number alone. heat 0: no mass.
PK_DEVICE Combined combine(const ChunkStats* stats, int chunks, float heat, uint64_t* partial, float* sums) {
  uint64_t first = 0, bad = 0;
  for (int i = static_cast<int>(threadIdx.x); i < chunks; i += static_cast<int>(blockDim.x)) {
    first = stats[i].first > first ? stats[i].first : first;
    bad |= stats[i].bad;
  }
  first = device::max_block(first, partial);
  bad = device::max_block(bad, partial);
  const float top = device::logit_of(first);
  const bool valid = !bad && top > -INFINITY;
  float mass = 0.f;
  for (int i = static_cast<int>(threadIdx.x); valid && heat != 0.f && i < chunks; i += static_cast<int>(blockDim.x)) {
    const float share = expf(device::heated(device::logit_of(stats[i].first), top, heat));
    if (share > 0.f) mass += stats[i].mass * share;
  }
  return {first, device::reduce_block<device::Sum>(mass, sums), valid};
}

// The mass of the logits as given.
PK_DEVICE KeptRow combine_raw(const ChunkStats* stats, int chunks, float* sums) {
  float top = -INFINITY, mass = 0.f;
  for (int i = static_cast<int>(threadIdx.x); i < chunks; i += static_cast<int>(blockDim.x)) top = fmaxf(top, stats[i].raw_top);
  top = device::reduce_block<device::Max>(top, sums);
  for (int i = static_cast<int>(threadIdx.x); i < chunks; i += static_cast<int>(blockDim.x)) {
    const float share = expf(device::heated(stats[i].raw_top, top, 1.f));
    if (share > 0.f) mass += stats[i].raw_mass * share;
  }
  return {0, device::reduce_block<device::Sum>(mass, sums), top, 1.f, 0.f, 1u};
}

// Filters a valid row. Where nothing but temperature applies, `c` is left as all of the row and `filtered` is false.
PK_DEVICE KeptRow filter_row(Candidates& c, const RowFilters& f, int64_t owner, const Combined& row, bool& filtered, SelectSpace& s) {
  const float heat = f.temperature[owner * f.temperature_stride], top = device::logit_of(row.first);
  const float top_p = f.top_p[owner * f.top_p_stride], min_p = f.min_p[owner * f.min_p_stride];
  int top_k = f.top_k[owner * f.top_k_stride];
  if (top_k <= 0 || top_k >= c.row.size) top_k = 0;
  filtered = heat != 0.f && (top_k > 0 || top_p < 1.f || min_p > 0.f);
  c.support = {top, heat == 0.f ? 1.f : heat, min_p};
  double mass = heat == 0.f ? 1.0 : row.mass;
  if (heat == 0.f) c.last = row.first;
  if (filtered) mass = static_cast<double>(device::keep_prefix(c, top_k, top_p, s)) / static_cast<double>(device::kWeightUnit);
  return {c.last, mass, top, c.support.heat, min_p, 1u};
}

}  // namespace pk::cuda
