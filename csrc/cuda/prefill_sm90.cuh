// Prefill attention for sm_90a, after FlashAttention-3 (Shah et al., 2024): one warp fetches by TMA, warpgroups of 64 rows multiply
// by wgmma, and both S = Q K^T of the next keys and the softmax of these run beside O += P V.
//
// A block takes `tokens` queries of one sequence with all heads of one kv head's group: row r is query r / group and head r % group
// of the group, so that short queries fill a tile and K and V are read once for the group. Rows past tokens x group are idle.
//
// Key tiles go from the last that a row sees to the first. A tile is an edge if some row does not see some key of it: scores are
// masked there only, and infinities and NaN are taken out of V, since 0 x NaN would reach the rows that do not see them: an edge's V
// passes through the hands of warps 1 to 3. `with_special` gives them back to the rows that do see them.
#pragma once
#include "device/floats.cuh"
#include "prefill_sm90.h"

namespace pk::cuda {
namespace {

using namespace device;

// A place in a ring of buffers, and the parity of its round.
template <int Stages>
struct Ring {
  int stage = 0, parity = 0;
  PK_DEVICE void advance() {
    if (++stage < Stages) return;
    stage = 0;
    parity ^= 1;
  }
};

template <int D>
struct Sm90Block {
  static constexpr int kRows = prefill_sm90_rows(D), kKeys = kPrefillSm90Keys, kStages = prefill_sm90_stages(D), kPanels = D / 64;
  static constexpr int kConsumers = kRows / 64, kBlockThreads = 128 * (1 + kConsumers), kCleaners = 96;
  static constexpr int kCleanersMeet = 1 + kConsumers;  // a named barrier; those before it are the consumers' turns
  // Registers of a thread after the producer's warpgroup has given up its own; together 512 a lane.
  static constexpr int kProducerRegisters = 32, kConsumerRegisters = kConsumers == 2 ? 240 : 160;
  static constexpr uint32_t kQ = kRows * D * 2, kTile = kKeys * D * 2, kSpecial = kQ + 2 * kStages * kTile, kBarriers = kSpecial + 16;
  static constexpr size_t kBytes = kBarriers + 8 * (1 + 5 * kStages);

  const PrefillSm90Args& p;
  const PrefillArgs& a;
  uint32_t q;
  int kv_head, batch, token0, q_start;
  int q_len = 0, k_start = 0, k_len = 0;
  int last_key0 = 0, tiles = 0;     // key tiles that some row sees: the first key of the last, and how many
  int all_first = 0, all_last = 0;  // keys that every row sees

  PK_DEVICE uint32_t k(int stage) const { return q + kQ + stage * kTile; }
  PK_DEVICE uint32_t v(int stage) const { return k(kStages + stage); }
  PK_DEVICE uint32_t q_full() const { return q + kBarriers; }
  PK_DEVICE uint32_t k_full(int stage) const { return q_full() + 8 * (1 + stage); }
  PK_DEVICE uint32_t k_empty(int stage) const { return k_full(kStages + stage); }
  PK_DEVICE uint32_t v_full(int stage) const { return k_full(2 * kStages + stage); }
  PK_DEVICE uint32_t v_empty(int stage) const { return k_full(3 * kStages + stage); }
  PK_DEVICE uint32_t v_landed(int stage) const { return k_full(4 * kStages + stage); }  // an edge's values, not yet fit for use

  PK_DEVICE int key0(int tile) const { return last_key0 - tile * kKeys; }
  PK_DEVICE bool edge(int key0) const { return key0 < all_first || key0 + kKeys - 1 > all_last; }
  PK_DEVICE int token(int row) const { return token0 + a.group.quotient(row); }
  PK_DEVICE int head(int row) const { return kv_head * a.group.divisor + a.group.remainder(row, a.group.quotient(row)); }
  PK_DEVICE bool exists(int row) const { return row < p.tokens * a.group.divisor && token(row) < q_len; }
  PK_DEVICE Span seen(int token_index) const { return seen_by(a.scores, token_index + k_len - q_len, k_len); }

