// Prefill attention: many query tokens per sequence, over contiguous (ragged) or paged keys and values.
//
// A task is a tile of query tokens of one sequence and one kv head; its rows are (token, head of the group). Keys come in blocks
// at absolute positions, packed once per task and used by all its panels of rows. A row's bits therefore depend on its own
// position and keys alone: not on the tile, the chunk of a prompt, the batch, or the number of threads.
#include <atomic>

#include "attention.h"
#include "kernels.h"
#include "threads.h"
#include "tile.h"

namespace pk {
namespace {

constexpr int64_t kTasksPerThread = 6;     // the last ones are short, so that threads end together
constexpr int64_t kMinRows = 48;           // of a task, below which packing K and V outweighs their use
constexpr int64_t kMaxTileFloats = 24576;  // of queries, and of accumulators: both stay in L2 with a block of K and V
constexpr double kInlineFlops = 2e5;       // work below which waking the team costs more than it saves

// One call, ragged or paged: `block_table` is absent when ragged, and `cu_seqlens_k` when paged.
struct Call {
  const char* op;
  const Tensor &q, &k, &v, &k_scale, &v_scale, &block_table, &cu_seqlens_q, &cu_seqlens_k, &seqlens_k, &out, &lse;
  Scoring scoring;
  int64_t batch, heads, kv_heads, group, dim, dim_v;

  int64_t q_first(int64_t b) const { return index_at(cu_seqlens_q, b); }
  int64_t q_len(int64_t b) const { return q_first(b + 1) - q_first(b); }
  int64_t k_len(int64_t b) const {
    return block_table ? index_at(seqlens_k, b) : index_at(cu_seqlens_k, b + 1) - index_at(cu_seqlens_k, b);
  }
  template <class T>
  KvRows<T> rows(const Tensor& data, const Tensor& scale, int64_t b) const {
    return block_table ? paged_rows<T>(data, scale, block_table, b) : ragged_rows<T>(data, index_at(cu_seqlens_k, b));
  }
};

// Query tokens [first, first + tokens) of a sequence.
struct Task {
  int64_t sequence, first, tokens;
};

// What a thread needs for one task.
struct Room {
  int64_t acc_stride;
  float *acc, *spare_acc, *scores, *state;
  uint32_t *query, *keys, *values, *spare_values, *weights;

  static int64_t floats(const Call& c, int64_t rows) {
    const int64_t panels = (rows + kPanel - 1) / kPanel, wide = padded(c.dim_v, kLanes);
    return padded((panels + 1) * kPanel * wide + 2 * kPanel * kBlock + panels * 3 * kRowStep + panels * kPanel * kQueryUnits<FloatStep> +
                      kBlock * (c.dim + 2 * wide),
                  1024);
  }
  Room(float* base, const Call& c, int64_t rows) : acc_stride(padded(c.dim_v, kLanes)) {
    const int64_t panels = (rows + kPanel - 1) / kPanel;
    const auto take = [&](int64_t n) { return std::exchange(base, base + n); };
    const auto take_units = [&](int64_t n) { return reinterpret_cast<uint32_t*>(take(n)); };
    keys = take_units(kBlock * c.dim), values = take_units(kBlock * acc_stride), spare_values = take_units(kBlock * acc_stride);
    scores = take(kPanel * kBlock), weights = take_units(kPanel * kBlock);
    acc = take(panels * kPanel * acc_stride), spare_acc = take(kPanel * acc_stride);
    state = take(panels * 3 * kRowStep), query = take_units(panels * kPanel * kQueryUnits<FloatStep>);
  }
  RowState rows(int64_t panel) const {
    float* s = state + panel * 3 * kRowStep;
    return {s, s + kRowStep, s + 2 * kRowStep};
  }
};

template <class Step>
class TileAttention {
 public:
  TileAttention(const Call& call, const Task& task, int64_t kv_head, const Room& room)
      : c_(call),
        task_(task),
        head_(kv_head * call.group),
        kv_head_(kv_head),
        room_(room),
        rows_(task.tokens * call.group),
        panels_((rows_ + kPanel - 1) / kPanel),
        keys_(call.k_len(task.sequence)),
        position_(keys_ - call.q_len(task.sequence) + task.first) {}

