// Decode attention: one query token per sequence over a paged cache.
//
// A block takes one split of a sequence's keys for up to 16 query heads of a kv head, which are the rows of its matrix products.
// Its four warps work on their own, 16 keys at a time: cp.async fills a ring of tiles, S = Q K^T and O += P V by mma.sync with O and
// P in registers, online softmax; at the end the warps' states are merged through shared memory. A second kernel merges the splits.
#pragma once
#include "decode.h"
#include "device/softmax.cuh"

namespace pk::cuda {

constexpr int kRows = 16, kKeys = 16;

// A warp's shared memory: a ring of K and V tiles; for codes also one widened tile of each.
template <int D, bool kCodes>
struct Ring {
  static constexpr int kStages = D == 256 ? 2 : 3;  // as much as leaves two blocks on a multiprocessor at D up to 128
  static constexpr uint32_t kTile = kKeys * D * 2;  // widened
  static constexpr uint32_t kStored = kCodes ? kKeys * D : kTile;
  static constexpr uint32_t kBytes = 2 * kStages * kStored + (kCodes ? 2 * kTile : 0);
  uint32_t base;

  PK_DEVICE uint32_t k(int stage) const { return base + static_cast<uint32_t>(2 * stage) * kStored; }
  PK_DEVICE uint32_t v(int stage) const { return k(stage) + kStored; }
  PK_DEVICE uint32_t wide_k(int stage) const { return kCodes ? base + 2 * kStages * kStored : k(stage); }
  PK_DEVICE uint32_t wide_v(int stage) const { return kCodes ? base + 2 * kStages * kStored + kTile : v(stage); }
};
template <int D, bool kCodes>
constexpr size_t decode_shared_bytes() {
  constexpr size_t states = kWarps * kRows * (D + 2) * sizeof(float);
  return kRows * D * 2 + std::max<size_t>(kWarps * Ring<D, kCodes>::kBytes, states);
}

// The block's query rows, [16][D] swizzled, zeros where there is no head or past the head dim.
template <int D>
PK_DEVICE void load_queries(const Decode& c, int sequence, int head0, int live, uint32_t to) {
  const char* q = static_cast<const char*>(c.q) + 2 * (sequence * c.q_sequence + head0 * c.q_head);
  for (int i = static_cast<int>(threadIdx.x); i < kRows * D / 8; i += kThreads) {
    const int row = i / (D / 8), chunk = i % (D / 8);
    const bool valid = row < live && chunk * 8 < c.dim;
    const char* from = q + 2 * (valid ? row : 0) * c.q_head;
    uint4 v = {};
    if (valid) v = c.wide ? load_global_128(from + chunk * 16) : load_bytes(from, chunk * 16, 2 * c.dim);
    store_shared_128(to + chunk_at<kRows>(row, chunk), v);
  }
}

// S = Q K^T for 16 keys.
template <class T, int D>
PK_DEVICE void scores_of_tile(float (&s)[8], uint32_t queries, uint32_t keys) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    uint32_t q[4], f[4];  // queries stay in shared memory: at head_dim 256 they and O would not fit the registers
    ldmatrix(q, queries + chunk_at<kRows>(lane % 16, k * 2 + lane / 16));
    ldmatrix(f, keys + chunk_at<kKeys>(lane % 8 + lane / 16 * 8, k * 2 + lane / 8 % 2));
    mma<T>(reinterpret_cast<float (&)[4]>(s[0]), q, f[0], f[1]);
    mma<T>(reinterpret_cast<float (&)[4]>(s[4]), q, f[2], f[3]);
  }
}

// O += P V.
template <class T, int D>
PK_DEVICE void accumulate(float (&o)[D / 2], const float (&p)[8], uint32_t values) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t a[4] = {pack<T>(p[0], p[1]), pack<T>(p[2], p[3]), pack<T>(p[4], p[5]), pack<T>(p[6], p[7])};
#pragma unroll
  for (int n = 0; n < D / 16; n++) {
    uint32_t f[4];
    ldmatrix_trans(f, values + chunk_at<kKeys>(lane % 16, n * 2 + lane / 16));
    mma<T>(reinterpret_cast<float (&)[4]>(o[8 * n]), a, f[0], f[1]);
    mma<T>(reinterpret_cast<float (&)[4]>(o[8 * n + 4]), a, f[2], f[3]);
  }
}

// A warp's 16 keys beginning at `key`, of which `live` are seen: on their way to a stage, and what must be known of them later.
struct Fetched {
  int key = 0, live = 0;
  float k_scale = 1.f;  // of row lane % 16, like the others
  SplitScale v_scale{};
};

