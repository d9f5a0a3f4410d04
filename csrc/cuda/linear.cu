// y = x W^T + bias + residual for a few tokens: a matrix-vector product that reads each weight once, a warp per output row.
// Lanes take groups of 32 columns in turn, so a row's bits do not depend on how many tokens share the launch.
#include "aligned.h"
#include "device/reduce.cuh"
#include "device/weights.cuh"
#include "kernels.h"
#include "launch.h"

namespace pk::cuda {
namespace {

using namespace device;

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kBlocks = 4;  // on a multiprocessor at least: 128 registers a thread, which hold 32 weights and the sums of 8 tokens

struct FloatRows {
  const void* data = nullptr;
  DType type = DType::f32;
  int64_t row = 0;

  explicit FloatRows(const Tensor& t) : data(t.data), type(t.dtype), row(t.ndim == 2 ? t.stride[0] : 0) {}
  PK_DEVICE float at(int64_t r, int64_t c) const { return data ? load_float(type, data, r * row + c) : 0.f; }
};

struct Call {
  Weight weight;
  FloatRows x, bias, residual;
  void* out;
  DType out_type;
  int64_t out_row;
  bool wide;  // rows of x begin on 16-byte boundaries
};

template <int kTokens>
__global__ void __launch_bounds__(kThreads, kBlocks) linear_kernel(const Call c) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (n >= c.weight.rows) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto columns = static_cast<int>(c.weight.columns);
  float sum[kTokens] = {};
  for (int g = lane; g * kGroup < columns; g += 32) {
    float w[kGroup];
    load_group(c.weight, n, g, w);
#pragma unroll
    for (int t = 0; t < kTokens; t++) {
      const int64_t at = t * c.x.row + g * kGroup;
#pragma unroll
      for (int i = 0; i < kGroup; i += kFloats) {
        float x[kFloats];
        if (c.wide && (g + 1) * kGroup <= columns) {
          load_floats(c.x.type, c.x.data, at + i, x);
        } else {
#pragma unroll
          for (int j = 0; j < kFloats; j++) x[j] = g * kGroup + i + j < columns ? load_float(c.x.type, c.x.data, at + i + j) : 0.f;
        }
#pragma unroll
        for (int j = 0; j < kFloats; j++) sum[t] = __fmaf_rn(w[i + j], x[j], sum[t]);
      }
    }
  }
  const float scale = c.weight.has_row_scale() ? c.weight.row_scale(n) : 1.f;
#pragma unroll
  for (int t = 0; t < kTokens; t++) {
    const float y = reduce_warp<Sum>(sum[t]) * scale + c.bias.at(0, n) + c.residual.at(t, n);
    if (lane == 0) store_float(c.out_type, c.out, t * c.out_row + n, y);
  }
}

using Kernel = void (*)(Call);
Kernel kernel_for(int64_t tokens) {
  static constexpr Kernel kKernels[] = {linear_kernel<1>, linear_kernel<2>, linear_kernel<3>, linear_kernel<4>,
                                        linear_kernel<5>, linear_kernel<6>, linear_kernel<7>, linear_kernel<8>};
  return tokens <= 8 ? kKernels[tokens - 1] : nullptr;
}

}  // namespace

cudaError_t linear(const LinearParams& p, const Launch& on) {
  const int64_t tokens = p.x.size[0], n = p.out.size[1];
  if (tokens == 0 || n == 0) return cudaSuccess;
  const Kernel kernel = kernel_for(tokens);
  if (!kernel) return cudaErrorInvalidValue;
  const Call call{Weight(p.weight, p.format, n, p.x.size[1]),
                  FloatRows(p.x),
                  FloatRows(p.bias),
                  FloatRows(p.residual),
                  p.out.data,
                  p.out.dtype,
                  p.out.stride[0],
                  rows_aligned(p.x)};
  return launch(kernel, {dim3(static_cast<unsigned>((n + kWarps - 1) / kWarps)), dim3(kThreads)}, on.stream, call);
}

}  // namespace pk::cuda