  template <class T>
  void run() {
    load_queries();
    const KvRows<T> k = c_.template rows<T>(c_.k, c_.k_scale, task_.sequence), v = c_.template rows<T>(c_.v, c_.v_scale, task_.sequence);
    const Range seen = c_.scoring.visible(position_, position_ + task_.tokens - 1, keys_);
    for (int64_t first = seen.begin / kBlock * kBlock; first < seen.end; first += kBlock) {
      pack<T>(k, v, first, Range{first, first + kBlock}.meet(seen));
      for (int64_t panel = 0; panel < panels_; ++panel) attend_block(panel, first);
    }
    store_rows();
  }

 private:
  int64_t token_of(int64_t row) const { return row / c_.group; }
  Range row_range(int64_t row) const { return c_.scoring.visible(position_ + token_of(row), keys_); }

  void load_queries() {
    std::fill(room_.query + (panels_ - 1) * kPanel * kQueryUnits<Step>, room_.query + panels_ * kPanel * kQueryUnits<Step>, 0u);
    std::fill(room_.acc, room_.acc + panels_ * kPanel * room_.acc_stride, 0.f);
    for (int64_t i = 0; i < panels_; ++i) room_.rows(i).clear(kPanel);
    visit_float(c_.q.dtype, [&]<class Q>() {
      for (int64_t r = 0; r < rows_; ++r) {
        const int64_t token = c_.q_first(task_.sequence) + task_.first + token_of(r), head = head_ + r % c_.group;
        pack_query<Step>(c_.q.template as<Q>() + token * c_.q.stride[0] + head * c_.q.stride[1], c_.dim,
                         room_.query + r * kQueryUnits<Step>);
      }
    });
  }

  // K and V of the keys `live` of the block at `first`; the rest of the block is zero, whatever memory holds.
  template <class T>
  void pack(const KvRows<T>& k, const KvRows<T>& v, int64_t first, Range live) {
    const T* rows[kBlock] = {};
    const float* scale_at[kBlock] = {};
    float scales[kBlock] = {};
    const auto locate = [&](const KvRows<T>& source) {
      source.locate(live.begin, live.end, rows + (live.begin - first), scale_at + (live.begin - first));
      for (int64_t t = live.begin - first; t < live.end - first; ++t) {
        rows[t] += kv_head_ * source.head_stride;
        if constexpr (is_code<T>) scales[t] = scale_at[t][kv_head_ * source.scale_head_stride];
      }
    };
    locate(k);
    pack_keys<Step>(rows, scales, c_.dim, room_.keys);
    locate(v);
    values_finite_ = pack_values<Step>(rows, scales, c_.dim_v, room_.values);
  }

  void attend_block(int64_t panel, int64_t first) {
    const int64_t r0 = panel * kPanel, r1 = std::min(r0 + kPanel, rows_) - 1;
    const Range seen = c_.scoring.visible(position_ + token_of(r0), position_ + token_of(r1), keys_).meet({first, first + kBlock});
    if (seen.empty()) return;
    const int begin = int(seen.begin - first) / kLanes, end = int(seen.end - first + kLanes - 1) / kLanes;
    const Range vectors{first + begin * kLanes, first + end * kLanes};
    const int64_t units = c_.dim / Step::kWidth;
    for (int s = begin * kLanes / kStrip * kStrip; s < end * kLanes; s += kStrip)
      score_panel<Step>(room_.query + r0 * kQueryUnits<Step>, room_.keys + s * units, units, room_.scores + s);
    if (!c_.scoring.plain())
      for (int64_t r = r0; r <= r1; ++r)
        c_.scoring.shape(room_.scores + (r - r0) * kBlock, begin, end, task_.sequence, head_ + r % c_.group, position_ + token_of(r),
                         first);
    bool hidden = false;
    if (!row_range(r0).meet(row_range(r1)).covers(vectors)) {
      for (int64_t r = r0; r <= r1; ++r) {
        const Range own = row_range(r);
        if (own.covers(vectors)) continue;
        hide(room_.scores + (r - r0) * kBlock, begin, end, first, own);
        hidden = true;
      }
    }
    const RowState state = room_.rows(panel);
    softmax_step(room_.scores, kPanel, begin, end, c_.scoring.factor(), state,
                 [&](int64_t row, int64_t key, vf p) { put_weights(Step{}, room_.weights + row * (kBlock / Step::kWidth), key, p); });
    float* acc = room_.acc + r0 * room_.acc_stride;
    if (hidden && !values_finite_) {
      for (int64_t r = r0; r <= r1; ++r) weigh_alone(r, first, room_.weights, state.shrink, acc);
    } else {
      weigh(room_.weights, room_.values, {seen.begin - first, seen.end - first}, state.shrink, acc);
    }
  }