template <class T, int D, bool kCodes>
PK_DEVICE Fetched fetch(const Decode& c, const Ring<D, kCodes>& ring, int stage, int sequence, int kv_head, int key, int end) {
  const int row = static_cast<int>(threadIdx.x) % kKeys;
  Fetched f{key, min(kKeys, end - key)};
  const bool exists = row < f.live;
  const Slot own = exists ? c.pages.slot(sequence, 0, key + row) : Slot{0, 0};
  constexpr int kBytes = kCodes ? 1 : 2;
  const WarpRows<kKeys> k(exists, c.k.offset(own, kv_head)), v(exists, c.v.offset(own, kv_head));
  fetch_rows<kKeys, D, kCodes>(ring.k(stage), c.k.data, k, c.dim * kBytes, c.wide);
  fetch_rows<kKeys, D, kCodes>(ring.v(stage), c.v.data, v, c.dim_v * kBytes, c.wide);
  if constexpr (kCodes) {
    f.k_scale = exists ? c.k_scale.at(own, kv_head) : 1.f;
    f.v_scale = split_scale<T>(c.code, exists ? c.v_scale.at(own, kv_head) : 1.f);
  }
  return f;
}

// Softmax state and weighted values of a warp after its share of a split.
template <int D>
struct WarpState {
  RowState rows;
  float o[D / 2] = {};
};

template <class T, int D, bool kCodes>
PK_DEVICE void attend_tile(const Decode& c, const Ring<D, kCodes>& ring, int stage, const Fetched& f, uint32_t queries, int position,
                           const float (&slope)[2], WarpState<D>& state) {
  if constexpr (kCodes) {
    const uint32_t unit = split_scale<T>(c.code, 1.f).power;
    widen_rows<T, kKeys, D, true, kKeys>(ring.wide_k(stage), ring.k(stage), c.code, unit);
    constexpr bool kSplits = std::is_same_v<T, __half>;  // otherwise scales are left whole, and no power is kept a stage
    widen_rows<T, kKeys, D, !kSplits, kKeys>(ring.wide_v(stage), ring.v(stage), c.code, kSplits ? f.v_scale.power : unit);
    __syncwarp();
  }
  float s[8] = {}, shrink[2];
  scores_of_tile<T, D>(s, queries, ring.wide_k(stage));
  if constexpr (kCodes) {
#pragma unroll
    for (int i = 0; i < 8; i++) s[i] *= __shfl_sync(kFullWarp, f.k_scale, column_of(i));
  }
  if (c.scores.transformed) {
    const int positions[2] = {position, position};
    transform(s, c.scores, positions, slope, f.key);
  }
  if (f.live < kKeys) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (column_of(i) >= f.live) s[i] = -INFINITY;
    }
  }
  state.rows.update(s, c.scores.softmax_scale(), shrink);
#pragma unroll
  for (int i = 0; i < D / 2; i++) state.o[i] *= shrink[row_of(i)];
  if constexpr (kCodes) {
#pragma unroll
    for (int i = 0; i < 8; i++) s[i] *= __shfl_sync(kFullWarp, f.v_scale.rest, column_of(i));
  }
  accumulate<T, D>(state.o, s, ring.wide_v(stage));
}

// The warps' states, merged row by row in the order of the warps, to the split's partial result.
template <int D>
PK_DEVICE void merge_warps(const Decode& c, WarpState<D>& state, float* shared, int sequence, int head0, int live, int64_t split) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  float* maxima = shared + kWarps * kRows * D;
  float* sums = maxima + kWarps * kRows;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float total = state.rows.sum[r];
    total += __shfl_xor_sync(kFullWarp, total, 1);
    total += __shfl_xor_sync(kFullWarp, total, 2);
    const int row = lane / 4 + 8 * r;
    if (lane % 4 == 0) {
      maxima[warp * kRows + row] = state.rows.maximum[r] * c.scores.softmax_scale();
      sums[warp * kRows + row] = total;
    }
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
      float* to = shared + (warp * kRows + row) * D + i * 8 + lane % 4 * 2;
      to[0] = state.o[4 * i + 2 * r];
      to[1] = state.o[4 * i + 2 * r + 1];
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < live * D; i += kThreads) {
    const int row = i / D, column = i % D;
    float peak = -INFINITY, total = 0.f, value = 0.f;
    for (int w = 0; w < kWarps; w++) peak = fmaxf(peak, maxima[w * kRows + row]);
    for (int w = 0; w < kWarps; w++) {
      // A warp that met nothing must not spoil the others: its weight is 0, whatever exp2 makes of -inf - -inf.
      const float m = maxima[w * kRows + row],
                  weight = m == -INFINITY && peak != -INFINITY ? 0.f : exp2f(peak == -INFINITY ? 0.f : m - peak);
      total += weight * sums[w * kRows + row];
      value += weight * shared[(w * kRows + row) * D + column];
    }
    float* to = partial_of(c, sequence, head0 + row, split);
    if (column < c.dim_v) to[column] = value;
    if (column == 0) {
      to[c.dim_v] = peak;
      to[c.dim_v + 1] = total;
    }
  }
}

