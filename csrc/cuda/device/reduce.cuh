// Sums and maxima over a warp and over a block, in an order that depends on the block's size alone.
#pragma once
#include "platform.cuh"

namespace pk::device {

struct Sum {
  static constexpr float kIdentity = 0.f;
  PK_DEVICE static float combine(float a, float b) { return a + b; }
};
struct Max {
  static constexpr float kIdentity = -INFINITY;
  PK_DEVICE static float combine(float a, float b) { return fmaxf(a, b); }
};

// Every lane gets the result.
template <class Op>
PK_DEVICE float reduce_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = Op::combine(x, __shfl_xor_sync(kFullWarp, x, step));
  return x;
}

// Every thread gets the result. The block has whole warps; `partial` holds 32 floats of shared memory, free again afterwards.
template <class Op>
PK_DEVICE float reduce_block(float x, float* partial) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  x = reduce_warp<Op>(x);
  if (lane == 0) partial[warp] = x;
  __syncthreads();
  x = reduce_warp<Op>(lane < static_cast<int>(blockDim.x) / 32 ? partial[lane] : Op::kIdentity);
  __syncthreads();
  return x;
}

// The same for integers, whose sums have the same bits in any order. `partial` holds 32 of them.
template <class Combine>
PK_DEVICE uint64_t reduce_block(uint64_t x, uint64_t* partial, Combine combine) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = combine(x, __shfl_xor_sync(kFullWarp, x, step));
  if (lane == 0) partial[warp] = x;
  __syncthreads();
  x = lane < static_cast<int>(blockDim.x) / 32 ? partial[lane] : 0;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = combine(x, __shfl_xor_sync(kFullWarp, x, step));
  __syncthreads();
  return x;
}
PK_DEVICE uint64_t sum_block(uint64_t x, uint64_t* partial) {
  return reduce_block(x, partial, [](uint64_t a, uint64_t b) { return a + b; });
}
PK_DEVICE uint64_t max_block(uint64_t x, uint64_t* partial) {
  return reduce_block(x, partial, [](uint64_t a, uint64_t b) { return a > b ? a : b; });
}

}  // namespace pk::device
