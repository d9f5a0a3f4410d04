// RMS normalisation: y = h / sqrt(mean(h^2) + eps) * weight with h = x + residual rounded to x's type. A block per row; the
// second pass finds the row in L1 or L2, so the row is read from memory once.
#include "aligned.h"
#include "device/floats.cuh"
#include "device/reduce.cuh"
#include "kernels.h"
#include "launch.h"

namespace pk::cuda {
namespace {

using namespace device;

constexpr int kMaxThreads = 512;

struct Row {
  const void *x, *residual;
  void *sum, *out;
  int64_t x_row, residual_row, sum_row, out_row;
  const void* weight;
  DType type, weight_type, out_type;
  int hidden;
  float eps;
};

// Elements i to i + kWidth - 1 of h.
template <int kWidth>
PK_DEVICE void load_sum(const Row& r, const void* x, const void* residual, int i, float (&h)[kFloats]) {
  if constexpr (kWidth == 1) {
    h[0] = load_float(r.type, x, i);
    if (residual) h[0] = round_float(r.type, h[0] + load_float(r.type, residual, i));
  } else {
    load_floats(r.type, x, i, h);
    if (!residual) return;
    float add[kFloats];
    load_floats(r.type, residual, i, add);
#pragma unroll
    for (int j = 0; j < kFloats; j++) h[j] = round_float(r.type, h[j] + add[j]);
  }
}

template <int kWidth>  // kFloats where everything is aligned, otherwise 1
__global__ void __launch_bounds__(kMaxThreads) rms_norm_kernel(const Row r) {
  __shared__ float partial[32];
  const int64_t row = blockIdx.x;
  const void* x = offset(r.x, r.type, row * r.x_row);
  const void* residual = r.residual ? offset(r.residual, r.type, row * r.residual_row) : nullptr;
  void* sum = r.sum ? offset(r.sum, r.type, row * r.sum_row) : nullptr;
  void* out = offset(r.out, r.out_type, row * r.out_row);
  const int first = static_cast<int>(threadIdx.x) * kWidth, step = static_cast<int>(blockDim.x) * kWidth;
  float squares = 0.f, h[kFloats];
  for (int i = first; i < r.hidden; i += step) {
    load_sum<kWidth>(r, x, residual, i, h);
    if constexpr (kWidth == 1) {
      if (sum) store_float(r.type, sum, i, h[0]);
    } else {
      if (sum) store_floats(r.type, sum, i, h);
    }
#pragma unroll
    for (int j = 0; j < kWidth; j++) squares += h[j] * h[j];
  }
  const float mean = reduce_block<Sum>(squares, partial) / static_cast<float>(r.hidden);
  const float scale = 1.f / sqrtf(mean + r.eps);
  for (int i = first; i < r.hidden; i += step) {
    // The sum may have been written over its operands: read it back, each thread what it wrote.
    load_sum<kWidth>(r, sum ? sum : x, sum ? nullptr : residual, i, h);
    if constexpr (kWidth == 1) {
      store_float(r.out_type, out, i, h[0] * scale * load_float(r.weight_type, r.weight, i));
    } else {
      float w[kFloats];
      load_floats(r.weight_type, r.weight, i, w);
#pragma unroll
      for (int j = 0; j < kFloats; j++) h[j] *= scale * w[j];
      store_floats(r.out_type, out, i, h);
    }
  }
}

}  // namespace

cudaError_t rms_norm(const RmsNormParams& p, const Launch& launch_on) {
  const int64_t rows = p.x.size[0], hidden = p.x.size[1];
  if (rows == 0 || hidden == 0) return cudaSuccess;
  const Row row{p.x.data,
                p.residual.data,
                p.residual_out.data,
                p.out.data,
                p.x.stride[0],
                p.residual ? p.residual.stride[0] : 0,
                p.residual_out ? p.residual_out.stride[0] : 0,
                p.out.stride[0],
                p.weight.data,
                p.x.dtype,
                p.weight.dtype,
                p.out.dtype,
                static_cast<int>(hidden),
                static_cast<float>(p.eps)};
  const bool wide = rows_aligned(p.x) && rows_aligned(p.weight) && rows_aligned(p.residual) && rows_aligned(p.residual_out) &&
                    rows_aligned(p.out) && hidden % device::kFloats == 0;
  const int64_t items = wide ? hidden / device::kFloats : hidden;
  const auto threads = static_cast<unsigned>(std::min<int64_t>((items + 31) / 32 * 32, kMaxThreads));
  const Grid grid{dim3(static_cast<unsigned>(rows)), dim3(threads)};
  return launch(wide ? rms_norm_kernel<device::kFloats> : rms_norm_kernel<1>, grid, launch_on.stream, row);
}

}  // namespace pk::cuda