  PK_DEVICE void find_tiles() {
    const Span low = seen(token0), high = seen(min(q_len, token0 + p.tokens) - 1);
    const int first = low.first / kKeys;
    tiles = high.last < low.first ? 0 : high.last / kKeys + 1 - first;
    last_key0 = (first + tiles - 1) * kKeys;
    all_first = high.first;
    all_last = low.last;
  }
};

// -- the producer's warp -------------------------------------------------------------------------------------------------------------

template <int D>
PK_DEVICE void load_queries(const Sm90Block<D>& b) {
  using B = Sm90Block<D>;
  mbarrier_arrive_expect(b.q_full(), static_cast<uint32_t>(B::kPanels * 128 * b.p.tokens * b.a.group.divisor));
#pragma unroll
  for (int c = 0; c < B::kPanels; c++) {
    tma_load(b.q + c * B::kRows * 128, &b.p.q, b.q_full(), c * 64, b.kv_head * b.a.group.divisor, b.q_start + b.token0);
  }
}

// A tile of keys or values, a box for each lane. Pages that do not exist are outside the tensor: zero.
template <int D>
PK_DEVICE void load_keys(const Sm90Block<D>& b, const TensorMap& map, uint32_t to, uint32_t full, uint32_t empty, int parity, int key0) {
  using B = Sm90Block<D>;
  const int lane = static_cast<int>(threadIdx.x) % 32, offset = lane * b.p.box, key = key0 + offset;
  const bool has_box = offset < B::kKeys;
  const Slot slot = has_box && key < b.k_len ? b.a.pages.slot(b.batch, b.k_start, key) : Slot{-1, 0};
  mbarrier_wait(empty, parity ^ 1);
  if (lane == 0) mbarrier_arrive_expect(full, B::kTile);
  __syncwarp();
  if (!has_box) return;
#pragma unroll
  for (int c = 0; c < B::kPanels; c++) {
    tma_load(to + (c * B::kKeys + offset) * 128, &map, full, c * 64, b.kv_head, slot.offset, slot.page);
  }
}

// In the order in which they are used: the keys of a tile before the values of the one before.
template <int D>
PK_DEVICE void produce(const Sm90Block<D>& b) {
  using B = Sm90Block<D>;
  if (b.tiles == 0) return;
  if (threadIdx.x == 0) load_queries(b);
  Ring<B::kStages> k, v;
  for (int tile = 0; tile <= b.tiles; tile++) {
    if (tile < b.tiles) {
      load_keys(b, b.p.k, b.k(k.stage), b.k_full(k.stage), b.k_empty(k.stage), k.parity, b.key0(tile));
      k.advance();
    }
    if (tile > 0) {
      const int key0 = b.key0(tile - 1);
      const uint32_t full = b.edge(key0) ? b.v_landed(v.stage) : b.v_full(v.stage);
      load_keys(b, b.p.v, b.v(v.stage), full, b.v_empty(v.stage), v.parity, key0);
      v.advance();
    }
  }
}

// -- warps 1 to 3 --------------------------------------------------------------------------------------------------------------------

// Zeroes the infinities and NaN of the values of edge tiles. Notes whether the sequence had any; rows past its end are others'.
template <class T, int D>
PK_DEVICE void clean(const Sm90Block<D>& b, unsigned* special) {
  using B = Sm90Block<D>;
  Ring<B::kStages> v;
  uint32_t edges = 0;  // of each buffer: the parity of their number
  for (int tile = 0; tile < b.tiles; tile++, v.advance()) {
    const int key0 = b.key0(tile);
    if (!b.edge(key0)) continue;
    mbarrier_wait(b.v_landed(v.stage), edges >> v.stage & 1);
    edges ^= 1u << v.stage;
    bool found = false;
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x) - 32; i < B::kKeys * D / 8; i += B::kCleaners) {
      const uint32_t at = b.v(v.stage) + i * 16;
      const uint4 x = load_shared_128(at);
      const uint32_t bad[4] = {not_finite<T>(x.x), not_finite<T>(x.y), not_finite<T>(x.z), not_finite<T>(x.w)};
      if ((bad[0] | bad[1] | bad[2] | bad[3]) == 0) continue;
      const auto keep = [](uint32_t pair, uint32_t mask) { return pair & ~((mask >> 15) * 0xffffu); };
      store_shared_128(at, {keep(x.x, bad[0]), keep(x.y, bad[1]), keep(x.z, bad[2]), keep(x.w, bad[3])});
      found |= key0 + i / 8 % B::kKeys < b.k_len;
    }
    if (found) atomicOr(special, 1u);
    fence_proxy_async();
    barrier_sync(B::kCleanersMeet, B::kCleaners);
    if (threadIdx.x == 32) mbarrier_arrive(b.v_full(v.stage));
  }
}

// -- the consumers' warpgroups -------------------------------------------------------------------------------------------------------

