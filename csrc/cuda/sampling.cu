// Sampling: bias, mask, penalties, temperature, min-p, top-k, top-p, draw and log-probabilities. A scan over chunks does all that
// a plain row needs, the draw included; then a block per row combines them, and reads the row again only where a filter asks.
#include "aligned.h"
#include "device/indices.cuh"
#include "launch.h"
#include "token_filter.cuh"

namespace pk::cuda {
namespace {

using namespace device;

constexpr int kCountThreads = 256, kMostLogprobs = 1024;

struct History {
  Indices ids;
  int64_t row_stride, vocab;
  int length;
  bool prompt;
  uint32_t* counts;
  int64_t counts_row;
};

__global__ void __launch_bounds__(kCountThreads) count_kernel(const History h) {
  const int i = static_cast<int>(blockIdx.y) * kCountThreads + static_cast<int>(threadIdx.x);
  if (i >= h.length) return;
  const int64_t row = blockIdx.x, id = h.ids.at(row * h.row_stride + i * h.ids.stride);
  if (id < 0 || id >= h.vocab) return;
  uint32_t* count = h.counts + row * h.counts_row + id;
  if (h.prompt) {
    atomicOr(count, kInPrompt);
  } else {
    atomicAdd(count, 1u);
  }
}

struct Call {
  const ChunkStats* stats;
  LogitRow y, reported;  // of row 0: adjusted; what log-probabilities are of
  int64_t y_row, reported_row;
  int chunks;
  RowFilters filters;
  const int64_t *seeds, *positions;
  int64_t seed_stride, position_stride;
  int64_t *ids, *top_ids;
  bool* valid;
  float *logprob, *top_logprobs;
  int64_t ids_stride, valid_stride, logprob_stride, top_ids_row, top_logprobs_row, top_ids_stride, top_logprobs_stride;
  bool report_raw;
  int wanted;
  KeptRow* kept;  // [rows], for top_kernel: of the reported distribution
};

PK_DEVICE LogitRow row_of(LogitRow row, int64_t elements) {
  row.data = offset(row.data, row.type, elements);
  return row;
}

// Gumbel-max among the chunks' winners.
PK_DEVICE int race_of_chunks(const ChunkStats* stats, int chunks, const Candidates& c, const Noise& noise, uint64_t* partial) {
  uint64_t best = 0;
  for (int i = static_cast<int>(threadIdx.x); i < chunks; i += static_cast<int>(blockDim.x)) {
    if (stats[i].winner == 0) continue;
    const int id = id_of(stats[i].winner);
    const float score = heated(c.row.at(id), c.support.top, c.support.heat) + noise.at(id);
    const uint64_t entry = token_of(score, id);
    if (score > -INFINITY && entry > best) best = entry;
  }
  best = max_block(best, partial);
  return best ? id_of(best) : -1;
}

__global__ void __launch_bounds__(kRowThreads, 1) draw_kernel(const Call call) {
  __shared__ SelectSpace space;
  __shared__ float sums[32];
  const int64_t row = blockIdx.x;
  const ChunkStats* stats = call.stats + row * call.chunks;
  const float heat = call.filters.temperature[row * call.filters.temperature_stride];
  const Combined all = combine(stats, call.chunks, heat, space.partial, sums);
  KeptRow kept{};
  int id = -1;
  if (all.valid) {
    Candidates c{row_of(call.y, row * call.y_row), {}};
    bool filtered = false;
    kept = filter_row(c, call.filters, row, all, filtered, space);
    const Noise noise{call.seeds[row * call.seed_stride], call.positions[row * call.position_stride], Purpose::sample};
    if (heat == 0.f) {
      id = id_of(all.first);
    } else if (filtered) {
      id = race(
          c, [&](uint64_t token, float) { return heated(logit_of(token), kept.top, kept.heat) + noise.at(id_of(token)); }, space.partial);
    } else {
      id = race_of_chunks(stats, call.chunks, c, noise, space.partial);
    }
  }
  if (call.report_raw && all.valid) kept = combine_raw(stats, call.chunks, sums);
  if (threadIdx.x != 0) return;
  call.ids[row * call.ids_stride] = id;
  call.valid[row * call.valid_stride] = all.valid;
  if (!call.logprob) return;
  const float z = all.valid ? heated(row_of(call.reported, row * call.reported_row).at(id), kept.top, kept.heat) : 0.f;
  call.logprob[row * call.logprob_stride] = all.valid ? z - logf(static_cast<float>(kept.mass)) : NAN;
  call.kept[row] = kept;
}

// The first tokens of the reported distribution: selected by count, then put where as many stand before them.
__global__ void __launch_bounds__(kRowThreads, 1) top_kernel(const Call call) {
  __shared__ SelectSpace space;
  __shared__ uint64_t chosen[kMostLogprobs];
  __shared__ unsigned gathered;
  const int64_t row = blockIdx.x;
  const KeptRow kept = call.kept[row];
  int64_t* ids = call.top_ids + row * call.top_ids_row;
  float* logprobs = call.top_logprobs + row * call.top_logprobs_row;
  int found = 0;
  if (kept.valid) {
    Candidates c{row_of(call.reported, row * call.reported_row), {kept.top, kept.heat, kept.min_p, call.report_raw}, kept.last};
    const Census all = prepare(c, static_cast<uint64_t>(call.wanted), 1.f, space);
    found = all.count < static_cast<uint64_t>(call.wanted) ? static_cast<int>(all.count) : call.wanted;
    if (all.count > static_cast<uint64_t>(call.wanted)) {
      c.last = last_token(c, all.lowest, token_of(kept.top, 0), false, static_cast<uint64_t>(call.wanted), space);
    }
    if (threadIdx.x == 0) gathered = 0;
    __syncthreads();
    c.each([&](uint64_t token, float) { chosen[atomicAdd(&gathered, 1u)] = token; });
    __syncthreads();
    const float log_mass = logf(static_cast<float>(kept.mass));
    for (int i = static_cast<int>(threadIdx.x); i < found; i += static_cast<int>(blockDim.x)) {
      int place = 0;
      for (int j = 0; j < found; j++) place += chosen[j] > chosen[i];
      const float z = heated(logit_of(chosen[i]), kept.top, kept.heat);
      ids[place * call.top_ids_stride] = id_of(chosen[i]);
      logprobs[place * call.top_logprobs_stride] = z - log_mass;
    }
  }
  for (int i = found + static_cast<int>(threadIdx.x); i < call.wanted; i += static_cast<int>(blockDim.x)) {
    ids[i * call.top_ids_stride] = -1;
    logprobs[i * call.top_logprobs_stride] = kept.valid ? -INFINITY : NAN;
  }
}

// Scratch memory, in this order; every part begins at a multiple of 16 bytes.
struct Layout {
  int64_t stats, kept, rows, row_size, bytes;
  bool counted, adjusts;
};

Layout layout_of(const SampleParams& p) {
  const int64_t batch = p.logits.size[0], vocab = p.logits.size[1];
  Layout l{};
  const bool penalties = p.repetition_penalty || p.presence_penalty || p.frequency_penalty;
  l.counted = penalties && (p.prompt_ids || p.output_ids);
  l.adjusts = l.counted || p.logit_bias || p.allowed_mask;
  l.row_size = (vocab + device::kFloats - 1) / device::kFloats * device::kFloats;
  l.kept = batch * chunks_of(vocab) * static_cast<int64_t>(sizeof(ChunkStats));
  l.rows = (l.kept + batch * static_cast<int64_t>(sizeof(KeptRow)) + 15) / 16 * 16;
  l.bytes = l.rows + (l.adjusts ? batch * l.row_size * 4 : 0);
  return l;
}

cudaError_t count(const Tensor& ids, bool prompt, const SampleParams& p, const Adjustment& adjust, const Launch& on) {
  if (!ids || ids.size[1] == 0) return cudaSuccess;
  Indices entries(ids);
  entries.stride = ids.stride[1];
  const History h{entries, ids.stride[0], p.logits.size[1], static_cast<int>(ids.size[1]), prompt, adjust.rows, adjust.row_size};
  const dim3 blocks(static_cast<unsigned>(ids.size[0]), static_cast<unsigned>((ids.size[1] + kCountThreads - 1) / kCountThreads));
  return launch(count_kernel, {blocks, dim3(kCountThreads)}, on.stream, h);
}

int64_t row_stride_of(const Tensor& t) { return t && t.ndim == 2 ? t.stride[0] : 0; }
int64_t stride_of(const Tensor& t, int d) { return t ? t.stride[d] : 0; }

Scan scan_of(const SampleParams& p, const Layout& l, char* scratch) {
  Scan s{};
  s.logits = p.logits.data, s.type = p.logits.dtype, s.row_stride = p.logits.stride[0], s.wide = rows_aligned(p.logits);
  s.vocab = static_cast<int>(p.logits.size[1]), s.rows = static_cast<int>(p.logits.size[0]);
  s.temperature = p.temperature.as<float>(), s.temperature_stride = p.temperature.stride[0];
  s.seeds = p.seeds.as<int64_t>(), s.seed_stride = p.seeds.stride[0];
  s.positions = p.positions.as<int64_t>(), s.position_stride = p.positions.stride[0];
  s.raw = p.logprob && p.logprobs_mode == LogprobsMode::raw;
  s.stats = reinterpret_cast<ChunkStats*>(scratch + l.stats);
  if (!l.adjusts) return s;
  Adjustment& a = s.adjust;
  a.bias = p.logit_bias.as<float>(), a.bias_row = row_stride_of(p.logit_bias);
  a.allowed = p.allowed_mask.as<uint8_t>(), a.allowed_row = row_stride_of(p.allowed_mask);
  a.repetition = p.repetition_penalty.as<float>(), a.repetition_stride = stride_of(p.repetition_penalty, 0);
  a.presence = p.presence_penalty.as<float>(), a.presence_stride = stride_of(p.presence_penalty, 0);
  a.frequency = p.frequency_penalty.as<float>(), a.frequency_stride = stride_of(p.frequency_penalty, 0);
  a.rows = reinterpret_cast<uint32_t*>(scratch + l.rows), a.row_size = l.row_size, a.counted = l.counted;
  return s;
}

Call call_of(const SampleParams& p, const Layout& l, const Scan& s, char* scratch) {
  Call c{};
  c.stats = s.stats, c.chunks = static_cast<int>(chunks_of(s.vocab));
  const LogitRow given{s.logits, s.type, s.wide, s.vocab};
  c.y = given, c.y_row = s.row_stride;
  if (l.adjusts) c.y = {s.adjust.rows, DType::f32, true, s.vocab}, c.y_row = l.row_size;
  c.report_raw = s.raw;
  c.reported = s.raw ? given : c.y, c.reported_row = s.raw ? s.row_stride : c.y_row;
  c.filters = {p.temperature.as<float>(), p.top_p.as<float>(), p.min_p.as<float>(), p.top_k.as<int32_t>(),
               p.temperature.stride[0],   p.top_p.stride[0],   p.min_p.stride[0],   p.top_k.stride[0]};
  c.seeds = s.seeds, c.seed_stride = s.seed_stride, c.positions = s.positions, c.position_stride = s.position_stride;
  c.ids = p.ids.as<int64_t>(), c.ids_stride = p.ids.stride[0];
  c.valid = p.valid.as<bool>(), c.valid_stride = p.valid.stride[0];
  c.logprob = p.logprob.as<float>(), c.logprob_stride = stride_of(p.logprob, 0);
  c.top_ids = p.top_ids.as<int64_t>(), c.top_ids_row = stride_of(p.top_ids, 0), c.top_ids_stride = p.top_ids ? p.top_ids.stride[1] : 0;
  c.top_logprobs = p.top_logprobs.as<float>(), c.top_logprobs_row = stride_of(p.top_logprobs, 0);
  c.top_logprobs_stride = p.top_logprobs ? p.top_logprobs.stride[1] : 0;
  c.wanted = p.top_ids ? static_cast<int>(p.top_ids.size[1]) : 0;
  c.kept = reinterpret_cast<KeptRow*>(scratch + l.kept);
  return c;
}

}  // namespace

int64_t sample_scratch_bytes(const SampleParams& p) { return layout_of(p).bytes; }

cudaError_t sample(const SampleParams& p, const Launch& on) {
  if (p.logits.size[0] == 0) return cudaSuccess;
  const Layout l = layout_of(p);
  auto* scratch = static_cast<char*>(on.scratch);
  const Scan s = scan_of(p, l, scratch);
  if (l.counted) {
    cudaError_t e = cudaMemsetAsync(s.adjust.rows, 0, static_cast<size_t>(s.rows * l.row_size * 4), on.stream);
    if (e == cudaSuccess) e = count(p.prompt_ids, true, p, s.adjust, on);
    if (e == cudaSuccess) e = count(p.output_ids, false, p, s.adjust, on);
    if (e != cudaSuccess) return e;
  }
  const Call call = call_of(p, l, s, scratch);
  const dim3 rows(static_cast<unsigned>(s.rows));
  cudaError_t e = scan_tokens(s, on);
  if (e == cudaSuccess) e = launch(draw_kernel, {rows, row_threads(s.vocab)}, on.stream, call);
  if (e == cudaSuccess && call.wanted > 0) e = launch(top_kernel, {rows, row_threads(s.vocab)}, on.stream, call);
  return e;
}

}  // namespace pk::cuda
