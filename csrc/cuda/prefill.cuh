// Prefill attention for tensor cores with mma.sync, sm_80 upward (the algorithm of FlashAttention-2). A block takes `kRows` rows of
// one kv head's group: row r is query r / group and head r % group of the group, so that short queries fill a tile and K and V are
// read once for the group.
//
// Tiles of K and V lie alternately in a ring in shared memory, so that while one is multiplied the next ones are on their way. Codes
// are copied as they are and widened when their turn comes: one barrier a tile either way.
#pragma once
#include "device/floats.cuh"
#include "device/tile.cuh"
#include "prefill.h"

namespace pk::cuda {
namespace {

using namespace device;

enum class Inputs { plain, any, codes };  // plain: 16-bit numbers in aligned rows, scores without softcap and ALiBi

template <class T, int D, Inputs kInputs>
struct PrefillBlock {
  static constexpr bool kCodes = kInputs == Inputs::codes;
  static constexpr int kRows = prefill_rows(D), kWarpRows = kRows / kWarps, kFragments = kWarpRows / 16;
  static constexpr int kKeys = prefill_keys(D), kWarpKeys = kKeys / kWarps, kStages = prefill_stages(kCodes);
  static constexpr uint32_t kTile = kKeys * D * 2, kStage = kCodes ? kKeys * D : kTile;
  // Queries; the ring; of codes a tile of keys and one of values, widened, and a factor of each key and value; positions of the rows,
  // which say all that the loop must know of them: registers are for scores and outputs.
  static constexpr uint32_t kRing = kRows * D * 2, kWide = kRing + kStages * kStage, kFactors = kWide + (kCodes ? 2 * kTile : 0);
  static constexpr uint32_t kPositions = kFactors + (kCodes ? 2 * kKeys * 4 : 0);
  static constexpr size_t kBytes = kPositions + kRows * 4;
  static_assert(kBytes == prefill_shared_bytes(D, kCodes));

  const PrefillArgs& a;
  uint32_t shared;
  int kv_head, batch, row0, q_start, q_len, k_start, k_len;

  PK_DEVICE static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  PK_DEVICE static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  PK_DEVICE bool transformed() const { return kInputs != Inputs::plain && a.scores.transformed; }
  PK_DEVICE bool aligned() const { return kInputs == Inputs::plain || a.aligned; }
  PK_DEVICE int token(int row) const { return a.group.quotient(row0 + row); }
  PK_DEVICE int head(int row) const { return kv_head * a.group.divisor + a.group.remainder(row0 + row, token(row)); }
  PK_DEVICE Span seen(int token_index) const { return seen_by(a.scores, token_index + k_len - q_len, k_len); }
  PK_DEVICE uint32_t position_at(int row) const { return shared + kPositions + row * 4; }
  // Absolute; of a row that does not exist, that of the last.
  PK_DEVICE int position(int row) const { return static_cast<int>(load_shared_32(position_at(row))); }
  PK_DEVICE uint32_t factors(bool values) const { return shared + kFactors + values * kKeys * 4; }

  // The warp's rows of the query tile: lane r knows row r.
  PK_DEVICE void load_q() const {
    const int row = warp() * kWarpRows + lane() % kWarpRows;
    const bool exists = token(row) < q_len;
    const WarpRows<kWarpRows> rows(exists, exists ? a.q.rows.offset({0, q_start + token(row)}, head(row)) : 0);
    fetch_rows<kRows, D, false>(shared + warp() * kWarpRows * 128, a.q.rows.data, rows, a.q.bytes, aligned());
    if (lane() < kWarpRows) store_shared_32(position_at(row), static_cast<uint32_t>(min(q_len - 1, token(row)) + k_len - q_len));
  }
};

// Keys and values of key tiles [first, end), a tile of keys, then one of values, and so on. They are asked for `kAhead` tiles before
// they are taken; those past the end are zeros.
template <class T, int D, Inputs kInputs>
struct Pipeline {
  using Block = PrefillBlock<T, D, kInputs>;
  static constexpr bool kCodes = Block::kCodes;
  static constexpr int kAhead = kCodes ? Block::kStages : Block::kStages - 1, kWarpKeys = Block::kWarpKeys;
  static_assert(!kCodes || kAhead == 2);  // then scales of one tile each of keys and values are on their way
  const Block& b;
  uint32_t at;     // stage of the tile to be taken next
  int key, limit;  // of the lane's row of the next tile to be asked for; keys there are
  int page;        // its page is looked up a tile ahead
  float k_scale = 1.f, v_scale = 1.f;

