// Draft verification: chain rejection sampling (Leviathan et al., "Fast inference from transformers via speculative decoding",
// ICML 2023). Every target row is scanned and filtered in parallel; then a block per request walks its drafts and draws once.
#include "aligned.h"
#include "device/draft_rows.cuh"
#include "device/indices.cuh"
#include "launch.h"
#include "token_filter.cuh"

namespace pk::cuda {
namespace {

using namespace device;

struct Call {
  const ChunkStats* stats;
  LogitRow logits;  // of row 0
  int64_t logits_row;
  int chunks;
  RowFilters filters;
  const int32_t* cu_draft;
  int64_t cu_stride;
  int requests, total_draft, room;
  Indices draft_ids;
  const float* draft_probs;  // null: one-hot
  int64_t draft_probs_row;
  const int64_t *seeds, *positions;
  int64_t seed_stride, position_stride;
  int64_t* ids;
  int32_t* num_accepted;
  int64_t ids_row, ids_stride, accepted_stride;
  KeptRow* kept;  // [target rows]
};

PK_DEVICE Candidates candidates_of(const Call& call, int64_t row) {
  Candidates c{call.logits, {}};
  c.row.data = offset(c.row.data, c.row.type, row * call.logits_row);
  return c;
}

__global__ void __launch_bounds__(kRowThreads, 1) filter_kernel(const Call call) {
  __shared__ SelectSpace space;
  __shared__ float sums[32];
  const int64_t row = blockIdx.x;
  const int owner = owner_of(call.cu_draft, call.cu_stride, call.requests, static_cast<int>(row));
  const float heat = call.filters.temperature[owner * call.filters.temperature_stride];
  const Combined all = combine(call.stats + row * call.chunks, call.chunks, heat, space.partial, sums);
  KeptRow kept{};
  if (all.valid) {
    Candidates c = candidates_of(call, row);
    bool filtered = false;
    kept = filter_row(c, call.filters, owner, all, filtered, space);
  }
  if (threadIdx.x == 0) call.kept[row] = kept;
}

// The drafts of a request, from bounds that are not trusted: nothing outside the tensors is read or written.
struct Drafts {
  int begin, length;
};
PK_DEVICE Drafts drafts_of(const Call& call, int request) {
  const int begin = call.cu_draft[request * call.cu_stride], end = call.cu_draft[(request + 1) * call.cu_stride];
  const int first = begin < 0 ? 0 : begin < call.total_draft ? begin : call.total_draft;
  int length = (end < call.total_draft ? end : call.total_draft) - first;
  length = length < call.room - 1 ? length : call.room - 1;
  return {first, length > 0 ? length : 0};
}

PK_DEVICE double probability(const Candidates& c, const KeptRow& kept, int id) {
  const float y = c.row.at(id), weight = c.support.weight(y);
  return token_of(y, id) >= kept.last && c.support.holds(y, weight) ? static_cast<double>(weight) / kept.mass : 0.0;
}

PK_DEVICE void aim(Candidates& c, const KeptRow& kept) {
  c.support = {kept.top, kept.heat, kept.min_p};
  c.last = kept.last;
}

// How many drafts are accepted, one thread's work: each step reads a few numbers.
PK_DEVICE int walk(const Call& call, int request, const Drafts& drafts) {
  const int64_t seed = call.seeds[request * call.seed_stride], position = call.positions[request * call.position_stride];
  int step = 0;
  for (; step < drafts.length; step++) {
    const int64_t row = drafts.begin + request + step, id = call.draft_ids.at(drafts.begin + step);
    const KeptRow kept = call.kept[row];
    if (!kept.valid || id < 0 || id >= call.logits.size) break;
    Candidates c = candidates_of(call, row);
    aim(c, kept);
    const double q = call.draft_probs ? call.draft_probs[(drafts.begin + step) * call.draft_probs_row + id] : 1.0;
    const float u = philox_uniform(seed, position + step, Purpose::accept, 0);
    if (!(u * q < probability(c, kept, static_cast<int>(id)))) break;
    call.ids[request * call.ids_row + step * call.ids_stride] = id;
  }
  return step;
}

// The token after the accepted ones: from p where all were accepted, otherwise from max(p - q, 0), and from p after all where
// rounding leaves nothing of that.
PK_DEVICE int last_draw(const Call& call, int request, const Drafts& drafts, int step, uint64_t* partial) {
  const int64_t row = drafts.begin + request + step;
  const KeptRow kept = call.kept[row];
  if (!kept.valid) return -1;
  Candidates c = candidates_of(call, row);
  aim(c, kept);
  const bool rejected = step < drafts.length;
  const Noise noise{call.seeds[request * call.seed_stride], call.positions[request * call.position_stride] + step,
                    rejected ? Purpose::resample : Purpose::sample};
  auto plain = [&](uint64_t token, float) { return heated(logit_of(token), kept.top, kept.heat) + noise.at(id_of(token)); };
  int id = -1;
  if (rejected && call.draft_probs) {
    const float* q = call.draft_probs + (drafts.begin + step) * call.draft_probs_row;
    const auto mass = static_cast<float>(kept.mass);
    id = race(
        c,
        [&](uint64_t token, float weight) {
          const float rest = weight / mass - q[id_of(token)];
          return rest > 0.f ? logf(rest) + noise.at(id_of(token)) : -INFINITY;
        },
        partial);
  } else if (rejected) {
    const int64_t drafted = call.draft_ids.at(drafts.begin + step);
    id = race(c, [&](uint64_t token, float weight) { return id_of(token) == drafted ? -INFINITY : plain(token, weight); }, partial);
  }
  return id >= 0 ? id : race(c, plain, partial);
}

__global__ void __launch_bounds__(kRowThreads, 1) verify_kernel(const Call call) {
  __shared__ uint64_t partial[32];
  __shared__ int accepted;
  const auto request = static_cast<int>(blockIdx.x);
  const Drafts drafts = drafts_of(call, request);
  if (threadIdx.x == 0) accepted = walk(call, request, drafts);
  __syncthreads();
  const int step = accepted, id = last_draw(call, request, drafts, step, partial);
  for (int i = step + static_cast<int>(threadIdx.x); i < call.room; i += static_cast<int>(blockDim.x)) {
    call.ids[request * call.ids_row + i * call.ids_stride] = i == step ? id : -1;
  }
  if (threadIdx.x == 0) call.num_accepted[request * call.accepted_stride] = step;
}

int64_t kept_offset(const VerifyParams& p) {
  return p.target_logits.size[0] * chunks_of(p.target_logits.size[1]) * static_cast<int64_t>(sizeof(ChunkStats));
}

Scan scan_of(const VerifyParams& p, ChunkStats* stats) {
  Scan s{};
  const Tensor& x = p.target_logits;
  s.logits = x.data, s.type = x.dtype, s.row_stride = x.stride[0], s.wide = rows_aligned(x);
  s.vocab = static_cast<int>(x.size[1]), s.rows = static_cast<int>(x.size[0]);
  s.temperature = p.temperature.as<float>(), s.temperature_stride = p.temperature.stride[0];
  s.cu_draft = p.cu_draft.as<int32_t>(), s.cu_stride = p.cu_draft.stride[0];
  s.requests = static_cast<int>(p.cu_draft.size[0]) - 1;
  s.stats = stats;
  return s;
}

Call call_of(const VerifyParams& p, const Scan& s, char* scratch) {
  Call c{};
  c.stats = s.stats, c.chunks = static_cast<int>(chunks_of(s.vocab));
  c.logits = {s.logits, s.type, s.wide, s.vocab}, c.logits_row = s.row_stride;
  c.filters = {p.temperature.as<float>(), p.top_p.as<float>(), p.min_p.as<float>(), p.top_k.as<int32_t>(),
               p.temperature.stride[0],   p.top_p.stride[0],   p.min_p.stride[0],   p.top_k.stride[0]};
  c.cu_draft = s.cu_draft, c.cu_stride = s.cu_stride, c.requests = s.requests;
  c.total_draft = static_cast<int>(p.draft_ids.size[0]), c.room = static_cast<int>(p.ids.size[1]);
  c.draft_ids = Indices(p.draft_ids);
  c.draft_probs = p.draft_probs.as<float>(), c.draft_probs_row = p.draft_probs ? p.draft_probs.stride[0] : 0;
  c.seeds = p.seeds.as<int64_t>(), c.seed_stride = p.seeds.stride[0];
  c.positions = p.positions.as<int64_t>(), c.position_stride = p.positions.stride[0];
  c.ids = p.ids.as<int64_t>(), c.ids_row = p.ids.stride[0], c.ids_stride = p.ids.stride[1];
  c.num_accepted = p.num_accepted.as<int32_t>(), c.accepted_stride = p.num_accepted.stride[0];
  c.kept = reinterpret_cast<KeptRow*>(scratch + kept_offset(p));
  return c;
}

}  // namespace

int64_t verify_draft_scratch_bytes(const VerifyParams& p) {
  return kept_offset(p) + p.target_logits.size[0] * static_cast<int64_t>(sizeof(KeptRow));
}

cudaError_t verify_draft(const VerifyParams& p, const Launch& on) {
  if (p.cu_draft.size[0] <= 1 || p.ids.size[1] == 0) return cudaSuccess;
  auto* scratch = static_cast<char*>(on.scratch);
  const Scan scan = scan_of(p, reinterpret_cast<ChunkStats*>(scratch));
  const Call call = call_of(p, scan, scratch);
  cudaError_t e = scan_tokens(scan, on);
  if (e == cudaSuccess) e = launch(filter_kernel, {dim3(static_cast<unsigned>(scan.rows)), row_threads(scan.vocab)}, on.stream, call);
  if (e == cudaSuccess) e = launch(verify_kernel, {dim3(static_cast<unsigned>(scan.requests)), row_threads(scan.vocab)}, on.stream, call);
  return e;
}

}  // namespace pk::cuda
