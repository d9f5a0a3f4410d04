// A FlashAttention-3 forward pass in small: a TMA producer warp, two consumer warpgroups of 64 rows, S = Q K^T by wgmma from
// shared memory, O += P V with P in registers and V read transposed, the next S issued before the softmax of this one ends.
#include "attention.cuh"
#include "cuda/tensor_map.h"

namespace pk::selftest {
namespace {

using namespace device;

constexpr int kRows = 128, kKeys = 64, kStages = 2, kThreads = 384;  // the producer's warpgroup gives up its registers

// Tiles of 64 columns (128 bytes, the swizzle's span) lie side by side.
template <int D>
struct Tiles {
  static constexpr uint32_t kQ = kRows * D * 2, kKV = kKeys * D * 2;
  uint32_t q, k, v, q_full, full, empty;

  PK_DEVICE explicit Tiles(uint32_t base)
      : q(base), k(q + kQ), v(k + kStages * kKV), q_full(v + kStages * kKV), full(q_full + 8), empty(full + 8 * kStages) {}
  static constexpr size_t kBytes = kQ + 2 * kStages * kKV + 8 + 16 * kStages;
};

template <int D>
PK_DEVICE void produce(const Tiles<D>& t, const TensorMap& q, const TensorMap& k, const TensorMap& v, const AttentionProblem& p,
                       int blocks) {
  const int head = blockIdx.y, batch = blockIdx.z, kv_head = head / (p.heads / p.kv_heads);
  mbarrier_arrive_expect(t.q_full, Tiles<D>::kQ);
  for (int c = 0; c < D / 64; c++) tma_load(t.q + c * kRows * 128, &q, t.q_full, c * 64, head, blockIdx.x * kRows, batch);
  for (int j = 0; j < blocks; j++) {
    const int stage = j % kStages, round = j / kStages;
    mbarrier_wait(t.empty + 8 * stage, round % 2 ^ 1);
    mbarrier_arrive_expect(t.full + 8 * stage, 2 * Tiles<D>::kKV);
    for (int c = 0; c < D / 64; c++) {
      const uint32_t at = stage * Tiles<D>::kKV + c * kKeys * 128;
      tma_load(t.k + at, &k, t.full + 8 * stage, c * 64, kv_head, j * kKeys, batch);
      tma_load(t.v + at, &v, t.full + 8 * stage, c * 64, kv_head, j * kKeys, batch);
    }
  }
}

template <class T, int D>
PK_DEVICE void issue_scores(float (&s)[kKeys / 2], uint32_t q, uint32_t k) {
  wgmma_hold(s);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < D / 16; i++) {
    const uint32_t column = i % 4 * 32;
    wgmma_ss<T>(s, wgmma_descriptor(q + i / 4 * kRows * 128 + column, 16, 1024),
                wgmma_descriptor(k + i / 4 * kKeys * 128 + column, 16, 1024), i > 0);
  }
  wgmma_commit();
}

template <class T, int D>
PK_DEVICE void issue_output(float (&o)[D / 2], const uint32_t (&p)[kKeys / 16][4], uint32_t v) {
  wgmma_hold(o);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kKeys / 16; i++) wgmma_rs<T, true>(o, p[i], wgmma_descriptor(v + i * 2048, kKeys * 128, 1024), true);
  wgmma_commit();
}

