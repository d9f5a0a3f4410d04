// Launches linear layers of a few tokens: tensor cores where x and the weight's numbers are of one 16-bit type, otherwise floats.
#include "aligned.h"
#include "device/reduce.cuh"
#include "kernels.h"
#include "launch.h"
#include "linear.cuh"

namespace pk::cuda {
namespace {

// Any types, any alignment: a warp per row, whose lanes take eight columns in turn.
__global__ void __launch_bounds__(kThreads) linear_floats_kernel(const __grid_constant__ Linear c) {
  const int64_t n = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (n >= c.weight.rows) return;
  const int lane = static_cast<int>(threadIdx.x) % 32, columns = static_cast<int>(c.weight.columns);
  float sum[kTokens] = {};
#pragma unroll 1
  for (int unit = lane; unit * kFloats < columns; unit += 32) {
    float w[kFloats], x[kFloats];
    load_unit(c.weight, n, unit, w);
#pragma unroll
    for (int t = 0; t < kTokens; t++) {
      if (t >= c.tokens) break;
      const int64_t at = t * c.x.row + unit * kFloats;
      if (c.wide && (unit + 1) * kFloats <= columns) {
        load_floats(c.x.type, c.x.data, at, x);
      } else {
        const int last = min(columns - unit * kFloats, kFloats) - 1;
#pragma unroll
        for (int j = 0; j < kFloats; j++) {
          const float there = load_float(c.x.type, c.x.data, at + min(j, last));
          x[j] = j <= last ? there : 0.f;
        }
      }
#pragma unroll
      for (int j = 0; j < kFloats; j++) sum[t] = __fmaf_rn(w[j], x[j], sum[t]);
    }
  }
#pragma unroll
  for (int t = 0; t < kTokens; t++) {
    if (t >= c.tokens) break;
    const float y = reduce_warp<Sum>(sum[t]);
    if (lane == 0) store_result(c, t, n, y);
  }
}

template <class T, WeightFormat kFormat>
cudaError_t run(const Linear& c, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((c.weight.rows + kRows - 1) / kRows);
  const Grid grid{dim3(blocks), dim3(kThreads), std::max(TileShape<kFormat>::shared_bytes(c.tokens), kSumBytes)};
  return launch(linear_kernel<T, kFormat>, grid, stream, c);
}

template <class T>
cudaError_t run_format(const Linear& c, cudaStream_t stream) {
  switch (c.weight.format) {
    case WeightFormat::int8:
      return run<T, WeightFormat::int8>(c, stream);
    case WeightFormat::fp8_e4m3:
      return run<T, WeightFormat::fp8_e4m3>(c, stream);
    case WeightFormat::q4_0:
      return run<T, WeightFormat::q4_0>(c, stream);
    case WeightFormat::q4_1:
      return run<T, WeightFormat::q4_1>(c, stream);
    case WeightFormat::q8_0:
      return run<T, WeightFormat::q8_0>(c, stream);
    default:
      return run<T, WeightFormat::dense>(c, stream);
  }
}

// Whether products are exact on tensor cores, and rows can be copied.
bool multiplies_pairs(const Linear& c) {
  if (c.x.type == DType::f32 || !c.wide) return false;
  if (c.weight.blocked()) return reinterpret_cast<uintptr_t>(c.weight.data) % 16 == 0;
  return c.weight.wide && (c.weight.has_row_scale() || c.weight.type == c.x.type);
}

}  // namespace

cudaError_t linear(const LinearParams& p, const Launch& on) {
  const int64_t tokens = p.x.size[0], n = p.out.size[1];
  if (tokens == 0 || n == 0) return cudaSuccess;
  if (tokens > kTokens) return cudaErrorInvalidValue;
  const Linear call{Weight(p.weight, p.format, n, p.x.size[1]),
                    FloatRows(p.x),
                    FloatRows(p.bias),
                    FloatRows(p.residual),
                    p.out.data,
                    p.out.dtype,
                    p.out.stride[0],
                    static_cast<int>(tokens),
                    rows_aligned(p.x)};
  if (multiplies_pairs(call))
    return call.x.type == DType::f16 ? run_format<__half>(call, on.stream) : run_format<__nv_bfloat16>(call, on.stream);
  return launch(linear_floats_kernel, {dim3(static_cast<unsigned>((n + kWarps - 1) / kWarps)), dim3(kThreads)}, on.stream, call);
}

}  // namespace pk::cuda