  PK_DEVICE Pipeline(const Block& block, int first, int end)
      : b(block), at(b.shared + Block::kRing), key(first * Block::kKeys + own_row()), limit(min(b.k_len, end * Block::kKeys)) {
    look_up();
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      if (i % 2)
        ask<true>(at + i * Block::kStage);
      else
        ask<false>(at + i * Block::kStage);
    }
  }

  // Hidden from the compiler where the loop has no register for it: it reads threadIdx again.
  PK_DEVICE static int own_row() {
    const int own = static_cast<int>(threadIdx.x), thread = kInputs != Inputs::any ? hidden(own) : own;
    return thread / 32 * kWarpKeys + thread % kWarpKeys;
  }
  PK_DEVICE void look_up() { page = key < limit ? b.a.pages.page(b.batch, key) : -1; }

  template <bool kValues>
  PK_DEVICE void ask(uint32_t stage) {
    const TileSource& s = kValues ? b.a.v : b.a.k;
    const Slot slot = b.a.pages.slot_in(page, b.k_start, key);
    const WarpRows<kWarpKeys> rows(slot.exists(), slot.exists() ? s.rows.offset(slot, b.kv_head) : 0);
    const uint32_t own = kCodes ? kWarpKeys * D : kWarpKeys * 128;
    fetch_rows<Block::kKeys, D, kCodes>(stage + Block::warp() * own, s.rows.data, rows, s.bytes, b.aligned());
    cp_async_commit();
    if (kCodes && s.scales.per_token) (kValues ? v_scale : k_scale) = slot.exists() ? s.scales.at(slot, b.kv_head) : 1.f;
    if (!kValues) return;
    key += Block::kKeys;
    look_up();
  }

  // Widens what this warp has copied of the tile.
  template <bool kValues>
  PK_DEVICE void widen_stage() const {
    const uint32_t to = b.shared + Block::kWide + kValues * Block::kTile + Block::warp() * kWarpKeys * 128;
    constexpr bool kUnit = !kValues || !std::is_same_v<T, __half>;  // bfloat16 leaves scales whole
    const uint32_t power = split_scale<T>(b.a.code, kUnit ? 1.f : v_scale).power;
    widen_rows<T, Block::kKeys, D, kUnit, kWarpKeys>(to, at + Block::warp() * kWarpKeys * D, b.a.code, power);
  }

  // Before its keys are taken: what scores and weights of a key tile are multiplied with. On an edge, factors of values that are not
  // finite are zero, like such values (`attend`); whether there are any.
  PK_DEVICE bool store_factors(bool edge) const {
    if (Block::lane() >= kWarpKeys) return false;
    if (b.a.k.scales.per_token) store_shared_32(b.factors(false) + own_row() * 4, __float_as_uint(k_scale));
    if (!b.a.v.scales.per_token) return false;
    const float rest = split_scale<T>(b.a.code, v_scale).rest;
    const bool special = edge && !(fabsf(rest) < INFINITY);
    store_shared_32(b.factors(true) + own_row() * 4, special ? 0 : __float_as_uint(rest));
    return special;
  }