// Blocks on a multiprocessor at least: what the registers of O allow.
template <int D>
constexpr int kBlocks = D == 64 ? 4 : 2;

template <class T, int D, bool kCodes>
__global__ void __launch_bounds__(kThreads, kBlocks<D>) decode_kernel(const __grid_constant__ Decode c) {
  PK_DYNAMIC_SHARED(smem);
  using Tiles = Ring<D, kCodes>;
  const int row_tiles = (c.group() + kRows - 1) / kRows, kv_head = static_cast<int>(blockIdx.y) / row_tiles;
  const int head0 = kv_head * c.group() + static_cast<int>(blockIdx.y) % row_tiles * kRows;
  const int live = min(kRows, (kv_head + 1) * c.group() - head0), sequence = static_cast<int>(blockIdx.z);
  const int seqlen = c.seqlens[sequence * c.seqlens_stride];
  const SplitKeys keys = keys_of(c, seqlen, blockIdx.x);
  if (keys.empty()) return;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t q_tile = shared_address(smem);
  const Tiles ring{q_tile + kRows * D * 2 + static_cast<uint32_t>(warp) * Tiles::kBytes};
  const auto key_of = [&](int turn) { return keys.first + (turn * kWarps + warp) * kKeys; };

  load_queries<D>(c, sequence, head0, live, q_tile);
  Fetched fetched[Tiles::kStages];
#pragma unroll
  for (int stage = 0; stage < Tiles::kStages - 1; stage++) {
    if (key_of(stage) < keys.end) fetched[stage] = fetch<T, D, kCodes>(c, ring, stage, sequence, kv_head, key_of(stage), keys.end);
    cp_async_commit();
  }
  __syncthreads();
  float slope[2];
#pragma unroll
  for (int r = 0; r < 2; r++) slope[r] = slope_of(c.scores, sequence, min(head0 + lane / 4 + 8 * r, c.heads - 1));

  WarpState<D> state;
  for (int turn = 0; key_of(turn) < keys.end; turn += Tiles::kStages) {
#pragma unroll
    for (int stage = 0; stage < Tiles::kStages; stage++) {
      if (key_of(turn + stage) >= keys.end) break;
      const int ahead = turn + stage + Tiles::kStages - 1, slot = (stage + Tiles::kStages - 1) % Tiles::kStages;
      __syncwarp();  // the tile that is refilled has been read by every lane
      if (key_of(ahead) < keys.end) fetched[slot] = fetch<T, D, kCodes>(c, ring, slot, sequence, kv_head, key_of(ahead), keys.end);
      cp_async_commit();
      cp_async_wait<Tiles::kStages - 1>();
      __syncwarp();
      attend_tile<T, D, kCodes>(c, ring, stage, fetched[stage], q_tile, seqlen - 1, slope, state);
    }
  }
  cp_async_wait<0>();
  __syncthreads();  // tiles become room for states
  merge_warps<D>(c, state, reinterpret_cast<float*>(smem + kRows * D * 2), sequence, head0, live, blockIdx.x);
}

template <class T, int D>
cudaError_t launch_cache(const Decode& c, unsigned batch, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(c.kv_heads * ((c.group() + kRows - 1) / kRows));
  Grid grid{dim3(static_cast<unsigned>(c.most_splits), rows, batch), dim3(kThreads), decode_shared_bytes<D, false>()};
  if (!is_code(c.code)) return launch(decode_kernel<T, D, false>, grid, stream, c);
  grid.shared_bytes = decode_shared_bytes<D, true>();
  return launch(decode_kernel<T, D, true>, grid, stream, c);
}

template <class T>
cudaError_t launch_splits(const Decode& c, int dim, unsigned batch, cudaStream_t stream) {
  switch (dim) {
    case 64:
      return launch_cache<T, 64>(c, batch, stream);
    case 128:
      return launch_cache<T, 128>(c, batch, stream);
    default:
      return launch_cache<T, 256>(c, batch, stream);
  }
}

}  // namespace pk::cuda
