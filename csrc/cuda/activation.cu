// Gated activations: act(x[:, :width]) * x[:, width:].
#include "aligned.h"
#include "device/floats.cuh"
#include "kernels.h"
#include "launch.h"

namespace pk::cuda {
namespace {

using namespace device;

constexpr int kThreads = 256;

struct Call {
  const void* x;
  void* out;
  DType type, out_type;
  int64_t x_row, out_row;
  int width;
  bool silu;
};

PK_DEVICE float active(bool silu, float g) {
  if (silu) return g / (1.f + expf(-g));
  return 0.5f * g * (1.f + tanhf(0.7978845608028654f * (g + 0.044715f * g * g * g)));
}

template <int kWidth>
__global__ void __launch_bounds__(kThreads) gated_activation_kernel(const Call c) {
  const int i = (static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x)) * kWidth;
  if (i >= c.width) return;
  const int64_t gate_at = blockIdx.x * c.x_row + i, out_at = blockIdx.x * c.out_row + i;
  if constexpr (kWidth == 1) {
    store_float(c.out_type, c.out, out_at, active(c.silu, load_float(c.type, c.x, gate_at)) * load_float(c.type, c.x, gate_at + c.width));
  } else {
    float gate[kFloats], up[kFloats];
    load_floats(c.type, c.x, gate_at, gate);
    load_floats(c.type, c.x, gate_at + c.width, up);
#pragma unroll
    for (int j = 0; j < kFloats; j++) gate[j] = active(c.silu, gate[j]) * up[j];
    store_floats(c.out_type, c.out, out_at, gate);
  }
}

}  // namespace

cudaError_t gated_activation(const GatedActivationParams& p, const Launch& on) {
  const int64_t rows = p.x.size[0], width = p.out.size[1];
  if (rows == 0 || width == 0) return cudaSuccess;
  const Call call{
      p.x.data, p.out.data, p.x.dtype, p.out.dtype, p.x.stride[0], p.out.stride[0], static_cast<int>(width), p.kind == Gate::silu};
  const bool wide = rows_aligned(p.x) && rows_aligned(p.out) && width % device::kFloats == 0;
  const int64_t per_block = kThreads * (wide ? device::kFloats : 1);
  const Grid grid{dim3(static_cast<unsigned>(rows), static_cast<unsigned>((width + per_block - 1) / per_block)), dim3(kThreads)};
  return launch(wide ? gated_activation_kernel<device::kFloats> : gated_activation_kernel<1>, grid, on.stream, call);
}

}  // namespace pk::cuda