  // Where the next tile lies, once it is there for all. What was taken before is refilled.
  template <bool kValues>
  PK_DEVICE uint32_t take() {
    cp_async_wait<kAhead - 1>();
    if constexpr (kCodes) widen_stage<kValues>();
    __syncthreads();
    const uint32_t taken = kCodes ? b.shared + Block::kWide + kValues * Block::kTile : at;
    const uint32_t first = b.shared + Block::kRing, last = first + (Block::kStages - 1) * Block::kStage;
    ask<kValues != (kAhead % 2 == 1)>(kCodes ? at : at == first ? last : at - Block::kStage);
    at = at == last ? first : at + Block::kStage;
    return taken;
  }
};

// S = Q K^T for the warp's rows.
template <class T, int D, int Rows, int kKeys, int Fragments>
PK_DEVICE void multiply_keys(float (&s)[Fragments][kKeys / 2], uint32_t q, uint32_t k) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t own_q = q + chunk_at<Rows>(lane % 16, lane / 16), own_k = k + chunk_at<kKeys>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
  for (int i = 0; i < D / 16; i++) {
    uint32_t a[Fragments][4];
#pragma unroll
    for (int m = 0; m < Fragments; m++) ldmatrix(a[m], further<Rows>(own_q, m * 16, i * 2));
#pragma unroll
    for (int n = 0; n < kKeys / 16; n++) {
      uint32_t b[4];
      ldmatrix(b, further<kKeys>(own_k, n * 16, i * 2));
#pragma unroll
      for (int m = 0; m < Fragments; m++) {
        mma<T>(reinterpret_cast<float (&)[4]>(s[m][8 * n]), a[m], b[0], b[1]);
        mma<T>(reinterpret_cast<float (&)[4]>(s[m][8 * n + 4]), a[m], b[2], b[3]);
      }
    }
  }
}

// O += P V.
template <class T, int D, int kKeys, int Fragments>
PK_DEVICE void multiply_values(float (&o)[Fragments][D / 2], const uint32_t (&p)[Fragments][kKeys / 4], uint32_t v) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t own = v + chunk_at<kKeys>(lane % 16, lane / 16);
#pragma unroll
  for (int i = 0; i < kKeys / 16; i++) {
#pragma unroll
    for (int n = 0; n < D / 16; n++) {
      uint32_t b[4];
      ldmatrix_trans(b, further<kKeys>(own, i * 16, n * 2));
#pragma unroll
      for (int m = 0; m < Fragments; m++) {
        const auto& a = reinterpret_cast<const uint32_t (&)[4]>(p[m][4 * i]);
        mma<T>(reinterpret_cast<float (&)[4]>(o[m][8 * n]), a, b[0], b[1]);
        mma<T>(reinterpret_cast<float (&)[4]>(o[m][8 * n + 4]), a, b[2], b[3]);
      }
    }
  }
}

// Columns of a fragment times the factors of their keys, in shared memory.
template <int Columns>
PK_DEVICE void multiply_columns(float (&s)[Columns], uint32_t factors) {
  const uint32_t own = factors + static_cast<uint32_t>(threadIdx.x) % 4 * 8;
#pragma unroll
  for (int i = 0; i < Columns; i += 4) {
    const float2 f = load_shared_float2(own + i * 8);
    s[i] *= f.x;
    s[i + 1] *= f.y;
    s[i + 2] *= f.x;
    s[i + 3] *= f.y;
  }
}

// Eight outputs of a row plus the infinities and NaN among the values that it sees. Rare, so it may be slow.
template <class T, int D, Inputs kInputs>
PK_DEVICE uint4 add_special(const PrefillBlock<T, D, kInputs>& b, uint4 out, int row, int chunk) {
  constexpr DType kType = std::is_same_v<T, __half> ? DType::f16 : DType::bf16;
  const uint32_t pair[4] = {out.x, out.y, out.z, out.w};
  float sum[8];
#pragma unroll
  for (int i = 0; i < 8; i++) sum[i] = i % 2 ? unpack(kType, pair[i / 2]).y : unpack(kType, pair[i / 2]).x;
  const Span seen = b.seen(b.token(row));
#pragma unroll 1
  for (int key = seen.first; key <= seen.last; key++) {
    const Slot slot = b.a.pages.slot(b.batch, b.k_start, key);
    if (!slot.exists()) continue;
    const char* values = b.a.v.rows.row(slot, b.kv_head);
    const float scale = b.a.v.scales.data ? b.a.v.scales.at(slot, b.kv_head) : 1.f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int column = chunk * 8 + i;
      if (column >= b.a.dim_v) continue;
      const float x =
          b.kCodes ? decode(b.a.code, reinterpret_cast<const uint8_t*>(values)[column]) * scale : load_float(kType, values, column);
      if (!(fabsf(x) < INFINITY)) sum[i] += x;
    }
  }
  return {pack<T>(sum[0], sum[1]), pack<T>(sum[2], sum[3]), pack<T>(sum[4], sum[5]), pack<T>(sum[6], sum[7])};
}