// S = Q K^T for the warpgroup's 64 rows at `q`.
template <class T, int D>
PK_DEVICE void issue_scores(float (&s)[Sm90Block<D>::kKeys / 2], uint32_t q, uint32_t k) {
  using B = Sm90Block<D>;
  wgmma_hold(s);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < D / 16; i++) {
    wgmma_ss<T>(s, wgmma_descriptor(q + i / 4 * B::kRows * 128 + i % 4 * 32, 16, 1024),
                wgmma_descriptor(k + i / 4 * B::kKeys * 128 + i % 4 * 32, 16, 1024), i > 0);
  }
  wgmma_commit();
}

// O += P V, with P in registers and V read transposed.
template <class T, int D>
PK_DEVICE void issue_output(float (&o)[D / 2], const uint32_t (&weights)[Sm90Block<D>::kKeys / 16][4], uint32_t v) {
  using B = Sm90Block<D>;
  wgmma_hold(o);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < B::kKeys / 16; i++) wgmma_rs<T, true>(o, weights[i], wgmma_descriptor(v + i * 2048, B::kKeys * 128, 1024), true);
  wgmma_commit();
}

// The rows of a thread: two of its warp's sixteen.
template <int D>
struct Rows {
  int row, token[2];
  float slope[2];
  RowState state;

  PK_DEVICE Rows(const Sm90Block<D>& b, int first) : row(first + static_cast<int>(threadIdx.x) % 32 / 4) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      token[r] = b.token(row + 8 * r);
      slope[r] = b.exists(row + 8 * r) ? slope_of(b.a.scores, b.batch, b.head(row + 8 * r)) : 0.f;
    }
  }

  // Scores of the keys from key0 to weights, in place; by how much older sums shrink.
  template <bool Transformed>
  PK_DEVICE void weigh(const Sm90Block<D>& b, float (&s)[Sm90Block<D>::kKeys / 2], int key0, float (&shrink)[2]) {
    const Scores& scores = b.a.scores;
    if constexpr (Transformed) {
      const int offset = b.k_len - b.q_len, position[2] = {token[0] + offset, token[1] + offset};
      transform(s, scores, position, slope, key0);
    }
    if (b.edge(key0)) {
      const Span seen[2] = {b.seen(token[0]), b.seen(token[1])};
      hide(s, seen, key0);
    }
    state.update(s, Transformed ? 1.f : scores.scale, shrink);
  }
};

template <class T, int N>
PK_DEVICE void round_weights(uint32_t (&weights)[N / 8][4], const float (&s)[N]) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) weights[i / 4][i % 4] = pack<T>(s[2 * i], s[2 * i + 1]);
}

PK_DEVICE void give_back(uint32_t empty) {
  if (threadIdx.x % 128 == 0) mbarrier_arrive(empty);
}

// The key loop of a warpgroup: leaves the output, not yet divided by the sums. The warpgroups take turns at the tensor cores, so that
// one multiplies while the others are at their softmax.
template <class T, int D, bool Transformed>
PK_DEVICE void multiply(const Sm90Block<D>& b, int group, float (&o)[D / 2], Rows<D>& rows) {
  using B = Sm90Block<D>;
  float s[B::kKeys / 2] = {}, shrink[2];
  uint32_t weights[B::kKeys / 16][4];
  Ring<B::kStages> k, v;
  const uint32_t q = b.q + group * 64 * 128;
  mbarrier_wait(b.q_full(), 0);
  mbarrier_wait(b.k_full(k.stage), k.parity);
  issue_scores<T, D>(s, q, b.k(k.stage));
  wgmma_wait<0>();
  wgmma_hold(s);
  give_back(b.k_empty(k.stage));
  k.advance();
  rows.template weigh<Transformed>(b, s, b.key0(0), shrink);
  round_weights<T>(weights, s);
  for (int tile = 1; tile < b.tiles; tile++, k.advance(), v.advance()) {
    mbarrier_wait(b.k_full(k.stage), k.parity);
    if (tile > 1 || group > 0) barrier_sync(1 + group, 256);
    issue_scores<T, D>(s, q, b.k(k.stage));
    mbarrier_wait(b.v_full(v.stage), v.parity);
    issue_output<T, D>(o, weights, b.v(v.stage));
    if (group + 1 < B::kConsumers || tile + 1 < b.tiles) barrier_arrive(1 + (group + 1) % B::kConsumers, 256);
    wgmma_wait<1>();
    wgmma_hold(s);
    give_back(b.k_empty(k.stage));
    rows.template weigh<Transformed>(b, s, b.key0(tile), shrink);
    wgmma_wait<0>();
    wgmma_hold(o);
    give_back(b.v_empty(v.stage));
    if (__any_sync(kFullWarp, shrink[0] != 1.f || shrink[1] != 1.f)) {  // rare once the largest scores have been met
#pragma unroll
      for (int i = 0; i < D / 2; i++) o[i] *= shrink[row_of(i)];
    }
    round_weights<T>(weights, s);
  }
  mbarrier_wait(b.v_full(v.stage), v.parity);
  issue_output<T, D>(o, weights, b.v(v.stage));
  wgmma_wait<0>();
  wgmma_hold(o);
}

