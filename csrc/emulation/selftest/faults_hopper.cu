// Faults of mbarriers, bulk copies and wgmma. The line that must be named carries the kernel's name as a comment.
#include "faults.cuh"

namespace pk::selftest {
namespace {

using namespace device;

constexpr int kStageBytes = 1024;

// A producer warp streams four chunks of `in` through two stages; three consumer warps add them up.
enum Mistake { kNone, kNoFullWait, kStuckParity, kNoEmptyWait, kTooManyArrivals, kArriveWithoutSyncwarp, kNoInitFence };

template <Mistake M>
PK_DEVICE void pipeline(float* out, const float* in) {
  PK_DYNAMIC_SHARED(smem);
  const uint32_t stages = shared_address(smem), full = stages + 2 * kStageBytes, empty = full + 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < 2; s++) {
      mbarrier_init(full + 8 * s, 1);
      mbarrier_init(empty + 8 * s, 3);  // empty_init
    }
    if constexpr (M != kNoInitFence) mbarrier_init_fence();
  }
  __syncthreads();
  if (warp == 3) {
    if (lane == 0) {
      for (int i = 0; i < 4; i++) {
        const int s = i % 2, round = i / 2;
        if constexpr (M != kNoEmptyWait) mbarrier_wait(empty + 8 * s, round % 2 ^ 1);
        mbarrier_arrive_expect(full + 8 * s, kStageBytes);                             // too_many_arrivals_at_full
        bulk_load(stages + s * kStageBytes, in + i * 256, kStageBytes, full + 8 * s);  // producer
      }
    }
    return;
  }
  float sum = 0.f;
  for (int i = 0; i < 4; i++) {
    const int s = i % 2, round = i / 2;
    if constexpr (M != kNoFullWait) mbarrier_wait(full + 8 * s, M == kStuckParity ? 0 : round % 2);  // full_wait
    sum += reinterpret_cast<const float*>(smem)[s * 256 + warp * 64 + (lane ^ 1)];                   // consumer
    if constexpr (M != kArriveWithoutSyncwarp) __syncwarp();
    if (lane == 0) mbarrier_arrive(empty + 8 * s);
    if (M == kTooManyArrivals && lane == 1 && warp == 0) mbarrier_arrive(empty + 8 * s);  // too_many_arrivals
  }
  out[threadIdx.x] = sum;
}

template <bool Faulty>
__global__ void missing_full_wait(float* out, const float* in) {
  pipeline<Faulty ? kNoFullWait : kNone>(out, in);
}
template <bool Faulty>
__global__ void missing_phase(float* out, const float* in) {
  pipeline<Faulty ? kStuckParity : kNone>(out, in);
}
template <bool Faulty>
__global__ void missing_empty_wait(float* out, const float* in) {
  pipeline<Faulty ? kNoEmptyWait : kNone>(out, in);
}
template <bool Faulty>
__global__ void too_many_arrivals(float* out, const float* in) {
  pipeline<Faulty ? kTooManyArrivals : kNone>(out, in);
}
template <bool Faulty>
__global__ void arrive_without_syncwarp(float* out, const float* in) {
  pipeline<Faulty ? kArriveWithoutSyncwarp : kNone>(out, in);
}
template <bool Faulty>
__global__ void missing_init_fence(float* out, const float* in) {
  pipeline<Faulty ? kNoInitFence : kNone>(out, in);
}

template <bool Faulty>
__global__ void mbarrier_never_initialised(float* out, const float*) {
  PK_DYNAMIC_SHARED(smem);
  const uint32_t barrier = shared_address(smem);
  if (threadIdx.x == 0) mbarrier_init(barrier, 64);
  __syncthreads();
  mbarrier_arrive(barrier + (Faulty ? 8 : 0));  // mbarrier_never_initialised
  out[threadIdx.x] = 0.f;
}
template <bool Faulty>
__global__ void mbarrier_overwritten(float* out, const float*) {
  PK_DYNAMIC_SHARED(smem);
  if (threadIdx.x == 0) mbarrier_init(shared_address(smem), 64);
  __syncthreads();
  if (threadIdx.x == 3) reinterpret_cast<float*>(smem)[Faulty ? 1 : 2] = 1.f;  // mbarrier_overwritten
  out[threadIdx.x] = 0.f;
}
template <bool Faulty>
__global__ void mbarrier_never_completes(float* out, const float*) {
  PK_DYNAMIC_SHARED(smem);
  const uint32_t barrier = shared_address(smem);
  if (threadIdx.x == 0) mbarrier_init(barrier, Faulty ? 65 : 64);
  __syncthreads();
  mbarrier_arrive(barrier);
  mbarrier_wait(barrier, 0);  // mbarrier_never_completes
  out[threadIdx.x] = 0.f;
}
// cp.async that arrives on an mbarrier when it lands.
template <bool Faulty>
__global__ void async_arrival_not_awaited(float* out, const float* in) {
  PK_DYNAMIC_SHARED(smem);
  const uint32_t data = shared_address(smem), barrier = data + 1024;
  if (threadIdx.x == 0) mbarrier_init(barrier, 64);
  __syncthreads();
  cp_async_16(data + threadIdx.x * 16, in + threadIdx.x * 4);
  cp_async_arrive(barrier);
  if constexpr (!Faulty) mbarrier_wait(barrier, 0);
  out[threadIdx.x] = reinterpret_cast<const float*>(smem)[(threadIdx.x ^ 32) * 4];  // async_arrival_not_awaited
}

