// Prefill attention for tensor cores with mma.sync, sm_80 upward. A block takes `kRows` rows of one kv head's group: row r is
// query r / group and head r % group of the group, so that short queries fill a tile and K and V are read once for the group.
// K and V have a buffer each: one is filled while the other is multiplied.
#pragma once
#include "device/floats.cuh"
#include "prefill.h"

namespace pk::cuda {
namespace {

using namespace device;

template <class T, int D>
struct PrefillBlock {
  static constexpr int kRows = prefill_rows(D), kFragments = kRows / (16 * kWarps);
  static constexpr int kKeys = D <= 128 ? 64 : 32;  // scores of more do not fit in registers beside the output
  static constexpr uint32_t kQ = kRows * D * 2, kKV = kKeys * D * 2;
  static constexpr size_t kBytes = kQ + 2 * kKV;
  const PrefillArgs& a;
  uint32_t q, k, v;
  int kv_head, batch, row0, q_start, q_len, k_start, k_len;

  PK_DEVICE int head(int row) const { return kv_head * a.group + (row0 + row) % a.group; }
  PK_DEVICE int token(int row) const { return (row0 + row) / a.group; }
  PK_DEVICE Span seen(int token_index) const { return seen_by(a.scores, token_index + k_len - q_len, k_len); }