// -- the end -------------------------------------------------------------------------------------------------------------------------

// Eight outputs of a row plus the infinities and NaN among the values that it sees. Rare, so it may be slow.
template <class T, int D>
PK_DEVICE uint4 with_special(const Sm90Block<D>& b, uint4 out, int row, int chunk) {
  uint32_t sum[4] = {out.x, out.y, out.z, out.w};
  const DType type = std::is_same_v<T, __half> ? DType::f16 : DType::bf16;
  const Span seen = b.seen(b.token(row));
#pragma unroll 1
  for (int key = seen.first; key <= seen.last; key++) {
    const Slot slot = b.a.pages.slot(b.batch, b.k_start, key);
    if (!slot.exists()) continue;
    const uint4 v = load_global_128(b.a.v.rows.row(slot, b.kv_head) + chunk * 16);
    const uint32_t pair[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const uint32_t bad = not_finite<T>(pair[j]);
      const float2 x = unpack(type, sum[j]), y = unpack(type, pair[j] & (bad >> 15) * 0xffffu);
      if (bad) sum[j] = pack<T>(x.x + y.x, x.y + y.y);
    }
  }
  return {sum[0], sum[1], sum[2], sum[3]};
}

// A warp's sixteen rows through its own part of the query tile, then to memory in 16-byte pieces.
template <class T, int D>
PK_DEVICE void store_rows(const Sm90Block<D>& b, const float (&o)[D / 2], const float (&inverse)[2], int first, bool special) {
  using B = Sm90Block<D>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int n = 0; n < D / 8; n += 2) {
    const float* x = o + 4 * n;
    const uint32_t r[4] = {pack<T>(x[0] * inverse[0], x[1] * inverse[0]), pack<T>(x[2] * inverse[1], x[3] * inverse[1]),
                           pack<T>(x[4] * inverse[0], x[5] * inverse[0]), pack<T>(x[6] * inverse[1], x[7] * inverse[1])};
    stmatrix(b.q + chunk_at<B::kRows>(first + lane % 16, n + lane / 16), r);
  }
  __syncwarp();
#pragma unroll 1
  for (int i = lane; i < 16 * D / 8; i += 32) {
    const int row = first + i / (D / 8), chunk = i % (D / 8);
    if (!b.exists(row) || chunk * 8 >= b.a.dim_v) continue;
    char* to = b.a.out + (b.q_start + b.token(row)) * b.a.out_row + b.head(row) * b.a.out_head + chunk * 16;
    uint4 x = load_shared_128(b.q + chunk_at<B::kRows>(row, chunk));
    if (special) x = with_special<T>(b, x, row, chunk);
    if (b.a.out_aligned) {
      store_global_128(to, x);
      continue;
    }
    const uint32_t pair[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int j = 0; j < 8; j++) reinterpret_cast<uint16_t*>(to)[j] = static_cast<uint16_t>(pair[j / 2] >> (j % 2 * 16));
  }
}

template <class T, int D, bool Transformed>
PK_DEVICE void consume(const Sm90Block<D>& b, const unsigned* special) {
  const int group = static_cast<int>(threadIdx.x) / 128 - 1, first = group * 64 + static_cast<int>(threadIdx.x) / 32 % 4 * 16;
  float o[D / 2] = {}, inverse[2];
  Rows<D> rows(b, first);
  if (b.tiles > 0) multiply<T, D, Transformed>(b, group, o, rows);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = rows.row + 8 * r, head = b.head(row);
    const bool exists = b.exists(row);
    float lse;
    inverse[r] = rows.state.finish(r, b.a.scores.softmax_scale(), exists ? sink_of(b.a.scores, head) : -INFINITY, lse);
    if (b.a.lse && threadIdx.x % 4 == 0 && exists) b.a.lse[head * b.a.lse_head + (b.q_start + rows.token[r]) * b.a.lse_row] = lse;
  }
  store_rows<T>(b, o, inverse, first, *special != 0);
}

// -- the block -----------------------------------------------------------------------------------------------------------------------

