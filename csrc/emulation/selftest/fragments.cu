// Every matrix instruction with its registers and shared memory laid bare, for tests to compare with the PTX manual's tables.
#include "cuda/device/platform.cuh"
#include "cuda/launch.h"
#include "cuda/tensor_map.h"

namespace pk {
namespace {

using namespace device;

// shared <- image; every lane passes its own row address; registers [32][count] out.
template <int Count, bool Transposed>
__global__ void load_matrices(const uint32_t* image, int words, const uint32_t* address, uint32_t* registers) {
  PK_DYNAMIC_SHARED(smem);
  auto* shared = reinterpret_cast<uint32_t*>(smem);
  for (int i = threadIdx.x; i < words; i += 32) shared[i] = image[i];
  __syncwarp();
  uint32_t r[Count];
  if constexpr (Transposed)
    ldmatrix_trans(r, shared_address(smem) + address[threadIdx.x]);
  else
    ldmatrix(r, shared_address(smem) + address[threadIdx.x]);
  for (int i = 0; i < Count; i++) registers[threadIdx.x * Count + i] = r[i];
}

template <bool Transposed>
__global__ void store_matrices(const uint32_t* registers, const uint32_t* address, uint32_t* image, int words) {
  PK_DYNAMIC_SHARED(smem);
  auto* shared = reinterpret_cast<uint32_t*>(smem);
  for (int i = threadIdx.x; i < words; i += 32) shared[i] = 0;
  __syncwarp();
  uint32_t r[4];
  for (int i = 0; i < 4; i++) r[i] = registers[threadIdx.x * 4 + i];
  if constexpr (Transposed)
    stmatrix_trans(shared_address(smem) + address[threadIdx.x], r);
  else
    stmatrix(shared_address(smem) + address[threadIdx.x], r);
  __syncwarp();
  for (int i = threadIdx.x; i < words; i += 32) image[i] = shared[i];
}

// a [32][4] (or [32][2] for k8), b [32][2] (or [32][1]), d [32][4] in and out.
template <class T>
__global__ void multiply(const uint32_t* a, const uint32_t* b, float* d) {
  const int lane = threadIdx.x;
  uint32_t ra[4];
  float rd[4];
  for (int i = 0; i < 4; i++) ra[i] = a[lane * 4 + i], rd[i] = d[lane * 4 + i];
  mma<T>(rd, ra, b[lane * 2], b[lane * 2 + 1]);
  for (int i = 0; i < 4; i++) d[lane * 4 + i] = rd[i];
}
template <class T>
__global__ void multiply_k8(const uint32_t* a, const uint32_t* b, float* d) {
  const int lane = threadIdx.x;
  const uint32_t ra[2] = {a[lane * 2], a[lane * 2 + 1]};
  float rd[4];
  for (int i = 0; i < 4; i++) rd[i] = d[lane * 4 + i];
  mma_k8<T>(rd, ra, b[lane]);
  for (int i = 0; i < 4; i++) d[lane * 4 + i] = rd[i];
}
__global__ void multiply_s8(const uint32_t* a, const uint32_t* b, int32_t* d) {
  const int lane = threadIdx.x;
  uint32_t ra[4];
  int32_t rd[4];
  for (int i = 0; i < 4; i++) ra[i] = a[lane * 4 + i], rd[i] = d[lane * 4 + i];
  mma_s8(rd, ra, b[lane * 2], b[lane * 2 + 1]);
  for (int i = 0; i < 4; i++) d[lane * 4 + i] = rd[i];
}

// One wgmma: shared <- image, descriptors given, registers of A [128][4], d [128][N / 2] in and out.
template <class T, int N, bool Transposed, bool ARegisters>
__global__ void multiply_warpgroup(const uint32_t* image, int words, uint64_t a, uint64_t b, const uint32_t* a_registers, float* d) {
  PK_DYNAMIC_SHARED(smem);
  auto* shared = reinterpret_cast<uint32_t*>(smem);
  for (int i = threadIdx.x; i < words; i += 128) shared[i] = image[i];
  fence_proxy_async();
  __syncthreads();
  float rd[N / 2];
  for (int i = 0; i < N / 2; i++) rd[i] = d[threadIdx.x * (N / 2) + i];
  const uint64_t base = shared_address(smem) >> 4;
  wgmma_fence();
  if constexpr (ARegisters) {
    uint32_t ra[4];
    for (int i = 0; i < 4; i++) ra[i] = a_registers[threadIdx.x * 4 + i];
    wgmma_rs<T, Transposed>(rd, ra, b + base, true);
  } else {
    wgmma_ss<T, Transposed>(rd, a + base, b + base, true);
  }
  wgmma_commit();
  wgmma_wait<0>();
  for (int i = 0; i < N / 2; i++) d[threadIdx.x * (N / 2) + i] = rd[i];
}

// A TMA box of a 3-d tensor, as it lies in shared memory; then stored back through another map.
__global__ void copy_tile(const __grid_constant__ TensorMap from, const __grid_constant__ TensorMap to, int c0, int c1, int c2,
                          uint32_t* image, int words) {
  PK_DYNAMIC_SHARED(smem);
  const uint32_t tile = shared_address(smem), barrier = tile + words * 4;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(barrier, words * 4);
    tma_load(tile, &from, barrier, c0, c1, c2);
  }
  __syncthreads();
  mbarrier_wait(barrier, 0);
  for (int i = threadIdx.x; i < words; i += 32) image[i] = reinterpret_cast<const uint32_t*>(smem)[i];
  if (threadIdx.x == 0) {
    tma_store(&to, tile, c0, c1, c2);
    tma_store_commit();
    tma_store_wait<0>();
  }
}

const Grid kOneWarp{dim3(1), dim3(32), 8192};

template <class T, int N>
int warpgroup(bool transposed, bool a_registers, const uint32_t* image, int words, uint64_t a, uint64_t b, const uint32_t* ra, float* d) {
  const Grid grid{dim3(1), dim3(128), static_cast<size_t>(words) * 4};
  const auto kernel = transposed ? (a_registers ? multiply_warpgroup<T, N, true, true> : multiply_warpgroup<T, N, true, false>)
                                 : (a_registers ? multiply_warpgroup<T, N, false, true> : multiply_warpgroup<T, N, false, false>);
  return launch(kernel, grid, nullptr, image, words, a, b, ra, d);
}

}  // namespace
}  // namespace pk