  // acc[kPanel] = acc * shrink + weights * V over keys [keys.begin, keys.end) of the block, rounded outwards to whole units.
  void weigh(const uint32_t* weights, const uint32_t* values, Range keys, const float* shrink, float* acc) const {
    const int64_t begin = keys.begin / Step::kWidth, steps = (keys.end + Step::kWidth - 1) / Step::kWidth - begin;
    for (int64_t x = 0; x < room_.acc_stride; x += kStrip) {
      const int64_t columns = std::min<int64_t>(kStrip, room_.acc_stride - x);
      weigh_strip<Step>(int(columns / kLanes), weights + begin, values + x * (kBlock / Step::kWidth) + begin * columns, steps, shrink,
                        acc + x, room_.acc_stride);
    }
  }

  // The same for one row of the panel, with the values that it does not see set to zero: 0 x NaN is NaN. Rare, so not fast.
  void weigh_alone(int64_t row, int64_t first, const uint32_t* weights, const float* shrink, float* acc) const {
    const Range own = row_range(row).meet({first, first + kBlock});
    if (own.empty()) return;
    std::copy_n(room_.values, kBlock / Step::kWidth * room_.acc_stride, room_.spare_values);
    for (int t = 0; t < kBlock; ++t)
      if (first + t < own.begin || first + t >= own.end) clear_value<Step>(room_.spare_values, c_.dim_v, t);
    std::copy_n(acc, kPanel * room_.acc_stride, room_.spare_acc);
    weigh(weights, room_.spare_values, {own.begin - first, own.end - first}, shrink, room_.spare_acc);
    const int64_t offset = row % kPanel * room_.acc_stride;
    std::copy_n(room_.spare_acc + offset, room_.acc_stride, acc + offset);
  }

  void store_rows() const {
    visit_float(c_.out.dtype, [&]<class O>() {
      for (int64_t r = 0; r < rows_; ++r) {
        const int64_t token = c_.q_first(task_.sequence) + task_.first + token_of(r), head = head_ + r % c_.group;
        const RowState state = room_.rows(r / kPanel);
        const RowEnd end = finish_row(state.peak[r % kPanel], state.sum[r % kPanel], c_.scoring.factor(), c_.scoring.sink(head));
        if (c_.lse) c_.lse.template as<float>()[head * c_.lse.stride[0] + token * c_.lse.stride[1]] = end.lse;
        O* out = c_.out.template as<O>() + token * c_.out.stride[0] + head * c_.out.stride[1];
        const float* acc = room_.acc + r * room_.acc_stride;
        for (int64_t x = 0; x < c_.dim_v; x += kLanes) store_n(out + x, load(acc + x) * set1(end.scale), int(c_.dim_v - x));
      }
    });
  }

