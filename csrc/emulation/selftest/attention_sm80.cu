// A FlashAttention-2 forward pass: cp.async into two swizzled stages, ldmatrix, mma.sync, P in registers.
#include "attention.cuh"

namespace pk::selftest {
namespace {

using namespace device;

constexpr int kRows = 64, kKeys = 64, kThreads = 128;

// Byte offset of 16-byte chunk `chunk` of row `row` in a [rows][D] tile of 2-byte elements.
template <int D>
PK_DEVICE uint32_t swizzled(int row, int chunk) {
  return static_cast<uint32_t>(row * D * 2 + ((chunk ^ (row & 7)) << 4));
}

template <int D>
PK_DEVICE void load_tile(uint32_t to, const char* from, int64_t row_bytes, int row0, int rows) {
  constexpr int kChunks = D / 8;
#pragma unroll
  for (int i = 0; i < 64 * kChunks / kThreads; i++) {
    const int index = i * kThreads + threadIdx.x, row = index / kChunks, chunk = index % kChunks;
    const bool valid = row0 + row < rows;
    cp_async_16(to + swizzled<D>(row, chunk), from + (valid ? row0 + row : 0) * row_bytes + chunk * 16, valid);
  }
}

// S = Q K^T for the warp's 16 rows.
template <class T, int D>
PK_DEVICE void scores(float (&s)[kKeys / 2], const uint32_t (&q)[D / 16][4], uint32_t keys) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
#pragma unroll
    for (int n = 0; n < kKeys / 16; n++) {
      uint32_t f[4];
      ldmatrix(f, keys + swizzled<D>(n * 16 + lane % 8 + lane / 16 * 8, k * 2 + lane / 8 % 2));
      mma<T>(reinterpret_cast<float (&)[4]>(s[8 * n]), q[k], f[0], f[1]);
      mma<T>(reinterpret_cast<float (&)[4]>(s[8 * n + 4]), q[k], f[2], f[3]);
    }
  }
}

// O += P V.
template <class T, int D>
PK_DEVICE void accumulate(float (&o)[D / 2], const float (&p)[kKeys / 2], uint32_t values) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kKeys / 16; k++) {
    const float* c = p + 8 * k;
    const uint32_t a[4] = {pack<T>(c[0], c[1]), pack<T>(c[2], c[3]), pack<T>(c[4], c[5]), pack<T>(c[6], c[7])};
#pragma unroll
    for (int n = 0; n < D / 16; n++) {
      uint32_t f[4];
      ldmatrix_trans(f, values + swizzled<D>(k * 16 + lane % 16, n * 2 + lane / 16));
      mma<T>(reinterpret_cast<float (&)[4]>(o[8 * n]), a, f[0], f[1]);
      mma<T>(reinterpret_cast<float (&)[4]>(o[8 * n + 4]), a, f[2], f[3]);
    }
  }
}

template <class T, int D>
__global__ void __launch_bounds__(kThreads) attention(const AttentionProblem p) {
  PK_DYNAMIC_SHARED(smem);
  constexpr uint32_t kTile = 64 * D * 2;
  const uint32_t q_tile = shared_address(smem), k_tiles = q_tile + kTile, v_tiles = k_tiles + 2 * kTile;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row0 = blockIdx.x * kRows, head = blockIdx.y, batch = blockIdx.z, kv_head = head / (p.heads / p.kv_heads);
  const int64_t q_row = int64_t{p.heads} * D * 2, kv_row = int64_t{p.kv_heads} * D * 2;
  const char* q = static_cast<const char*>(p.q) + batch * p.seqlen_q * q_row + head * D * 2;
  const char* k = static_cast<const char*>(p.k) + batch * p.seqlen_k * kv_row + kv_head * D * 2;
  const char* v = static_cast<const char*>(p.v) + batch * p.seqlen_k * kv_row + kv_head * D * 2;
  const int end = p.causal ? min(p.seqlen_k, row0 + kRows + p.seqlen_k - p.seqlen_q) : p.seqlen_k;
  const int blocks = end > 0 ? (end + kKeys - 1) / kKeys : 0;

  load_tile<D>(q_tile, q, q_row, row0, p.seqlen_q);
  if (blocks > 0) {
    load_tile<D>(k_tiles, k, kv_row, 0, p.seqlen_k);
    load_tile<D>(v_tiles, v, kv_row, 0, p.seqlen_k);
  }
  cp_async_commit();
  uint32_t qf[D / 16][4];
  float o[D / 2] = {};
  RowState rows;
  for (int j = 0; j < blocks; j++) {
    if (j + 1 < blocks) {
      const uint32_t stage = (j + 1) % 2 * kTile;
      load_tile<D>(k_tiles + stage, k, kv_row, (j + 1) * kKeys, p.seqlen_k);
      load_tile<D>(v_tiles + stage, v, kv_row, (j + 1) * kKeys, p.seqlen_k);
    }
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    if (j == 0) {
#pragma unroll
      for (int i = 0; i < D / 16; i++) ldmatrix(qf[i], q_tile + swizzled<D>(warp * 16 + lane % 16, i * 2 + lane / 16));
    }
    float s[kKeys / 2] = {}, shrink[2];
    scores<T, D>(s, qf, k_tiles + j % 2 * kTile);
    mask_scores(s, p, row0 + warp * 16 + lane / 4, j * kKeys);
    rows.update(s, p.scale_log2, shrink);
#pragma unroll
    for (int i = 0; i < D / 2; i++) o[i] *= shrink[i >> 1 & 1];
    accumulate<T, D>(o, s, v_tiles + j % 2 * kTile);
    __syncthreads();
  }
  cp_async_wait<0>();
  float inverse[2];
  rows.finish(inverse);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = row0 + warp * 16 + lane / 4 + r * 8;
    if (row >= p.seqlen_q) continue;
    char* out = static_cast<char*>(p.out) + (int64_t{batch} * p.seqlen_q + row) * q_row + head * D * 2;
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
      *reinterpret_cast<uint32_t*>(out + (i * 8 + lane % 4 * 2) * 2) =
          pack<T>(o[4 * i + 2 * r] * inverse[r], o[4 * i + 2 * r + 1] * inverse[r]);
    }
  }
}

template <class T, int D>
int run(const AttentionProblem& p) {
  const auto blocks = static_cast<unsigned>((p.seqlen_q + kRows - 1) / kRows);
  const Grid grid{dim3(blocks, static_cast<unsigned>(p.heads), static_cast<unsigned>(p.batch)), dim3(kThreads), 5u * 64 * D * 2};
  return launch(attention<T, D>, grid, nullptr, p);
}

}  // namespace
}  // namespace pk::selftest

extern "C" int selftest_attention_sm80(const pk::selftest::AttentionProblem* p, int bf16, int head_dim) {
  using namespace pk::selftest;
  if (head_dim == 64) return bf16 ? run<__nv_bfloat16, 64>(*p) : run<__half, 64>(*p);
  return bf16 ? run<__nv_bfloat16, 128>(*p) : run<__half, 128>(*p);
}