using namespace pk;

extern "C" {

int selftest_ldmatrix(int count, int transposed, const uint32_t* image, int words, const uint32_t* address, uint32_t* registers) {
  const auto kernel = count == 4   ? (transposed ? load_matrices<4, true> : load_matrices<4, false>)
                      : count == 2 ? (transposed ? load_matrices<2, true> : load_matrices<2, false>)
                                   : (transposed ? load_matrices<1, true> : load_matrices<1, false>);
  return launch(kernel, kOneWarp, nullptr, image, words, address, registers);
}

int selftest_stmatrix(int transposed, const uint32_t* registers, const uint32_t* address, uint32_t* image, int words) {
  return launch(transposed ? store_matrices<true> : store_matrices<false>, kOneWarp, nullptr, registers, address, image, words);
}

// kind: 0 f16 k16, 1 bf16 k16, 2 f16 k8, 3 bf16 k8, 4 e4m3 k32, 5 s8 k32
int selftest_mma(int kind, const uint32_t* a, const uint32_t* b, void* d) {
  auto* f = static_cast<float*>(d);
  switch (kind) {
    case 0:
      return launch(multiply<__half>, kOneWarp, nullptr, a, b, f);
    case 1:
      return launch(multiply<__nv_bfloat16>, kOneWarp, nullptr, a, b, f);
    case 2:
      return launch(multiply_k8<__half>, kOneWarp, nullptr, a, b, f);
    case 3:
      return launch(multiply_k8<__nv_bfloat16>, kOneWarp, nullptr, a, b, f);
    case 4:
      return launch(multiply<__nv_fp8_e4m3>, kOneWarp, nullptr, a, b, f);
    default:
      return launch(multiply_s8, kOneWarp, nullptr, a, b, static_cast<int32_t*>(d));
  }
}

int selftest_wgmma(int bf16, int n, int transposed, int a_registers, const uint32_t* image, int words, uint64_t a, uint64_t b,
                   const uint32_t* ra, float* d) {
  const auto run = [&](auto f16_kernel, auto bf16_kernel) {
    return bf16 ? bf16_kernel(transposed != 0, a_registers != 0, image, words, a, b, ra, d)
                : f16_kernel(transposed != 0, a_registers != 0, image, words, a, b, ra, d);
  };
  switch (n) {
    case 64:
      return run(warpgroup<__half, 64>, warpgroup<__nv_bfloat16, 64>);
    case 96:
      return run(warpgroup<__half, 96>, warpgroup<__nv_bfloat16, 96>);
    case 128:
      return run(warpgroup<__half, 128>, warpgroup<__nv_bfloat16, 128>);
    default:
      return run(warpgroup<__half, 256>, warpgroup<__nv_bfloat16, 256>);
  }
}

// A [size2][size1][size0] tensor of 16-bit elements, read in boxes of [box2][box1][box0]. Returns -1 if the map is refused.
int selftest_copy_tile(const void* from, void* to, const uint64_t* size, const uint32_t* box, int swizzle, const int* at, uint32_t* image) {
  TensorMapSpec spec{from,
                     TensorType::f16,
                     3,
                     {size[0], size[1], size[2]},
                     {2, size[0] * 2, size[0] * size[1] * 2},
                     {box[0], box[1], box[2]},
                     static_cast<TensorSwizzle>(swizzle)};
  HostTensorMap source, target;
  if (encode(spec, &source) != cudaSuccess) return -1;
  spec.base = to;
  if (encode(spec, &target) != cudaSuccess) return -1;
  const int words = static_cast<int>(box[0] * box[1] * box[2] / 2);
  const Grid grid{dim3(1), dim3(32), static_cast<size_t>(words) * 4 + 8};
  return launch(copy_tile, grid, nullptr, source, target, at[0], at[1], at[2], image, words);
}

}  // extern "C"
