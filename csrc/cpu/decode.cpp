// Decode attention: one query token per sequence over a paged cache, and the merge of two partial results.
//
// A sequence's keys are cut into splits whose size depends on its own length alone; a work unit is a split and some kv heads.
// For each block of keys the K and V rows are loaded once for all query heads of the group. Splits are merged in order, so
// a request's bits depend on neither the batch nor the number of threads.
#include <atomic>
#include <optional>

#include "attention.h"
#include "decode_block.h"
#include "kernels.h"
#include "paged_kv.h"
#include "threads.h"

namespace pk {
namespace {

constexpr const char* kOp = "paged_decode_attention";
constexpr int64_t kMinSplit = 128, kMaxSplits = 32;  // short enough to share among threads, long enough that merging is nothing
constexpr int64_t kShortKeys = 512;                  // up to here a split is one block, or threads would wait for the longest
constexpr int64_t kInlineBytes = 1 << 15;            // of K and V below which waking the team costs more than it saves
constexpr int64_t kUnitBytes = 1 << 16;              // of K and V per block of a unit: the next block is on its way to L2 meanwhile

int64_t split_tokens(int64_t requested, int64_t keys) {
  const int64_t least = keys <= kShortKeys ? kBlock : kMinSplit;
  return requested > 0 ? requested : std::max(least, padded((keys + kMaxSplits - 1) / kMaxSplits, kBlock));
}

// One split: keys [begin, end) of a sequence. Its partial result: weighted values [heads][acc_pad], peaks and sums [heads].
struct Split {
  int64_t sequence;
  Range keys;
};
struct Partial {
  float *acc, *peak, *sum;

  Partial(float* base, const Sizes& z, int64_t split)
      : acc(base + split * z.partial_floats()), peak(acc + z.heads * z.acc_pad), sum(peak + z.heads) {}
};

// The splits of sequence b, appended at `out`; returns how many.
int64_t cut(const PagedDecodeParams& p, const Scoring& scoring, int64_t b, Split* out) {
  const int64_t keys = index_at(p.seqlens_k, b), size = split_tokens(p.split_size, keys);
  const Range seen = scoring.visible(keys - 1, keys);
  int64_t n = 0;
  for (int64_t i = seen.begin / size; i * size < seen.end; ++i, ++n)
    if (out) out[n] = {b, Range{i * size, (i + 1) * size}.meet(seen)};
  return n;
}

// What a thread needs besides partial results.
struct Room {
  float *q, *state, *tile, *scores;

  static int64_t floats(const Sizes& z) {
    return z.heads * z.dim_pad + z.kv_heads * 3 * padded(z.group, kRowStep) + kLanes * z.dim_pad + z.group * kBlock;
  }
  Room(float* base, const Sizes& z)
      : q(base),
        state(q + z.heads * z.dim_pad),
        tile(state + z.kv_heads * 3 * padded(z.group, kRowStep)),
        scores(tile + kLanes * z.dim_pad) {}
  RowState rows(const Sizes& z, int64_t kv_head) const {
    const int64_t n = padded(z.group, kRowStep);
    float* s = state + kv_head * 3 * n;
    return {s, s + n, s + 2 * n};
  }
};

void load_query(const PagedDecodeParams& p, const Sizes& z, int64_t sequence, int64_t head, float* q) {
  visit_float(p.q.dtype, [&]<class Q>() {
    const Q* row = p.q.as<Q>() + sequence * p.q.stride[0] + head * p.q.stride[1];
    for (int64_t i = 0; i < z.dim_pad; i += kLanes) store(q + i, load_n(row + i, int(z.dim - i)));
  });
}

// As it is, in pairs, with zeros after it.
void load_query_pairs(const PagedDecodeParams& p, const Sizes& z, int64_t sequence, int64_t head, float* q) {
  std::fill(q, q + z.dim_pad, 0.f);
  std::memcpy(q, p.q.as<bf16>() + sequence * p.q.stride[0] + head * p.q.stride[1], size_t(z.dim) * sizeof(bf16));
}

// Scales of one head's codes in a block; zeros after the last, up to a whole vector.
struct BlockScales {
  float of[kBlock];

