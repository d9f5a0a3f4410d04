// The random stream itself: uniforms of (seed, position), one thread per Philox block of four.
#include "common/philox.h"
#include "device/platform.cuh"
#include "kernels.h"
#include "launch.h"

namespace pk::cuda {
namespace {

constexpr int kThreads = 128;

struct Call {
  const int64_t *seeds, *positions;
  int64_t seed_stride, position_stride;
  float* out;
  int64_t out_row;
  int count;
};

__global__ void __launch_bounds__(kThreads) philox_kernel(const Call c) {
  const int first = 4 * (static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x));
  if (first >= c.count) return;
  const int64_t row = blockIdx.x;
  const auto seed = static_cast<uint64_t>(c.seeds[row * c.seed_stride]),
             position = static_cast<uint64_t>(c.positions[row * c.position_stride]);
  const PhiloxBlock counter = {{static_cast<uint32_t>(first / 4), static_cast<uint32_t>(Purpose::sample), static_cast<uint32_t>(position),
                                static_cast<uint32_t>(position >> 32)}};
  const PhiloxBlock drawn = philox4x32(counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (first + i < c.count) c.out[row * c.out_row + first + i] = uniform_of(drawn.word[i]);
  }
}

}  // namespace

cudaError_t philox_uniform(const PhiloxParams& p, const Launch& on) {
  const int64_t rows = p.out.size[0], count = p.out.size[1];
  if (rows == 0 || count == 0) return cudaSuccess;
  const Call call{p.seeds.as<const int64_t>(), p.positions.as<const int64_t>(),
                  p.seeds.stride[0],           p.positions.stride[0],
                  p.out.as<float>(),           p.out.stride[0],
                  static_cast<int>(count)};
  const int64_t blocks = (count + 4 * kThreads - 1) / (4 * kThreads);
  return launch(philox_kernel, {dim3(static_cast<unsigned>(rows), static_cast<unsigned>(blocks)), dim3(kThreads)}, on.stream, call);
}

}  // namespace pk::cuda