// The warp's rows from its part of the query tile to memory in 16-byte pieces.
template <class T, int D, Inputs kInputs>
PK_DEVICE void store_rows(const PrefillBlock<T, D, kInputs>& b, uint32_t tile, bool special) {
  using Block = PrefillBlock<T, D, kInputs>;
  __syncwarp();
#pragma unroll 1
  for (int index = Block::lane(); index < Block::kWarpRows * D / 8; index += 32) {
    const int own = index / (D / 8), row = Block::warp() * Block::kWarpRows + own, chunk = index % (D / 8);
    if (b.token(row) >= b.q_len || chunk * 8 >= b.a.dim_v) continue;
    char* to = b.a.out + (b.q_start + b.token(row)) * b.a.out_row + b.head(row) * b.a.out_head + chunk * 16;
    uint4 x = load_shared_128(tile + chunk_at<Block::kRows>(own, chunk));
    if (special) x = add_special(b, x, row, chunk);
    if (b.a.out_aligned) {
      store_global_128(to, x);
      continue;
    }
    const uint32_t pair[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 8; i++) reinterpret_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(pair[i / 2] >> (i % 2 * 16));
  }
}

// Rows of no sequence: out = 0, lse = -inf. They are shared out among the blocks of the row's kv head.
template <class T, int D, Inputs kInputs>
PK_DEVICE void pad_rows(const PrefillBlock<T, D, kInputs>& b) {
  constexpr int kRows = PrefillBlock<T, D, kInputs>::kRows;
  const int group = b.a.group.divisor, rows = (b.a.total_q - b.q_start) * group;
  for (int first = b.row0; first < rows; first += b.a.row_blocks * kRows) {
    for (int r = first + static_cast<int>(threadIdx.x); r < min(rows, first + kRows); r += kThreads) {
      const int row = b.q_start + r / group, head = b.kv_head * group + r % group;
      auto* out = reinterpret_cast<uint16_t*>(b.a.out + row * b.a.out_row + head * b.a.out_head);
      for (int i = 0; i < b.a.dim_v; i++) out[i] = 0;
      if (b.a.lse) b.a.lse[head * b.a.lse_head + row * b.a.lse_row] = -INFINITY;
    }
  }
}

// What scores of a tile are turned into before the softmax: scaled by their keys, capped, hidden where a row does not see the key.
// `row0`: of the fragment among the warp's; `limit`: keys there are.
template <class T, int D, Inputs kInputs>
PK_DEVICE void finish_scores(const PrefillBlock<T, D, kInputs>& b, float (&s)[prefill_keys(D) / 2], int row0, int key0, bool edge,
                             int limit) {
  using Block = PrefillBlock<T, D, kInputs>;
  if (Block::kCodes && b.a.k.scales.per_token) multiply_columns(s, b.factors(false));
  if (!edge && !b.transformed()) return;
  const int thread = hidden(static_cast<int>(threadIdx.x)), first = thread / 32 * Block::kWarpRows + row0 + thread % 32 / 4;
  const int position[2] = {b.position(first), b.position(first + 8)};
  if (b.transformed()) {
    if (Block::kCodes && !b.a.k.scales.per_token) {
      const float scale = b.a.k.scales.shared(b.kv_head);
#pragma unroll
      for (float& x : s) x *= scale;
    }
    const float slope[2] = {slope_of(b.a.scores, b.batch, b.head(first)), slope_of(b.a.scores, b.batch, b.head(first + 8))};
    transform(s, b.a.scores, position, slope, key0);
  }
  if (edge) {
    const Span seen[2] = {seen_by(b.a.scores, position[0], limit), seen_by(b.a.scores, position[1], limit)};
    hide(s, seen, key0);
  }
}

