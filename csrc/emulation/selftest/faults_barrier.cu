// Control faults: threads and lanes that do not meet. The line that must be named carries the kernel's name as a comment.
#include "faults.cuh"

namespace pk::selftest {
namespace {

using namespace device;

template <bool Faulty>
__global__ void diverged_barrier(float* out, const float* in) {
  PK_DYNAMIC_SHARED(smem);
  auto* shared = reinterpret_cast<float*>(smem);
  const int warp = threadIdx.x / 32;
  shared[threadIdx.x] = in[threadIdx.x];
  if (!Faulty || warp != 3) __syncthreads();  // diverged_barrier
  if (!Faulty || warp != 3) out[threadIdx.x] = shared[threadIdx.x ^ 1];
  __syncthreads();  // diverged_barrier_other
}
template <bool Faulty>
__global__ void barrier_after_exit(float* out, const float*) {
  if (Faulty && threadIdx.x >= 96) return;
  __syncthreads();  // barrier_after_exit
  out[threadIdx.x] = 1.f;
}
template <bool Faulty>
__global__ void named_barrier_short(float* out, const float*) {
  if (threadIdx.x < (Faulty ? 32 : 64)) barrier_sync(1, 64);  // named_barrier_short
  out[threadIdx.x] = 1.f;
}
template <bool Faulty>
__global__ void named_barrier_counts_differ(float* out, const float*) {
  if (threadIdx.x < 32)
    barrier_arrive(1, 64);  // named_barrier_counts_differ_first
  else
    barrier_sync(1, Faulty ? 96 : 64);  // named_barrier_counts_differ
  out[threadIdx.x] = 1.f;
}
// Producer warps arrive, the consumer waits; the faulty producers forget.
template <bool Faulty>
__global__ void producer_never_arrives(float* out, const float* in) {
  PK_DYNAMIC_SHARED(smem);
  auto* shared = reinterpret_cast<float*>(smem);
  if (threadIdx.x < 64) {
    shared[threadIdx.x] = in[threadIdx.x];
    if constexpr (!Faulty) barrier_arrive(2, 96);
  } else {
    barrier_sync(2, 96);  // producer_never_arrives
    out[threadIdx.x] = shared[threadIdx.x - 64];
  }
}
// A turn that is handed on after the last one.
template <bool Faulty>
__global__ void arrival_nobody_awaits(float* out, const float*) {
  if (threadIdx.x < 32) barrier_arrive(1, 64);
  if (threadIdx.x >= 32) barrier_sync(1, 64);
  __syncthreads();
  if (Faulty && threadIdx.x < 32) barrier_arrive(1, 64);  // arrival_nobody_awaits
  out[threadIdx.x] = 1.f;
}
template <bool Faulty>
__global__ void warp_splits_at_named_barriers(float* out, const float*) {
  if (threadIdx.x < (Faulty ? 48 : 32))
    barrier_arrive(1, 64);  // warp_splits_at_named_barriers
  else
    barrier_sync(1, 64);
  out[threadIdx.x] = 1.f;
}
template <bool Faulty>
__global__ void shuffle_after_exit(float* out, const float* in) {
  if (Faulty && threadIdx.x == 40) return;
  out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, in[threadIdx.x], 1);  // shuffle_after_exit
}
template <bool Faulty>
__global__ void diverged_shuffle(float* out, const float* in) {
  const float x = in[threadIdx.x];
  if (!Faulty || threadIdx.x % 2) {
    out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, x, 2);  // diverged_shuffle
  } else {
    out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, -x, 2);  // diverged_shuffle_other
  }
}
template <bool Faulty>
__global__ void lane_outside_its_mask(float* out, const float* in) {
  if (threadIdx.x >= 17) return;
  const unsigned mask = Faulty ? 0xffffu : 0x1ffffu;
  out[threadIdx.x] = __shfl_sync(mask, in[threadIdx.x], 0);  // lane_outside_its_mask
}
template <bool Faulty>
__global__ void shuffle_from_outside_the_mask(float* out, const float* in) {
  if (threadIdx.x >= 16) return;
  out[threadIdx.x] = __shfl_sync(0xffffu, in[threadIdx.x], Faulty ? 20 : 3);  // shuffle_from_outside_the_mask
}
// Disjoint masks may be in different collectives at once; the faulty masks overlap.
template <bool Faulty>
__global__ void overlapping_masks(float* out, const float* in) {
  const float x = in[threadIdx.x];
  if (threadIdx.x < 16) {
    out[threadIdx.x] = __shfl_xor_sync(0xffffu, x, 1);  // overlapping_masks
  } else {
    out[threadIdx.x] = __shfl_xor_sync(Faulty ? 0xffff8000u : 0xffff0000u, x, 1);  // overlapping_masks_other
  }
}
template <bool Faulty>
__global__ void endless_spin(float* out, const float*) {
  __shared__ volatile int flag;
  if (threadIdx.x == 0) flag = Faulty ? 0 : 1;
  __syncthreads();
  while (flag == 0) spin_hint();  // endless_spin
  out[threadIdx.x] = 1.f;
}

}  // namespace

const Entry kBarrierFaults[] = {
    PK_SELFTEST(diverged_barrier, 128, 512),
    PK_SELFTEST(barrier_after_exit, 128, 0),
    PK_SELFTEST(named_barrier_short, 64, 0),
    PK_SELFTEST(named_barrier_counts_differ, 64, 0),
    PK_SELFTEST(producer_never_arrives, 96, 256),
    PK_SELFTEST(arrival_nobody_awaits, 64, 16),
    PK_SELFTEST(warp_splits_at_named_barriers, 64, 16),
    PK_SELFTEST(shuffle_after_exit, 64, 0),
    PK_SELFTEST(diverged_shuffle, 32, 0),
    PK_SELFTEST(lane_outside_its_mask, 32, 0),
    PK_SELFTEST(shuffle_from_outside_the_mask, 32, 0),
    PK_SELFTEST(overlapping_masks, 32, 0),
    PK_SELFTEST(endless_spin, 32, 0),
    {},
};

}  // namespace pk::selftest