  BlockScales(const float* const* at, int n, int64_t offset) {
    for (int t = 0; t < n; ++t) of[t] = at[t][offset];
    for (int t = n; t % kLanes; ++t) of[t] = 0.f;
  }
};

// What a thread takes at a time: one split for kv heads [h0, h1).
struct Unit {
  int64_t index;  // of the split
  Split split;
  int64_t h0, h1;
};

// One unit: the same block of keys for one head after the other, since their rows are neighbours. `upcoming` may be null.
template <class P>
void attend_unit(const PagedDecodeParams& p, const Sizes& z, const Scoring& scoring, const Unit& unit, const Unit* upcoming, bool cold,
                 const Room& room, const Partial& partial) {
  using T = typename P::T;
  const Split& split = unit.split;
  const int64_t h0 = unit.h0, h1 = unit.h1, b = split.sequence, position = index_at(p.seqlens_k, b) - 1;
  const KvRows<T> keys = paged_rows<T>(p.k_cache, p.k_scale, p.block_table, b),
                  values = paged_rows<T>(p.v_cache, p.v_scale, p.block_table, b);
  for (int64_t h = h0; h < h1; ++h) {
    room.rows(z, h).clear(z.group);
    for (int64_t g = h * z.group; g < (h + 1) * z.group; ++g)
      (P::kPairs ? load_query_pairs : load_query)(p, z, b, g, room.q + g * z.dim_pad);
  }
  std::fill(partial.acc + h0 * z.group * z.acc_pad, partial.acc + h1 * z.group * z.acc_pad, 0.f);

  Block<T> blocks[2];
  blocks[0].locate(keys, values, split.keys);
  if (cold)  // nobody has fetched its first block
    for (int64_t h = h0; h < h1; ++h) {
      const Ahead<T> start = {&blocks[0], h * keys.head_stride, h * values.head_stride};
      for (int t = 0; t < blocks[0].n; ++t) start.fetch_key(t, z.dim);
      start.fetch_values(z.dim_v);
    }
  int current = 0;
  for (int64_t first = split.keys.begin; first < split.keys.end; first += kBlock, current ^= 1) {
    const Block<T>& block = blocks[current];
    Block<T>& next = blocks[current ^ 1];
    const bool last = first + kBlock >= split.keys.end;
    if (!last) {
      next.locate(keys, values, {first + kBlock, split.keys.end});
    } else if (upcoming) {
      const int64_t other = upcoming->split.sequence;
      next.locate(paged_rows<T>(p.k_cache, p.k_scale, p.block_table, other), paged_rows<T>(p.v_cache, p.v_scale, p.block_table, other),
                  upcoming->split.keys);
    }
    const int64_t shift = last && upcoming ? upcoming->h0 - h0 : 0;  // from a head to the one whose next block it fetches
    const int vectors = (block.n + kLanes - 1) / kLanes;
    for (int64_t h = h0; h < h1; ++h) {
      const bool follows = last ? upcoming && h + shift < upcoming->h1 : true;
      const Ahead<T> ahead = {follows ? &next : nullptr, (h + shift) * keys.head_stride, (h + shift) * values.head_stride};
      score_block<P>(block, ahead, h * keys.head_stride, z, room.q + h * z.group * z.dim_pad, room.tile, room.scores);
      if constexpr (is_code<T>) {
        const BlockScales scales(block.k_scale, block.n, h * keys.scale_head_stride);
        for (int64_t g = 0; g < z.group; ++g)
          for (int t = 0; t < vectors * kLanes; t += kLanes) {
            float* s = room.scores + g * kBlock + t;
            store(s, load(s) * load(scales.of + t));
          }
      }
      for (int64_t g = 0; g < z.group; ++g) {
        float* s = room.scores + g * kBlock;
        if (!scoring.plain()) scoring.shape(s, 0, vectors, b, h * z.group + g, position, first);
        for (int t = block.n; t < vectors * kLanes; ++t) s[t] = -kInf;
      }
      const RowState state = room.rows(z, h);
      if constexpr (is_code<T>) {
        const BlockScales scales(block.v_scale, block.n, h * values.scale_head_stride);
        softmax_step(room.scores, z.group, 0, vectors, scoring.factor(), state,
                     [&](int64_t g, int64_t t, vf p) { store(room.scores + g * kBlock + t, p * load(scales.of + t)); });
      } else {
        softmax_step(room.scores, z.group, 0, vectors, scoring.factor(), state,
                     [&](int64_t g, int64_t t, vf p) { put_weights(typename P::Step{}, room.scores + g * kBlock, t, p); });
      }
      weigh_block<P>(block, ahead, h * values.head_stride, z, room.scores, state.shrink, partial.acc + h * z.group * z.acc_pad);
    }
  }
  for (int64_t h = h0; h < h1; ++h)
    for (int64_t g = 0; g < z.group; ++g) {
      partial.peak[h * z.group + g] = room.rows(z, h).peak[g];
      partial.sum[h * z.group + g] = room.rows(z, h).sum[g];
    }
}

// Splits [first, first + n) of one (sequence, head), in order, into its row of out.
void merge_splits(const PagedDecodeParams& p, const Sizes& z, const Scoring& scoring, float* partials, int64_t first, int64_t n, int64_t b,
                  int64_t head) {
  float peak = -kInf, sum = 0.f;
  for (int64_t i = 0; i < n; ++i) peak = std::max(peak, Partial(partials, z, first + i).peak[head]);
  const float base = peak == -kInf ? 0.f : peak;
  const auto share = [&](const Partial& part) {
    return exp2_nonpositive(set1((part.peak[head] - base) * float(scoring.factor() * kLog2e)));
  };
  for (int64_t i = 0; i < n; ++i) {
    const Partial part(partials, z, first + i);
    sum += part.sum[head] * share(part)[0];
  }
  const RowEnd end = finish_row(peak, sum, scoring.factor(), scoring.sink(head));
  if (p.lse) p.lse.as<float>()[head * p.lse.stride[0] + b * p.lse.stride[1]] = end.lse;
  visit_float(p.out.dtype, [&]<class O>() {
    O* out = p.out.as<O>() + b * p.out.stride[0] + head * p.out.stride[1];
    vf total[kMaxHeadDim / kLanes] = {};
    for (int64_t i = 0; i < n; ++i) {
      const Partial part(partials, z, first + i);
      const vf weight = share(part);
      for (int64_t x = 0; x < z.dim_v; x += kLanes)
        total[x / kLanes] = fma(load(part.acc + head * z.acc_pad + x), weight, total[x / kLanes]);
    }
    for (int64_t x = 0; x < z.dim_v; x += kLanes) store_n(out + x, total[x / kLanes] * set1(end.scale), int(z.dim_v - x));
  });
}

void check(const PagedDecodeParams& p, const Scoring& scoring) {
  for (int64_t b = 0; b < p.q.size[0]; ++b) {
    check_seqlen(kOp, p.seqlens_k, b, p.block_table, p.k_cache.size[1]);
    const int64_t keys = index_at(p.seqlens_k, b);
    check_pages(kOp, p.block_table, b, scoring.visible(keys - 1, keys), p.k_cache.size[1], p.k_cache.size[0]);
  }
}

// Where partial results go: the caller's workspace, or memory of our own.
float* partial_memory(const PagedDecodeParams& p, const Sizes& z, int64_t splits) {
  static thread_local Scratch scratch;
  const int64_t floats = splits * z.partial_floats(), bytes = floats * int64_t(sizeof(float));
  if (!p.workspace) return scratch.get<float>(floats);
  if (p.workspace.size[0] < bytes)
    refuse(kOp, "workspace", "at least " + std::to_string(bytes) + " bytes (" + std::to_string(splits) + " splits)", p.workspace.size[0]);
  if (reinterpret_cast<uintptr_t>(p.workspace.data) % sizeof(float)) fail(std::string(kOp) + ": workspace must be aligned to 4 bytes");
  return p.workspace.as<float>();
}

// How many kv heads a unit takes: few enough for `workers` to share the work, and for a block to leave room in L2.
int64_t heads_per_unit(const Sizes& z, int64_t splits, int64_t workers, int64_t row_bytes) {
  const int64_t by_cache = std::max<int64_t>(1, kUnitBytes / (kBlock * row_bytes));
  const int64_t by_workers = std::max<int64_t>(1, z.kv_heads * splits / (2 * workers));
  return std::min({z.kv_heads, by_cache, by_workers});
}

template <class Visitor>
void visit_product(const PagedDecodeParams& p, Visitor&& visitor) {
  if constexpr (kLanes == 16)
    if (p.q.dtype == DType::bf16 && p.k_cache.dtype == DType::bf16 && pairs_are_fast())
      return visitor.template operator()<Product<bf16, Bf16Step>>();
  visit_cache(p.k_cache.dtype, [&]<class T>() { visitor.template operator()<Product<T, FloatStep>>(); });
}

}  // namespace

void paged_decode_attention(const PagedDecodeParams& p) {
  const Scoring scoring(p.mask);
  check(p, scoring);
  const Sizes z(p);
  static thread_local Scratch split_memory, room_memory;
  int64_t* starts = split_memory.get<int64_t>(z.batch + 1);  // of each sequence's splits
  starts[0] = 0;
  for (int64_t b = 0; b < z.batch; ++b) starts[b + 1] = starts[b] + cut(p, scoring, b, nullptr);
  const int64_t count = starts[z.batch];
  static thread_local Scratch list_memory, left_memory;
  Split* splits = list_memory.get<Split>(count);
  int64_t tokens = 0;
  for (int64_t b = 0; b < z.batch; ++b) cut(p, scoring, b, splits + starts[b]);
  for (int64_t i = 0; i < count; ++i) tokens += splits[i].keys.end - splits[i].keys.begin;

  float* partials = partial_memory(p, z, count);
  const int64_t row_bytes = (z.dim + z.dim_v) * size_of(p.k_cache.dtype);
  const int64_t workers = tokens * z.kv_heads * row_bytes < kInlineBytes ? 1 : team().size();
  const int64_t step = heads_per_unit(z, count, workers, row_bytes), per_split = (z.kv_heads + step - 1) / step, units = count * per_split;
  const int64_t room = padded(Room::floats(z), 1024);
  float* rooms = room_memory.get<float>(room * workers);
  std::atomic<int64_t> next{0};
  int32_t* left = left_memory.get<int32_t>(z.batch);  // units of each sequence that are not done
  const auto merge = [&](int64_t b) {
    for (int64_t head = 0; head < z.heads; ++head) merge_splits(p, z, scoring, partials, starts[b], starts[b + 1] - starts[b], b, head);
  };
  for (int64_t b = 0; b < z.batch; ++b)
    if (!(left[b] = int32_t((starts[b + 1] - starts[b]) * per_split))) merge(b);
  visit_product(p, [&]<class P>() {
    team().parallel_for(workers, 1, [&](int64_t, int64_t, int tid) {
      const Room own(rooms + tid * room, z);
      const auto take = [&]() -> std::optional<Unit> {
        const int64_t u = next.fetch_add(1, std::memory_order_relaxed), i = u / per_split, h = u % per_split * step;
        if (u >= units) return {};
        return Unit{i, splits[i], h, std::min(h + step, z.kv_heads)};
      };
      bool cold = true;
      for (std::optional<Unit> unit = take(), upcoming; unit; unit = upcoming) {
        upcoming = take();
        attend_unit<P>(p, z, scoring, *unit, upcoming ? &*upcoming : nullptr, std::exchange(cold, false), own,
                       Partial(partials, z, unit->index));
        const int64_t b = unit->split.sequence;
        if (std::atomic_ref(left[b]).fetch_sub(1, std::memory_order_acq_rel) == 1) merge(b);  // the last one
      }
    });
  });
}

// ---- merge ----------------------------------------------------------------------------------------------------------
namespace {

// out = (out_a e^lse_a + out_b e^lse_b) / (e^lse_a + e^lse_b). A side whose lse is -inf contributes nothing, whatever it holds.
template <class T>
void merge_row(const T* a, float lse_a, const T* b, float lse_b, T* out, float* lse, int64_t n) {
  const bool empty_a = lse_a == -kInf, empty_b = lse_b == -kInf;
  const float peak = empty_a ? lse_b : empty_b ? lse_a : std::max(lse_a, lse_b);
  const float share_a = empty_a ? 0.f : std::exp(lse_a - peak), share_b = empty_b ? 0.f : std::exp(lse_b - peak);
  const float total = share_a + share_b;
  const vf weight_a = set1(empty_a ? 0.f : share_a / total), weight_b = set1(empty_b ? 0.f : share_b / total);
  for (int64_t i = 0; i < n; i += kLanes) {
    const int lanes = int(n - i);
    vf sum = set1(0.f);
    if (!empty_a) sum = load_n(a + i, lanes) * weight_a;
    if (!empty_b) sum = fma(load_n(b + i, lanes), weight_b, sum);
    store_n(out + i, sum, lanes);
  }
  *lse = empty_a && empty_b ? -kInf : peak + std::log(total);
}

}  // namespace

void merge_attention_states(const MergeParams& p) {
  const int64_t tokens = p.out_a.size[0], heads = p.out_a.size[1], dim = p.out_a.size[2];
  constexpr int64_t kGrain = 64;  // rows below which waking the team costs more than the work
  const auto lse = [](const Tensor& t, int64_t head, int64_t token) { return t.as<float>() + head * t.stride[0] + token * t.stride[1]; };
  visit_float(p.out.dtype, [&]<class T>() {
    const auto row = [](const Tensor& t, int64_t token, int64_t head) { return t.as<T>() + token * t.stride[0] + head * t.stride[1]; };
    team().parallel_for(tokens * heads, kGrain, [&](int64_t begin, int64_t end, int) {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t t = r / heads, h = r % heads;
        merge_row<T>(row(p.out_a, t, h), *lse(p.lse_a, h, t), row(p.out_b, t, h), *lse(p.lse_b, h, t), row(p.out, t, h), lse(p.lse, h, t),
                     dim);
      }
    });
  });
}

}  // namespace pk