// Softmax state and outputs of the warp's rows.
template <int D, int kFragments>
struct WarpRowStates {
  RowState rows[kFragments];
  float o[kFragments][D / 2] = {};

  template <int Columns>
  PK_DEVICE void update(int m, float (&s)[Columns], float scale) {
    float shrink[2];
    rows[m].update(s, scale, shrink);
    if (!__any_sync(kFullWarp, shrink[0] != 1.f || shrink[1] != 1.f)) return;
#pragma unroll
    for (int i = 0; i < D / 2; i++) o[m][i] *= shrink[row_of(i)];
  }
};

// Divides by the sums of weights, writes lse, and leaves the outputs as T in the warp's part of the query tile.
template <class T, int D, Inputs kInputs, int kFragments>
PK_DEVICE void finish_rows(const PrefillBlock<T, D, kInputs>& b, WarpRowStates<D, kFragments>& state, float scale, uint32_t tile) {
  using Block = PrefillBlock<T, D, kInputs>;
  const PrefillArgs& a = b.a;
#pragma unroll
  for (int m = 0; m < kFragments; m++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int own = m * 16 + b.lane() / 4 + 8 * r, row = b.warp() * Block::kWarpRows + own, head = b.head(row);
      const bool exists = b.token(row) < b.q_len;
      float lse, inverse = state.rows[m].finish(r, scale, exists ? sink_of(a.scores, head) : 0.f, lse);
      if (Block::kCodes && inverse != 0.f) inverse *= a.v.scales.shared(b.kv_head);
      if (a.lse && b.lane() % 4 == 0 && exists) a.lse[head * a.lse_head + (b.q_start + b.token(row)) * a.lse_row] = lse;
#pragma unroll
      for (int n = 0; n < D / 8; n++) {
        const float* x = state.o[m] + 4 * n + 2 * r;
        store_shared_32(tile + chunk_at<Block::kRows>(own, n) + b.lane() % 4 * 4, pack<T>(x[0] * inverse, x[1] * inverse));
      }
    }
  }
}

