// Rotary position embedding of one token: angles once, in shared memory, for all its heads.
#pragma once
#include "common/params.h"
#include "floats.cuh"

namespace pk::device {

struct Rotation {
  const float *cosine, *sine;  // [pairs], times rope_scale, in shared memory
  int pairs, head_dim;
  bool interleaved;

  // Units of a head that hold `width` pairs (interleaved: width / 2, at least one) or `width` elements that are kept.
  PK_DEVICE int turned_units(int width) const { return interleaved && width > 1 ? pairs / (width / 2) : pairs / width; }
  PK_DEVICE int units(int width) const { return turned_units(width) + (head_dim - 2 * pairs) / width; }
};

// The block fills [pairs] cosines and sines. The angle is reduced to a part of a turn in float64: one product a pair and token, and
// sine and cosine need no slow path for large arguments.
PK_DEVICE void fill_angles(float* cosine, float* sine, int64_t position, const float* inv_freq, int pairs, float rope_scale) {
  constexpr double kHalfTurns = 0.31830988618379067;  // 1 / pi
  for (int p = static_cast<int>(threadIdx.x); p < pairs; p += static_cast<int>(blockDim.x)) {
    const double angle = static_cast<double>(position) * inv_freq[p] * kHalfTurns;
    const auto reduced = static_cast<float>(angle - 2. * rint(angle * 0.5));
    cosine[p] = cospif(reduced) * rope_scale;
    sine[p] = sinpif(reduced) * rope_scale;
  }
}

// Rows [tokens][heads][dim] of any float type.
struct HeadRows {
  void* data;
  DType type;
  int64_t token, head;
  int heads;

  explicit HeadRows(const Tensor& t)
      : data(t.data), type(t.dtype), token(t.stride[0]), head(t.stride[1]), heads(static_cast<int>(t.size[1])) {}
  PK_DEVICE void* row(int64_t t, int h) const { return offset(data, type, t * token + h * head); }
};

// The two elements of pair p, turned.
PK_DEVICE float2 turn(const Rotation& r, int p, float a, float b) {
  return {a * r.cosine[p] - b * r.sine[p], a * r.sine[p] + b * r.cosine[p]};
}

// Unit u of a row, one pair or one kept element at a time: sink(element, value).
template <class Sink>
PK_DEVICE void rotate_one(const Rotation& r, DType type, const void* x, int u, Sink&& sink) {
  if (u >= r.pairs) {
    const int e = r.pairs + u;
    return sink(e, load_float(type, x, e));
  }
  const int first = r.interleaved ? 2 * u : u, second = r.interleaved ? first + 1 : u + r.pairs;
  const float2 y = turn(r, u, load_float(type, x, first), load_float(type, x, second));
  sink(first, y.x);
  sink(second, y.y);
}

// Unit u of a row by 128-bit accesses: everything is aligned, and pairs and kept elements fill whole units. May be in place.
PK_DEVICE void rotate_wide(const Rotation& r, DType type, const void* x, DType out_type, void* out, int u) {
  const int turned = r.turned_units(kFloats);
  float a[kFloats];
  if (u >= turned) {
    const int e = 2 * r.pairs + (u - turned) * kFloats;
    load_floats(type, x, e, a);
    store_floats(out_type, out, e, a);
    return;
  }
  load_floats(type, x, u * kFloats, a);
  if (r.interleaved) {
#pragma unroll
    for (int j = 0; j < kFloats; j += 2) {
      const float2 y = turn(r, (u * kFloats + j) / 2, a[j], a[j + 1]);
      a[j] = y.x;
      a[j + 1] = y.y;
    }
    store_floats(out_type, out, u * kFloats, a);
    return;
  }
  float b[kFloats];
  load_floats(type, x, r.pairs + u * kFloats, b);
#pragma unroll
  for (int j = 0; j < kFloats; j++) {
    const float2 y = turn(r, u * kFloats + j, a[j], b[j]);
    a[j] = y.x;
    b[j] = y.y;
  }
  store_floats(out_type, out, u * kFloats, a);
  store_floats(out_type, out, r.pairs + u * kFloats, b);
}

// The block rotates all heads of a token, by 128-bit accesses or one by one. May be in place.
template <bool kWide>
PK_DEVICE void rotate_heads(const Rotation& r, const HeadRows& in, const HeadRows& out, int64_t token) {
  const int units = r.units(kWide ? kFloats : 1);
  for (int i = static_cast<int>(threadIdx.x); i < in.heads * units; i += static_cast<int>(blockDim.x)) {
    const int h = i / units, u = i % units;
    const void* x = in.row(token, h);
    void* y = out.row(token, h);
    if constexpr (kWide) {
      rotate_wide(r, in.type, x, out.type, y, u);
    } else {
      rotate_one(r, in.type, x, u, [&](int e, float value) { store_float(out.type, y, e, value); });
    }
  }
}

}  // namespace pk::device