  const Call& c_;
  const Task& task_;
  int64_t head_, kv_head_;  // first query head of the group
  const Room& room_;
  int64_t rows_, panels_, keys_, position_;  // position_: of the first row, among the keys
  bool values_finite_ = true;
};

void check(const Call& c, int64_t max_seqlen_q, int64_t max_seqlen_k) {
  check_cu_seqlens(c.op, "cu_seqlens_q", c.cu_seqlens_q, c.q.size[0], "max_seqlen_q", max_seqlen_q);
  if (!c.block_table) return check_cu_seqlens(c.op, "cu_seqlens_k", c.cu_seqlens_k, c.k.size[0], "max_seqlen_k", max_seqlen_k);
  for (int64_t b = 0; b < c.batch; ++b) {
    check_seqlen(c.op, c.seqlens_k, b, c.block_table, c.k.size[1]);
    const int64_t keys = c.k_len(b), queries = c.q_len(b);
    if (keys > max_seqlen_k) refuse(c.op, "max_seqlen_k", "at least " + at("seqlens_k", b) + " = " + std::to_string(keys), max_seqlen_k);
    if (queries > 0) check_pages(c.op, c.block_table, b, c.scoring.visible(keys - queries, keys - 1, keys), c.k.size[1], c.k.size[0]);
  }
}

// Rows that belong to no sequence.
void clear_padding(const Call& c) {
  visit_float(c.out.dtype, [&]<class O>() {
    for (int64_t t = c.q_first(c.batch); t < c.q.size[0]; ++t)
      for (int64_t h = 0; h < c.heads; ++h) {
        O* out = c.out.as<O>() + t * c.out.stride[0] + h * c.out.stride[1];
        std::fill(out, out + c.dim_v, O{});
        if (c.lse) c.lse.as<float>()[h * c.lse.stride[0] + t * c.lse.stride[1]] = -kInf;
      }
  });
}

// Query tokens of a tile: many, to use a packed block often, but few enough for the threads to share the work evenly.
int64_t tile_tokens(const Call& c, int64_t threads) {
  const int64_t total = c.q_first(c.batch) * c.heads;
  const int64_t largest = std::max<int64_t>(kMinRows, kMaxTileFloats / std::max(c.dim, c.dim_v));
  const int64_t rows = std::clamp(padded(total / (kTasksPerThread * threads), kPanel), kMinRows, largest);
  return std::max<int64_t>(1, rows / std::max<int64_t>(1, c.group));
}

template <class T>
void attend(const Call& c, const Task& task, int64_t kv_head, const Room& room) {
  if constexpr (kLanes == 16 && std::is_same_v<T, bf16>)
    if (pairs_are_fast()) return TileAttention<Bf16Step>(c, task, kv_head, room).template run<T>();
  TileAttention<FloatStep>(c, task, kv_head, room).template run<T>();
}

void run(const Call& c, int64_t max_seqlen_q, int64_t max_seqlen_k) {
  check(c, max_seqlen_q, max_seqlen_k);
  clear_padding(c);
  const int64_t threads = team().size(), tokens = tile_tokens(c, threads);
  static thread_local Scratch task_memory, room_memory;
  int64_t count = 0;
  double flops = 0;
  for (int64_t b = 0; b < c.batch; ++b) {
    count += (c.q_len(b) + tokens - 1) / tokens;
    flops += 2.0 * double(c.q_len(b)) * double(c.k_len(b)) * double(c.heads * (c.dim + c.dim_v));
  }
  Task* tasks = task_memory.get<Task>(count);
  int64_t at = 0;
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t t = 0; t < c.q_len(b); t += tokens) tasks[at++] = {b, t, std::min(tokens, c.q_len(b) - t)};
  const auto work = [&](const Task& t) { return t.tokens * (c.k_len(t.sequence) - c.q_len(t.sequence) + t.first + t.tokens); };
  std::sort(tasks, tasks + count, [&](const Task& a, const Task& b) { return work(a) > work(b); });

  const int64_t workers = flops < kInlineFlops ? 1 : threads, floats = Room::floats(c, tokens * c.group);
  float* rooms = room_memory.get<float>(workers * floats);
  std::atomic<int64_t> next{0};
  visit_cache(c.k.dtype, [&]<class T>() {
    team().parallel_for(workers, 1, [&](int64_t, int64_t, int tid) {
      const Room room(rooms + tid * floats, c, tokens * c.group);
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count * c.kv_heads;)
        attend<T>(c, tasks[i / c.kv_heads], i % c.kv_heads, room);
    });
  });
}

Call make_call(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_scale, const Tensor& v_scale,
               const Tensor& block_table, const Tensor& cu_seqlens_q, const Tensor& lengths, const Mask& mask, const Tensor& out,
               const Tensor& lse) {
  const int kv = k.ndim - 2;  // which dimension counts kv heads
  return {op,
          q,
          k,
          v,
          k_scale,
          v_scale,
          block_table,
          cu_seqlens_q,
          lengths,
          lengths,
          out,
          lse,
          Scoring(mask),
          cu_seqlens_q.size[0] - 1,
          q.size[1],
          k.size[kv],
          q.size[1] / k.size[kv],
          q.size[2],
          v.size[kv + 1]};
}

}  // namespace

void prefill_attention(const PrefillParams& p) {
  const Tensor none;
  run(make_call("prefill_attention", p.q, p.k, p.v, none, none, none, p.cu_seqlens_q, p.cu_seqlens_k, p.mask, p.out, p.lse), p.max_seqlen_q,
      p.max_seqlen_k);
}

void paged_prefill_attention(const PagedPrefillParams& p) {
  run(make_call("paged_prefill_attention", p.q, p.k_cache, p.v_cache, p.k_scale, p.v_scale, p.block_table, p.cu_seqlens_q, p.seqlens_k,
                p.mask, p.out, p.lse),
      p.max_seqlen_q, p.max_seqlen_k);
}

}  // namespace pk
