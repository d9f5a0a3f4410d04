// CUDA's own device functions, one value per thread, for tests to compare with their definitions.
#include "cuda/device/platform.cuh"
#include "cuda/launch.h"

namespace pk {
namespace {

using namespace device;

// out[thread] = function(a[thread], b[thread], c[thread]), all as 32-bit words.
__global__ void evaluate(int function, const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t x = a[i], y = b[i], z = c[i];
  const float f = __uint_as_float(x);
  const auto half = [](uint32_t bits) { return __ushort_as_half(static_cast<unsigned short>(bits)); };
  const auto bf16 = [](uint32_t bits) { return __ushort_as_bfloat16(static_cast<unsigned short>(bits)); };
  uint32_t r = 0;
  switch (function) {
    case 0:
      r = __byte_perm(x, y, z);
      break;
    case 1:
      r = __funnelshift_l(x, y, z);
      break;
    case 2:
      r = __funnelshift_r(x, y, z);
      break;
    case 3:
      r = __brev(x);
      break;
    case 4:
      r = static_cast<uint32_t>(__clz(static_cast<int>(x)));
      break;
    case 5:
      r = static_cast<uint32_t>(__popc(x));
      break;
    case 6:
      r = static_cast<uint32_t>(__ffs(static_cast<int>(x)));
      break;
    case 7:
      r = __umulhi(x, y);
      break;
    case 8:
      r = static_cast<uint32_t>(__dp4a(static_cast<int>(x), static_cast<int>(y), static_cast<int>(z)));
      break;
    case 9:
      r = static_cast<uint32_t>(__float2int_rn(f));
      break;
    case 10:
      r = static_cast<uint32_t>(__float2int_rz(f));
      break;
    case 11:
      r = static_cast<uint32_t>(__float2int_rd(f));
      break;
    case 12:
      r = static_cast<uint32_t>(__float2int_ru(f));
      break;
    case 13:
      r = __float2uint_rn(f);
      break;
    case 14:
      r = __half_as_ushort(__hfma(half(x), half(y), half(z)));
      break;
    case 15:
      r = __bfloat16_as_ushort(__hfma(bf16(x), bf16(y), bf16(z)));
      break;
    case 16:
      r = __float_as_uint(__saturatef(f));
      break;
    case 17:
      r = __float_as_uint(min(f, __uint_as_float(y)));
      break;
    case 18:
      r = __float_as_uint(max(f, __uint_as_float(y)));
      break;
  }
  out[i] = r;
}

// One row of `out` [kRows][64] per collective; every lane of two warps takes part.
__global__ void collectives(const int* in, int* out) {
  const int i = threadIdx.x, lane = i % 32, x = in[i];
  int row = 0;
  const auto put = [&](int value) { out[row++ * 64 + i] = value; };
  put(__shfl_sync(kFullWarp, x, 5));
  put(__shfl_sync(kFullWarp, x, 3, 8));
  put(__shfl_up_sync(kFullWarp, x, 3));
  put(__shfl_up_sync(kFullWarp, x, 3, 16));
  put(__shfl_down_sync(kFullWarp, x, 5));
  put(__shfl_down_sync(kFullWarp, x, 5, 8));
  put(__shfl_xor_sync(kFullWarp, x, 9));
  put(static_cast<int>(__ballot_sync(kFullWarp, x > 0)));
  put(__any_sync(kFullWarp, x == 1000));
  put(__all_sync(kFullWarp, x < 1000));
  put(static_cast<int>(__match_any_sync(kFullWarp, x & 3)));
  int all = 7;
  put(static_cast<int>(__match_all_sync(kFullWarp, x / 1000, &all)));
  put(all);
  put(__reduce_add_sync(kFullWarp, x));
  put(__reduce_min_sync(kFullWarp, x));
  put(__reduce_max_sync(kFullWarp, x));
  put(static_cast<int>(__reduce_xor_sync(kFullWarp, static_cast<unsigned>(x))));
  put(__syncthreads_count(x > 0));
  put(__syncthreads_and(x > 0));
  put(__syncthreads_or(x > 0));
  put(elect_one() ? 1 : 0);
  // Halves of a warp in collectives of their own.
  if (lane < 16)
    put(__shfl_xor_sync(0x0000ffffu, x, 1));
  else
    put(__shfl_xor_sync(0xffff0000u, x, 2));
}

// The last block to finish adds up what all blocks wrote: atomics, fences, and blocks in any order.
__global__ void last_block_sums(const int* in, int* partial, int* state) {
  __shared__ int last;
  const int i = threadIdx.x, b = blockIdx.x;
  const int sum = __reduce_add_sync(kFullWarp, in[b * 32 + i]);
  if (i == 0) {
    partial[b] = sum;
    __threadfence();
    last = atomicAdd(state, 1) == static_cast<int>(gridDim.x) - 1;
  }
  __syncthreads();
  if (last && i == 0) {
    int total = 0;
    for (unsigned k = 0; k < gridDim.x; k++) total += partial[k];
    state[1] = total;
  }
  atomicMax(state + 2, sum);
}

// Rows of 32 floats `stride` floats apart in shared and in global memory.
__global__ void strided(const float* in, float* out, int stride) {
  PK_DYNAMIC_SHARED(smem);
  auto* shared = reinterpret_cast<float*>(smem);
  for (int i = threadIdx.x; i < 32 * stride; i += 32) shared[i] = 1.f;
  __syncwarp();
  const float x = shared[threadIdx.x * stride];  // strided_shared
  out[threadIdx.x] = x + in[threadIdx.x * stride];
}

// ldmatrix from 8 rows `row_bytes` apart.
__global__ void matrix_rows(float* out, int row_bytes) {
  PK_DYNAMIC_SHARED(smem);
  for (int i = threadIdx.x; i < 32 * row_bytes / 4; i += 32) reinterpret_cast<float*>(smem)[i] = 1.f;
  __syncwarp();
  uint32_t r[4];
  ldmatrix(r, shared_address(smem) + threadIdx.x % 8 * row_bytes + threadIdx.x / 8 * 16);
  out[threadIdx.x] = __uint_as_float(r[0] + r[1] + r[2] + r[3]);
}

}  // namespace
}  // namespace pk

using namespace pk;

extern "C" {

int selftest_evaluate(int function, int count, const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t* out) {
  return launch(evaluate, Grid{dim3(static_cast<unsigned>(count) / 32), dim3(32)}, nullptr, function, a, b, c, out);
}
int selftest_collectives(const int* in, int* out) { return launch(collectives, Grid{dim3(1), dim3(64)}, nullptr, in, out); }
int selftest_last_block(int blocks, const int* in, int* partial, int* state) {
  return launch(last_block_sums, Grid{dim3(static_cast<unsigned>(blocks)), dim3(32)}, nullptr, in, partial, state);
}
int selftest_strided(const float* in, float* out, int stride) {
  return launch(strided, Grid{dim3(1), dim3(32), static_cast<size_t>(stride) * 128}, nullptr, in, out, stride);
}
int selftest_matrix_rows(float* out, int row_bytes) {
  return launch(matrix_rows, Grid{dim3(1), dim3(32), static_cast<size_t>(row_bytes) * 32}, nullptr, out, row_bytes);
}
// A launch that no device accepts: status only.
int selftest_launch(int blocks, int threads, int shared_bytes) {
  const Grid grid{dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)), static_cast<size_t>(shared_bytes)};
  return launch(collectives, grid, nullptr, static_cast<const int*>(nullptr), static_cast<int*>(nullptr));
}

}  // extern "C"
