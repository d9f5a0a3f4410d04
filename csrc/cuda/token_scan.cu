// Scans chunks of rows: adjusts the logits, and finds the largest, the mass and the Gumbel-max winner in one pass over memory.
#include "device/draft_rows.cuh"
#include "device/reduce.cuh"
#include "launch.h"
#include "token_scan.h"

namespace pk::cuda {
namespace {

using namespace device;

// Each step is rounded: nothing may be fused.
PK_DEVICE float adjusted(const Adjustment& a, int64_t row, int id, float x, uint32_t occurrences) {
  if (a.bias) x = __fadd_rn(x, a.bias[row * a.bias_row + id]);
  if (a.allowed && !a.allowed[row * a.allowed_row + id]) x = -INFINITY;
  if (occurrences == 0) return x;
  if (a.repetition) {
    const float penalty = a.repetition[row * a.repetition_stride];
    x = x > 0.f ? __fdiv_rn(x, penalty) : __fmul_rn(x, penalty);
  }
  const auto times = static_cast<float>(occurrences & (kInPrompt - 1));
  if (a.presence && times > 0.f) x = __fsub_rn(x, a.presence[row * a.presence_stride]);
  if (a.frequency) x = __fsub_rn(x, __fmul_rn(a.frequency[row * a.frequency_stride], times));
  return x;
}

// (score, id) of the winner among eight tokens of depth z below the chunk's first; 0 where none can win.
PK_DEVICE uint64_t race_of_eight(const Noise& noise, int first, const float (&z)[kFloats]) {
  uint64_t best = 0;
#pragma unroll
  for (int half = 0; half < kFloats; half += 4) {
    const float most = fmaxf(fmaxf(z[half], z[half + 1]), fmaxf(z[half + 2], z[half + 3]));
    if (most + kLargestGumbel < kSmallestGumbel) continue;  // loses to the chunk's first token whatever is drawn
    const PhiloxBlock drawn = noise.block((first + half) / 4);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float score = z[half + j] + gumbel(uniform_of(drawn.word[j]));
      const uint64_t entry = token_of(score, first + half + j);
      if (score > -INFINITY && entry > best) best = entry;
    }
  }
  return best;
}

__global__ void __launch_bounds__(kScanThreads) scan_kernel(const Scan s) {
  __shared__ uint64_t partial[32];
  __shared__ float sums[32];
  const int64_t row = blockIdx.x;
  const int first = (static_cast<int>(blockIdx.y) * kScanThreads + static_cast<int>(threadIdx.x)) * kFloats;
  const int owner = s.cu_draft ? owner_of(s.cu_draft, s.cu_stride, s.requests, static_cast<int>(row)) : static_cast<int>(row);
  float x[kFloats];
  LogitRow{offset(s.logits, s.type, row * s.row_stride), s.type, s.wide, s.vocab}.load(first, x);
  uint64_t bad = 0;
#pragma unroll
  for (int j = 0; j < kFloats; j++) bad |= x[j] != x[j];

  ChunkStats stats{};
  if (s.raw) {
    float top = -INFINITY, mass = 0.f;
#pragma unroll
    for (int j = 0; j < kFloats; j++) top = fmaxf(top, x[j]);
    stats.raw_top = reduce_block<Max>(top, sums);
#pragma unroll
    for (int j = 0; j < kFloats; j++) mass += expf(heated(x[j], stats.raw_top, 1.f));
    stats.raw_mass = reduce_block<Sum>(mass, sums);
  }
  if (s.adjust.rows) {
    uint32_t* row_bits = s.adjust.rows + row * s.adjust.row_size;
#pragma unroll
    for (int j = 0; j < kFloats; j++) {
      if (first + j >= s.vocab) continue;
      x[j] = adjusted(s.adjust, row, first + j, x[j], s.adjust.counted ? row_bits[first + j] : 0u);
      row_bits[first + j] = __float_as_uint(x[j]);
      bad |= x[j] != x[j];
    }
  }
  uint64_t best = 0;
#pragma unroll
  for (int j = 0; j < kFloats; j++) {
    const uint64_t token = token_of(x[j], first + j);
    if (first + j < s.vocab && token > best) best = token;
  }
  stats.first = max_block(best, partial);
  stats.bad = max_block(bad, partial) != 0;
  const float heat = s.temperature[owner * s.temperature_stride], top = logit_of(stats.first);
  if (heat != 0.f && !stats.bad) {  // the same for the whole block
    float mass = 0.f;
#pragma unroll
    for (int j = 0; j < kFloats; j++) x[j] = heated(x[j], top, heat), mass += expf(x[j]);
    stats.mass = reduce_block<Sum>(mass, sums);
    if (s.seeds) {
      const Noise noise{s.seeds[owner * s.seed_stride], s.positions[owner * s.position_stride], Purpose::sample};
      stats.winner = max_block(race_of_eight(noise, first, x), partial);
    }
  }
  if (threadIdx.x == 0) s.stats[row * gridDim.y + blockIdx.y] = stats;
}

}  // namespace

cudaError_t scan_tokens(const Scan& scan, const Launch& on) {
  const dim3 blocks(static_cast<unsigned>(scan.rows), static_cast<unsigned>(chunks_of(scan.vocab)));
  return launch(scan_kernel, {blocks, dim3(kScanThreads)}, on.stream, scan);
}

}  // namespace pk::cuda
