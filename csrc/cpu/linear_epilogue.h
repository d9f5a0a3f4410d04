// What happens to a tile of sums before it is stored: bias, residual, the output's type.
#pragma once
#include "simd.h"
#include "weight_layout.h"

namespace pk {

class Epilogue {
 public:
  explicit Epilogue(const LinearParams& p) : bias_(p.bias), residual_(p.residual), out_(p.out) {}

  // tile[width][16]: rows `row`.. of the weight by tokens `token`...
  void write(const float* tile, int64_t token, int width, int64_t row) const {
    const int rows = int(out_.size[1] - row < kBlockRows ? out_.size[1] - row : kBlockRows);
    for (int t = 0; t < width; ++t, tile += kBlockRows)
      for (int i = 0; i < rows; i += kLanes) {
        vf y = load(tile + i);
        if (bias_) y += load_any(bias_, row + i, rows - i);
        if (residual_) y += load_any(residual_, (token + t) * residual_.stride[0] + row + i, rows - i);
        store_any(out_, (token + t) * out_.stride[0] + row + i, y, rows - i);
      }
  }

 private:
  static vf load_any(const Tensor& t, int64_t at, int n) {
    switch (t.dtype) {
      case DType::f16:
        return load_n(t.as<f16>() + at, n);
      case DType::bf16:
        return load_n(t.as<bf16>() + at, n);
      default:
        return load_n(t.as<float>() + at, n);
    }
  }
  static void store_any(const Tensor& t, int64_t at, vf v, int n) {
    switch (t.dtype) {
      case DType::f16:
        return store_n(t.as<f16>() + at, v, n);
      case DType::bf16:
        return store_n(t.as<bf16>() + at, v, n);
      default:
        return store_n(t.as<float>() + at, v, n);
    }
  }

  const Tensor &bias_, &residual_, &out_;
};

}  // namespace pk
