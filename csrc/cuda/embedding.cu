// Rows of an embedding, dense or packed, as floats: a warp per token, a lane per group of 32 columns.
#include "device/indices.cuh"
#include "device/weights.cuh"
#include "kernels.h"
#include "launch.h"

namespace pk::cuda {
namespace {

using namespace device;

constexpr int kThreads = 128;

struct Call {
  Weight weight;
  Indices ids;
  void* out;
  DType out_type;
  int64_t out_row;
};

__global__ void __launch_bounds__(kThreads) embedding_kernel(const Call c) {
  const int64_t row = c.ids.at(blockIdx.x);
  const float scale = c.weight.has_row_scale() ? c.weight.row_scale(row) : 1.f;
  void* out = offset(c.out, c.out_type, blockIdx.x * c.out_row);
  const auto columns = static_cast<int>(c.weight.columns);
  for (int g = static_cast<int>(threadIdx.x); g * kGroup < columns; g += kThreads) {
    float x[kGroup];
    load_group(c.weight, row, g, x);
#pragma unroll
    for (int i = 0; i < kGroup; i++) {
      if (g * kGroup + i < columns) store_float(c.out_type, out, g * kGroup + i, x[i] * scale);
    }
  }
}

}  // namespace

cudaError_t embedding(const EmbeddingParams& p, const Launch& on) {
  if (p.out.size[0] == 0) return cudaSuccess;
  const Call call{Weight(p.weight, p.format, p.num_embeddings, p.out.size[1]), Indices(p.ids), p.out.data, p.out.dtype, p.out.stride[0]};
  return launch(embedding_kernel, {dim3(static_cast<unsigned>(p.out.size[0])), dim3(kThreads)}, on.stream, call);
}

}  // namespace pk::cuda