template <class T, int D, Inputs kInputs>
PK_DEVICE void attend(const PrefillBlock<T, D, kInputs>& b) {
  using Block = PrefillBlock<T, D, kInputs>;
  constexpr int kF = Block::kFragments, kKeys = Block::kKeys;
  const PrefillArgs& a = b.a;
  const int warp_row = b.warp() * Block::kWarpRows;
  const uint32_t q = b.shared + warp_row * 128;
  const Span low = b.seen(b.token(0)), high = b.seen(min(b.q_len - 1, b.token(Block::kRows - 1)));
  const int first = low.first / kKeys, end = high.last < low.first ? first : high.last / kKeys + 1;
  const float scale = a.scores.softmax_scale() * (Block::kCodes && !b.transformed() ? a.k.scales.shared(b.kv_head) : 1.f);
  WarpRowStates<D, kF> state;
  bool special = false;
  b.load_q();
  __syncthreads();
  Pipeline<T, D, kInputs> tiles(b, first, end);
#pragma unroll 1
  for (int key0 = first * kKeys; key0 < end * kKeys; key0 += kKeys) {
    // Some row does not see some key of the tile. The plain kernel has no registers for the bounds.
    const bool plain = kInputs == Inputs::plain;
    const int all_first = plain ? seen_by(a.scores, b.position(Block::kRows - 1), tiles.limit).first : high.first;
    const int all_last = plain ? seen_by(a.scores, b.position(0), tiles.limit).last : low.last;
    const bool edge = key0 < all_first || key0 + kKeys - 1 > all_last;
    if (Block::kCodes && tiles.store_factors(edge)) special = true;
    const uint32_t k = tiles.template take<false>();
    float s[kF][kKeys / 2] = {};
    // Beside the scores there is no register for it, but in the plain kernel.
    const uint32_t own_q = plain ? q : b.shared + hidden(static_cast<int>(threadIdx.x)) / 32 * Block::kWarpRows * 128;
    multiply_keys<T, D, Block::kRows, kKeys, kF>(s, own_q, k);
    uint32_t p[kF][kKeys / 4];
#pragma unroll
    for (int m = 0; m < kF; m++) {
      finish_scores(b, s[m], m * 16, key0, edge, tiles.limit);
      state.update(m, s[m], scale);
      if (Block::kCodes && a.v.scales.per_token) multiply_columns(s[m], b.factors(true));
#pragma unroll
      for (int i = 0; i < kKeys / 4; i++) p[m][i] = pack<T>(s[m][2 * i], s[m][2 * i + 1]);
    }
    const uint32_t v = tiles.template take<true>();
    if (edge) {  // 0 x NaN would reach rows that do not see it: `add_special` gives such values to those that do
      if (remove_special<T, kKeys, D>(v)) special = true;
      __syncthreads();
    }
    multiply_values<T, D, kKeys, kF>(state.o, p, v);
  }
  cp_async_wait<0>();
  special = __syncthreads_or(special);
  finish_rows(b, state, scale, q);
  store_rows(b, q, special);
}

template <class T, int D, Inputs kInputs>
__global__ void __launch_bounds__(kThreads) prefill(const __grid_constant__ PrefillArgs a) {
  PK_DYNAMIC_SHARED(shared);
  using Block = PrefillBlock<T, D, kInputs>;
  const auto index = static_cast<int>(blockIdx.x);
  const int above = index / a.row_blocks, batch = above / a.kv_heads;
  Block b{a, shared_address(shared), above % a.kv_heads, batch, 0, a.cu_seqlens_q[batch], 0, 0, 0};
  b.row0 = (a.row_blocks - 1 - index % a.row_blocks) * Block::kRows;  // under a causal mask the last rows have most to do
  if (batch == a.batch) {
    pad_rows(b);
    return;
  }
  b.q_len = a.cu_seqlens_q[batch + 1] - b.q_start;
  if (b.token(0) >= b.q_len) return;
  b.k_start = a.seqlens_k ? 0 : a.cu_seqlens_k[batch];
  b.k_len = a.seqlens_k ? a.seqlens_k[batch] : a.cu_seqlens_k[batch + 1] - b.k_start;
  attend(b);
}

template <class T, int D, Inputs kInputs>
cudaError_t launch_inputs(const PrefillArgs& a, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(a.row_blocks) * static_cast<unsigned>(a.kv_heads) * static_cast<unsigned>(a.batch + 1);
  return launch(prefill<T, D, kInputs>, {dim3(blocks), dim3(kThreads), PrefillBlock<T, D, kInputs>::kBytes}, stream, a);
}

template <class T, int D>
cudaError_t launch_dim(const PrefillArgs& a, cudaStream_t stream) {
  if (is_code(a.code)) return launch_inputs<T, D, Inputs::codes>(a, stream);
  if (a.aligned && !a.scores.transformed) return launch_inputs<T, D, Inputs::plain>(a, stream);
  return launch_inputs<T, D, Inputs::any>(a, stream);
}

}  // namespace

template <class T>
cudaError_t launch_prefill(const PrefillArgs& a, int dim, cudaStream_t stream) {
  if (dim == 64) return launch_dim<T, 64>(a, stream);
  return dim == 128 ? launch_dim<T, 128>(a, stream) : launch_dim<T, 256>(a, stream);
}

}  // namespace pk::cuda