template <int D>
PK_DEVICE void start(const Sm90Block<D>& b, unsigned* special) {
  using B = Sm90Block<D>;
  if (threadIdx.x == 0) {
    *special = 0;
    mbarrier_init(b.q_full(), 1);
    for (int stage = 0; stage < B::kStages; stage++) {
      mbarrier_init(b.k_full(stage), 1);
      mbarrier_init(b.k_empty(stage), B::kConsumers);
      mbarrier_init(b.v_full(stage), 1);
      mbarrier_init(b.v_empty(stage), B::kConsumers);
      mbarrier_init(b.v_landed(stage), 1);
    }
    mbarrier_init_fence();
  }
  // Idle rows: no copy fills them.
  const int used = b.p.tokens * b.a.group.divisor * 8;
  for (int i = static_cast<int>(threadIdx.x); i < B::kRows * D / 8; i += B::kBlockThreads) {
    if (i % (B::kRows * 8) >= used) store_shared_128(b.q + i * 16, {0, 0, 0, 0});
  }
  fence_proxy_async();
  __syncthreads();
}

// Rows of no sequence: out = 0, lse = -inf.
PK_DEVICE void pad_rows(const PrefillArgs& a, int kv_head, int q_end) {
  const int rows = (a.total_q - q_end) * a.group.divisor;
  for (int64_t i = threadIdx.x; i < int64_t{rows} * a.dim_v; i += blockDim.x) {
    const int r = static_cast<int>(i / a.dim_v), column = static_cast<int>(i % a.dim_v);
    const int row = q_end + r / a.group.divisor, head = kv_head * a.group.divisor + r % a.group.divisor;
    reinterpret_cast<uint16_t*>(a.out + row * a.out_row + head * a.out_head)[column] = 0;
    if (a.lse && column == 0) a.lse[head * a.lse_head + row * a.lse_row] = -INFINITY;
  }
}

template <class T, int D, bool Transformed>
__global__ void __launch_bounds__(Sm90Block<D>::kBlockThreads, 1) prefill_sm90(const __grid_constant__ PrefillSm90Args p) {
  PK_DYNAMIC_SHARED(shared);
  using B = Sm90Block<D>;
  const PrefillArgs& a = p.common;
  const int index = static_cast<int>(blockIdx.x), pairs = a.batch * a.kv_heads, rest = index - pairs * a.row_blocks;
  if (rest >= 0) {
    pad_rows(a, rest, a.cu_seqlens_q[a.batch]);
    return;
  }
  // Pairs that share the cache run together, and of these the last rows first: under a causal mask they have most to do.
  const int section = index / (p.section * a.row_blocks), above = section * p.section, beside = min(p.section, pairs - above);
  const int place = index - above * a.row_blocks, pair = above + place % beside, batch = pair / a.kv_heads;
  B b{p, a, shared_address(shared), pair % a.kv_heads, batch, (a.row_blocks - 1 - place / beside) * p.tokens, a.cu_seqlens_q[batch]};
  b.q_len = a.cu_seqlens_q[batch + 1] - b.q_start;
  if (b.token0 >= b.q_len) return;
  b.k_start = a.seqlens_k ? 0 : a.cu_seqlens_k[batch];
  b.k_len = a.seqlens_k ? a.seqlens_k[batch] : a.cu_seqlens_k[batch + 1] - b.k_start;
  b.find_tiles();
  auto* special = reinterpret_cast<unsigned*>(shared + B::kSpecial);
  start(b, special);
  if (threadIdx.x < 128) {
    registers_decrease<B::kProducerRegisters>();
    if (threadIdx.x < 32)
      produce(b);
    else
      clean<T>(b, special);
  } else {
    registers_increase<B::kConsumerRegisters>();
    consume<T, D, Transformed>(b, special);
  }
}

template <class T, int D>
cudaError_t launch_dim(const PrefillSm90Args& p, cudaStream_t stream) {
  const PrefillArgs& a = p.common;
  const auto blocks = static_cast<unsigned>(a.row_blocks) * static_cast<unsigned>(a.kv_heads) * static_cast<unsigned>(a.batch);
  const Grid grid{dim3(blocks + static_cast<unsigned>(a.kv_heads)), dim3(Sm90Block<D>::kBlockThreads), Sm90Block<D>::kBytes};
  return launch(a.scores.transformed ? prefill_sm90<T, D, true> : prefill_sm90<T, D, false>, grid, stream, p);
}

}  // namespace

template <class T>
cudaError_t launch_prefill_sm90(const PrefillSm90Args& p, int dim, cudaStream_t stream) {
  return dim == 64 ? launch_dim<T, 64>(p, stream) : launch_dim<T, 128>(p, stream);
}

}  // namespace pk::cuda