template <class T, int D>
PK_DEVICE void consume(const Tiles<D>& t, const AttentionProblem& p, int blocks) {
  const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int row = blockIdx.x * kRows + group * 64 + warp * 16 + lane / 4;
  const uint32_t q = t.q + group * 64 * 128;
  float o[D / 2] = {}, s[kKeys / 2] = {};
  RowState rows;
  mbarrier_wait(t.q_full, 0);
  for (int j = 0; j < blocks; j++) {
    const int stage = j % kStages;
    mbarrier_wait(t.full + 8 * stage, j / kStages % 2);
    issue_scores<T, D>(s, q, t.k + stage * Tiles<D>::kKV);
    wgmma_wait<0>();
    wgmma_hold(s);
    mask_scores(s, p, row, j * kKeys);
    float shrink[2];
    rows.update(s, p.scale_log2, shrink);
    uint32_t a[kKeys / 16][4];
#pragma unroll
    for (int i = 0; i < kKeys / 4; i++) a[i / 4][i % 4] = pack<T>(s[2 * i], s[2 * i + 1]);
#pragma unroll
    for (int i = 0; i < D / 2; i++) o[i] *= shrink[i >> 1 & 1];
    issue_output<T, D>(o, a, t.v + stage * Tiles<D>::kKV);
    wgmma_wait<0>();
    wgmma_hold(o);
    if (threadIdx.x % 128 == 0) mbarrier_arrive(t.empty + 8 * stage);
  }
  float inverse[2];
  rows.finish(inverse);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    if (row + 8 * r >= p.seqlen_q) continue;
    char* out = static_cast<char*>(p.out) + ((int64_t{blockIdx.z} * p.seqlen_q + row + 8 * r) * p.heads + blockIdx.y) * D * 2;
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
      *reinterpret_cast<uint32_t*>(out + (i * 8 + lane % 4 * 2) * 2) =
          pack<T>(o[4 * i + 2 * r] * inverse[r], o[4 * i + 2 * r + 1] * inverse[r]);
    }
  }
}

template <class T, int D>
__global__ void __launch_bounds__(kThreads) attention(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                                                      const __grid_constant__ TensorMap v, const AttentionProblem p) {
  PK_DYNAMIC_SHARED(smem);
  const Tiles<D> t(shared_address(smem));
  const int end = p.causal ? min(p.seqlen_k, static_cast<int>(blockIdx.x + 1) * kRows + p.seqlen_k - p.seqlen_q) : p.seqlen_k;
  const int blocks = end > 0 ? (end + kKeys - 1) / kKeys : 0;
  if (threadIdx.x == 0) {
    mbarrier_init(t.q_full, 1);
    for (int s = 0; s < kStages; s++) {
      mbarrier_init(t.full + 8 * s, 1);
      mbarrier_init(t.empty + 8 * s, 2);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_decrease<24>();
    if (threadIdx.x == 0) produce<D>(t, q, k, v, p, blocks);
  } else {
    registers_increase<240>();
    consume<T, D>(t, p, blocks);
  }
}

template <class T, int D>
int run(const AttentionProblem& p) {
  const auto map = [&](const void* base, int seqlen, int heads, int rows, HostTensorMap* out) {
    const auto h = static_cast<uint64_t>(heads), n = static_cast<uint64_t>(seqlen);
    return encode({base,
                   sizeof(T) == 2 && std::is_same_v<T, __half> ? TensorType::f16 : TensorType::bf16,
                   4,
                   {D, h, n, static_cast<uint64_t>(p.batch)},
                   {2, D * 2, h * D * 2, n * h * D * 2},
                   {64, 1, static_cast<uint32_t>(rows), 1},
                   TensorSwizzle::bytes128},
                  out);
  };
  HostTensorMap q, k, v;
  if (map(p.q, p.seqlen_q, p.heads, kRows, &q) || map(p.k, p.seqlen_k, p.kv_heads, kKeys, &k) ||
      map(p.v, p.seqlen_k, p.kv_heads, kKeys, &v)) {
    return cudaErrorInvalidValue;
  }
  const auto blocks = static_cast<unsigned>((p.seqlen_q + kRows - 1) / kRows);
  const Grid grid{dim3(blocks, static_cast<unsigned>(p.heads), static_cast<unsigned>(p.batch)), dim3(kThreads), Tiles<D>::kBytes};
  return launch(attention<T, D>, grid, nullptr, q, k, v, p);
}

}  // namespace
}  // namespace pk::selftest

extern "C" int selftest_attention_sm90(const pk::selftest::AttentionProblem* p, int bf16, int head_dim) {
  using namespace pk::selftest;
  if (head_dim == 64) return bf16 ? run<__nv_bfloat16, 64>(*p) : run<__half, 64>(*p);
  return bf16 ? run<__nv_bfloat16, 128>(*p) : run<__half, 128>(*p);
}
