// Index tensors of either width.
#pragma once
#include "common/params.h"
#include "platform.cuh"

namespace pk::device {

struct Indices {
  const void* data = nullptr;
  bool wide = false;  // int64
  int64_t stride = 0;

  Indices() = default;
  explicit Indices(const Tensor& t) : data(t.data), wide(t.dtype == DType::i64), stride(t.stride[0]) {}
  PK_DEVICE int64_t at(int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i * stride] : int64_t{static_cast<const int32_t*>(data)[i * stride]};
  }
};

}  // namespace pk::device