// One 64 x 64 x 16 product of halves stored by plain stores: A at 0, B at 8 KiB, 128-byte rows of which 32 bytes are used.
enum WgmmaMistake { kSound, kNoWait, kNoFence, kNoProxyFence, kOverwritten };

template <WgmmaMistake M>
PK_DEVICE void product(float* out, const float* in) {
  PK_DYNAMIC_SHARED(smem);
  const uint32_t a = shared_address(smem), b = a + 8192;
  for (int i = threadIdx.x; i < 1024; i += 128) store_shared_128(a + i * 16, load_global_128(in + i % 256 * 4));  // product_store
  if constexpr (M != kNoProxyFence) fence_proxy_async();
  __syncthreads();
  float d[32] = {};
  if constexpr (M != kNoFence) wgmma_fence();
  wgmma_ss<__half>(d, wgmma_descriptor(a, 16, 1024), wgmma_descriptor(b, 16, 1024), true);  // product_issue
  wgmma_commit();
  if constexpr (M == kOverwritten) {
    __syncthreads();
    store_shared_128(b + threadIdx.x * 16, load_global_128(in));  // operand_overwritten
  }
  if constexpr (M != kNoWait) wgmma_wait<0>();
  for (int i = 0; i < 32; i++) out[threadIdx.x * 32 + i] = d[i];  // product_use
  if constexpr (M == kNoWait) wgmma_wait<0>();
}
template <bool Faulty>
__global__ void missing_wgmma_wait(float* out, const float* in) {
  product<Faulty ? kNoWait : kSound>(out, in);
}
template <bool Faulty>
__global__ void missing_wgmma_fence(float* out, const float* in) {
  product<Faulty ? kNoFence : kSound>(out, in);
}
template <bool Faulty>
__global__ void missing_proxy_fence(float* out, const float* in) {
  product<Faulty ? kNoProxyFence : kSound>(out, in);
}
template <bool Faulty>
__global__ void operand_overwritten(float* out, const float* in) {
  product<Faulty ? kOverwritten : kSound>(out, in);
}

// The same with A in registers, which the faulty kernel fills again before the wait.
template <bool Faulty>
__global__ void a_registers_refilled(float* out, const float* in) {
  PK_DYNAMIC_SHARED(smem);
  const uint32_t b = shared_address(smem);
  for (int i = threadIdx.x; i < 512; i += 128) store_shared_128(b + i * 16, load_global_128(in + i % 256 * 4));
  fence_proxy_async();
  __syncthreads();
  float d[32] = {};
  uint32_t a[4] = {0x3c003c00, 0x3c003c00, 0x3c003c00, 0x3c003c00};
  wgmma_fence();
  wgmma_rs<__half>(d, a, wgmma_descriptor(b, 16, 1024), true);  // a_registers_refilled
  wgmma_commit();
  if constexpr (Faulty) a[2] = 0x40004000;
  wgmma_wait<0>();
  a[2] = 0x40004000;
  for (int i = 0; i < 32; i++) out[threadIdx.x * 32 + i] = d[i] + __uint_as_float(a[i % 4]);
}

}  // namespace

const Entry kHopperFaults[] = {
    PK_SELFTEST(missing_full_wait, 128, 2 * kStageBytes + 32),
    PK_SELFTEST(missing_phase, 128, 2 * kStageBytes + 32),
    PK_SELFTEST(missing_empty_wait, 128, 2 * kStageBytes + 32),
    PK_SELFTEST(too_many_arrivals, 128, 2 * kStageBytes + 32),
    PK_SELFTEST(arrive_without_syncwarp, 128, 2 * kStageBytes + 32),
    PK_SELFTEST(missing_init_fence, 128, 2 * kStageBytes + 32),
    PK_SELFTEST(mbarrier_never_initialised, 64, 16),
    PK_SELFTEST(mbarrier_overwritten, 64, 16),
    PK_SELFTEST(mbarrier_never_completes, 64, 16),
    PK_SELFTEST(async_arrival_not_awaited, 64, 1024 + 8),
    PK_SELFTEST(missing_wgmma_wait, 128, 16384),
    PK_SELFTEST(missing_wgmma_fence, 128, 16384),
    PK_SELFTEST(missing_proxy_fence, 128, 16384),
    PK_SELFTEST(operand_overwritten, 128, 16384),
    PK_SELFTEST(a_registers_refilled, 128, 8192),
    {},
};

}  // namespace pk::selftest