  PK_DEVICE void load_q() const {
    load_tile<T, kRows, D>(
        q, a.q, [&](int r) { return token(r) < q_len ? Slot{0, q_start + token(r)} : Slot{-1, 0}; }, [&](int r) { return head(r); });
  }
  PK_DEVICE void load_kv(uint32_t to, const TileSource& s, int key0) const {
    load_tile<T, kKeys, D>(
        to, s, [&](int r) { return key0 + r < k_len ? a.pages.slot(batch, k_start, key0 + r) : Slot{-1, 0}; },
        [&](int) { return kv_head; });
  }
};

// S = Q K^T for the warp's rows.
template <class T, int D, int Rows, int kKeys, int Fragments>
PK_DEVICE void multiply_keys(float (&s)[Fragments][kKeys / 2], uint32_t q, uint32_t k, int warp_row) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < D / 16; i++) {
    uint32_t a[Fragments][4];
#pragma unroll
    for (int m = 0; m < Fragments; m++) ldmatrix(a[m], q + chunk_at<Rows>(warp_row + m * 16 + lane % 16, i * 2 + lane / 16));
#pragma unroll
    for (int n = 0; n < kKeys / 16; n++) {
      uint32_t b[4];
      ldmatrix(b, k + chunk_at<kKeys>(n * 16 + lane % 8 + lane / 16 * 8, i * 2 + lane / 8 % 2));
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
#pragma unroll
  for (int i = 0; i < kKeys / 16; i++) {
#pragma unroll
    for (int n = 0; n < D / 16; n++) {
      uint32_t b[4];
      ldmatrix_trans(b, v + chunk_at<kKeys>(i * 16 + lane % 16, n * 2 + lane / 16));
#pragma unroll
      for (int m = 0; m < Fragments; m++) {
        const auto& a = reinterpret_cast<const uint32_t (&)[4]>(p[m][4 * i]);
        mma<T>(reinterpret_cast<float (&)[4]>(o[m][8 * n]), a, b[0], b[1]);
        mma<T>(reinterpret_cast<float (&)[4]>(o[m][8 * n + 4]), a, b[2], b[3]);
      }
    }
  }
}

// Eight outputs of a row plus the infinities and NaN among the values that it sees. Rare, so it may be slow: the main loop
// leaves them out of tiles that some row sees in part, since 0 x NaN would reach the rows that do not.
template <class T, int D>
PK_DEVICE uint4 with_special(const PrefillBlock<T, D>& b, uint4 out, int row, int chunk) {
  uint32_t sum[4] = {out.x, out.y, out.z, out.w};
  const DType type = std::is_same_v<T, __half> ? DType::f16 : DType::bf16;
  const Span seen = b.seen(b.token(row));
#pragma unroll 1
  for (int key = seen.first; key <= seen.last; key++) {
    const Slot slot = b.a.pages.slot(b.batch, b.k_start, key);
    if (!slot.exists()) continue;
    const float scale = b.a.v.scales.data ? b.a.v.scales.at(slot, b.kv_head) : 1.f;
    const uint4 v = widened<T>(b.a.v, b.a.v.rows.row(slot, b.kv_head), chunk, scale);
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

// The fragment's rows through the warp's own part of the query tile, then to memory in 16-byte pieces.
template <class T, int D>
PK_DEVICE void store_rows(const PrefillBlock<T, D>& b, int warp_row, bool special) {
  using Block = PrefillBlock<T, D>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  __syncwarp();
#pragma unroll 1
  for (int index = lane; index < 16 * Block::kFragments * D / 8; index += 32) {
    const int row = warp_row + index / (D / 8), chunk = index % (D / 8);
    if (b.token(row) >= b.q_len || chunk * 8 >= b.a.dim_v) continue;
    char* to = b.a.out + (b.q_start + b.token(row)) * b.a.out_row + b.head(row) * b.a.out_head + chunk * 16;
    uint4 x = load_shared_128(b.q + chunk_at<Block::kRows>(row, chunk));
    if (special) x = with_special(b, x, row, chunk);
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
template <class T, int D>
PK_DEVICE void pad_rows(const PrefillBlock<T, D>& b) {
  const int rows = (b.a.total_q - b.q_start) * b.a.group;
  for (int r = b.row0 + static_cast<int>(threadIdx.x); r < rows; r += b.a.row_blocks * PrefillBlock<T, D>::kRows) {
    if (r - b.row0 >= PrefillBlock<T, D>::kRows && threadIdx.x >= PrefillBlock<T, D>::kRows) continue;
    const int row = b.q_start + r / b.a.group, head = b.kv_head * b.a.group + r % b.a.group;
    auto* out = reinterpret_cast<uint16_t*>(b.a.out + row * b.a.out_row + head * b.a.out_head);
    for (int i = 0; i < b.a.dim_v; i++) out[i] = 0;
    if (b.a.lse) b.a.lse[head * b.a.lse_head + row * b.a.lse_row] = -INFINITY;
  }
}

template <class T, int D, bool Transformed>
PK_DEVICE void attend(const PrefillBlock<T, D>& b) {
  using Block = PrefillBlock<T, D>;
  constexpr int kF = Block::kFragments, kKeys = Block::kKeys;
  const PrefillArgs& a = b.a;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16 * kF, lane = static_cast<int>(threadIdx.x) % 32;
  const int last_token = min(b.q_len - 1, b.token(Block::kRows - 1));
  const Span low = b.seen(b.token(0)), high = b.seen(last_token);
  const int first = low.first / kKeys, end = high.last < low.first ? first : high.last / kKeys + 1;
  float o[kF][D / 2] = {};
  RowState state[kF];
  bool special = false;
  b.load_q();
  if (first < end) b.load_kv(b.k, a.k, first * kKeys);
  cp_async_commit();
  for (int j = first; j < end; j++) {
    const int key0 = j * kKeys;
    const bool edge = key0 < high.first || key0 + kKeys - 1 > low.last;
    cp_async_wait<0>();
    __syncthreads();
    b.load_kv(b.v, a.v, key0);
    cp_async_commit();
    float s[kF][kKeys / 2] = {};
    multiply_keys<T, D, Block::kRows, kKeys, kF>(s, b.q, b.k, warp_row);
#pragma unroll
    for (int m = 0; m < kF; m++) {
      const int row = warp_row + m * 16 + lane / 4;
      if constexpr (Transformed) {
        const int offset = b.k_len - b.q_len;
        const int position[2] = {b.token(row) + offset, b.token(row + 8) + offset};
        const float slope[2] = {slope_of(a.scores, b.batch, b.head(row)), slope_of(a.scores, b.batch, b.head(row + 8))};
        transform(s[m], a.scores, position, slope, key0);
      }
      const Span seen[2] = {b.seen(b.token(row)), b.seen(b.token(row + 8))};
      if (edge) hide(s[m], seen, key0);
    }
    cp_async_wait<0>();
    __syncthreads();
    if (j + 1 < end) b.load_kv(b.k, a.k, key0 + kKeys);
    cp_async_commit();
    uint32_t p[kF][kKeys / 4];
#pragma unroll
    for (int m = 0; m < kF; m++) {
      float shrink[2];
      state[m].update(s[m], Transformed ? 1.f : a.scores.scale, shrink);
#pragma unroll
      for (int i = 0; i < D / 2; i++) o[m][i] *= shrink[row_of(i)];
#pragma unroll
      for (int i = 0; i < kKeys / 4; i++) p[m][i] = pack<T>(s[m][2 * i], s[m][2 * i + 1]);
    }
    if (edge && __syncthreads_or(remove_special<T, kKeys, D>(b.v))) special = true;
    multiply_values<T, D, kKeys, kF>(o, p, b.v);
  }
  cp_async_wait<0>();
  __syncthreads();
#pragma unroll
  for (int m = 0; m < kF; m++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = warp_row + m * 16 + lane / 4 + 8 * r, head = b.head(row);
      float lse;
      const float inverse = state[m].finish(r, a.scores.softmax_scale(), sink_of(a.scores, head), lse);
      if (a.lse && lane % 4 == 0 && b.token(row) < b.q_len) a.lse[head * a.lse_head + (b.q_start + b.token(row)) * a.lse_row] = lse;
#pragma unroll
      for (int n = 0; n < D / 8; n++) {
        const float* x = o[m] + 4 * n + 2 * r;
        store_shared_32(b.q + chunk_at<Block::kRows>(row, n) + lane % 4 * 4, pack<T>(x[0] * inverse, x[1] * inverse));
      }
    }
  }
  store_rows(b, warp_row, special);
}

template <class T, int D, bool Transformed>
__global__ void __launch_bounds__(kThreads) prefill(const __grid_constant__ PrefillArgs a) {
  PK_DYNAMIC_SHARED(shared);
  using Block = PrefillBlock<T, D>;
  const auto index = static_cast<int>(blockIdx.x);
  const int above = index / a.row_blocks, batch = above / a.kv_heads;
  const uint32_t q = shared_address(shared);
  Block b{a, q, q + Block::kQ, q + Block::kQ + Block::kKV, above % a.kv_heads, batch, 0, a.cu_seqlens_q[batch], 0, 0, 0};
  b.row0 = (a.row_blocks - 1 - index % a.row_blocks) * Block::kRows;  // under a causal mask the last rows have most to do
  if (batch == a.batch) {
    pad_rows(b);
    return;
  }
  b.q_len = a.cu_seqlens_q[batch + 1] - b.q_start;
  if (b.row0 >= b.q_len * a.group) return;
  b.k_start = a.seqlens_k ? 0 : a.cu_seqlens_k[batch];
  b.k_len = a.seqlens_k ? a.seqlens_k[batch] : a.cu_seqlens_k[batch + 1] - b.k_start;
  attend<T, D, Transformed>(b);
}

template <class T, int D>
cudaError_t launch_dim(const PrefillArgs& a, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(a.row_blocks) * static_cast<unsigned>(a.kv_heads) * static_cast<unsigned>(a.batch + 1);
  const Grid grid{dim3(blocks), dim3(kThreads), PrefillBlock<T, D>::kBytes};
  return launch(a.scores.transformed ? prefill<T, D, true> : prefill<T, D, false>, grid, stream, a);
}

}  // namespace

template <class T>
cudaError_t launch_prefill(const PrefillArgs& a, int dim, cudaStream_t stream) {
  if (dim == 64) return launch_dim<T, 64>(a, stream);
  return dim == 128 ? launch_dim<T, 128>(a, stream) : launch_dim<T, 256>(a, stream);
}

}  // namespace pk::cuda
