// Rows of an embedding, dense or packed, as floats: a block per token, a thread per eight columns.
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
  for (int unit = static_cast<int>(threadIdx.x); unit * kFloats < columns; unit += kThreads) {
    float x[kFloats];
    load_unit(c.weight, row, unit, x);
#pragma unroll
    for (int i = 0; i < kFloats; i++) {
      if (unit * kFloats + i < columns) store_float(c.out_type, out, unit * kFloats + i, x[i] * scale);
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
