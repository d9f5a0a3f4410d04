// A row of logits as the candidates of a draw: read from memory eight at a time, or from a list of the few that matter.
#pragma once
#include "floats.cuh"
#include "token_order.cuh"

namespace pk::device {

struct LogitRow {
  const void* data;
  DType type;
  bool wide;  // begins on a 16-byte boundary
  int size;

  PK_DEVICE float at(int id) const { return load_float(type, data, id); }
  // Logits first to first + 7; -inf past the end.
  PK_DEVICE void load(int first, float (&x)[kFloats]) const {
    if (wide && first + kFloats <= size) return load_floats(type, data, first, x);
#pragma unroll
    for (int j = 0; j < kFloats; j++) x[j] = first + j < size ? at(first + j) : -INFINITY;
  }
};

// Which tokens have a probability, before top-k and top-p: those that min-p and float32 leave, and the first always.
struct Support {
  float top, heat, min_p;
  bool every = false;  // also where float32 rounds the weight to 0

  PK_DEVICE float weight(float y) const { return expf(heated(y, top, heat)); }
  PK_DEVICE bool holds(float y, float weight) const {
    if (every) return heated(y, top, heat) > -INFINITY;
    return (weight > 0.f && weight >= min_p) || y == top;
  }
};

struct Candidates {
  LogitRow row;
  Support support;
  uint64_t last = 0;               // none that comes after it
  const uint64_t* list = nullptr;  // in shared memory; null: all of the row
  int listed = 0;

  // visit(token, weight) for this thread's share.
  template <class Visit>
  PK_DEVICE void each(Visit visit) const {
    if (list) {
      for (int i = static_cast<int>(threadIdx.x); i < listed; i += static_cast<int>(blockDim.x)) {
        if (list[i] >= last) visit(list[i], support.weight(logit_of(list[i])));
      }
      return;
    }
    for (int first = static_cast<int>(threadIdx.x) * kFloats; first < row.size; first += static_cast<int>(blockDim.x) * kFloats) {
      float y[kFloats];
      row.load(first, y);
#pragma unroll
      for (int j = 0; j < kFloats; j++) {
        const float weight = support.weight(y[j]);
        const uint64_t token = token_of(y[j], first + j);
        if (first + j < row.size && token >= last && support.holds(y[j], weight)) visit(token, weight);
      }
    }
  }
};

}  // namespace pk::device
