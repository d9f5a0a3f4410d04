// Rows of a paged KV cache with their scales: a warp writes or reads one head's vector.
#pragma once
#include "common/params.h"
#include "quant.cuh"
#include "reduce.cuh"

namespace pk::device {

// One of the two caches [num_pages, page_size, kv_heads, dim], and the scales of a quantised one.
struct Pool {
  void* cache = nullptr;
  DType type = DType::f32;
  int64_t page_size = 1, page = 0, token = 0, head = 0;  // strides in elements
  float* scale = nullptr;
  bool dynamic = false;  // a scale per token and head, written with the codes; otherwise read
  int64_t scale_page = 0, scale_token = 0, scale_head = 0;
  int dim = 0;
  bool wide = false;  // rows begin on 16-byte boundaries

  Pool() = default;
  Pool(const Tensor& c, const Tensor& s, bool aligned)
      : cache(c.data),
        type(c.dtype),
        page_size(c.size[1]),
        page(c.stride[0]),
        token(c.stride[1]),
        head(c.stride[2]),
        dim(static_cast<int>(c.size[3])),
        wide(aligned) {
    if (!s) return;
    scale = s.as<float>();
    dynamic = s.ndim == 3;
    if (dynamic) scale_page = s.stride[0], scale_token = s.stride[1];
    if (s.ndim > 0) scale_head = s.stride[s.ndim - 1];
  }

  PK_DEVICE int64_t row(int64_t slot, int h) const { return slot / page_size * page + slot % page_size * token + h * head; }
  PK_DEVICE float* scale_at(int64_t slot, int h) const {
    return scale + slot / page_size * scale_page + slot % page_size * scale_token + h * scale_head;
  }
};

// The warp's lanes take elements lane, lane + 32, ... of the row: value(e) -> float.
template <class Value>
PK_DEVICE void store_row(const Pool& pool, int64_t slot, int h, Value&& value) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t at = pool.row(slot, h);
  if (!pool.scale) {
    for (int e = lane; e < pool.dim; e += 32) store_float(pool.type, pool.cache, at + e, value(e));
    return;
  }
  float* scale_to = pool.scale_at(slot, h);
  float scale;
  if (pool.dynamic) {
    float largest = 0.f;
    bool odd = false;  // fmaxf would lose a NaN
    for (int e = lane; e < pool.dim; e += 32) {
      const float x = fabsf(value(e));
      odd |= x != x;
      largest = fmaxf(largest, x);
    }
    scale = reduce_warp<Max>(largest) / largest_code(pool.type);
    if (scale == 0.f) scale = 1.f;
    if (__any_sync(kFullWarp, odd)) scale = __uint_as_float(0x7fc00000u);
    if (lane == 0) *scale_to = scale;
  } else {
    scale = *scale_to;
  }
  for (int e = lane; e < pool.dim; e += 32)
    static_cast<uint8_t*>(pool.cache)[at + e] = static_cast<uint8_t>(encode(pool.type, __fdiv_rn(value(e), scale)));
}

// Writes the row, dequantised, to `out` of a float type.
PK_DEVICE void load_row(const Pool& pool, int64_t slot, int h, DType out_type, void* out) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t at = pool.row(slot, h);
  if (pool.scale) {
    const float scale = *pool.scale_at(slot, h);
    for (int e = lane; e < pool.dim; e += 32) {
      store_float(out_type, out, e, decode(pool.type, static_cast<const uint8_t*>(pool.cache)[at + e]) * scale);
    }
  } else if (pool.wide) {
    for (int e = lane * kFloats; e < pool.dim; e += 32 * kFloats) {
      float x[kFloats];
      load_floats(pool.type, pool.cache, at + e, x);
      store_floats(out_type, out, e, x);
    }
  } else {
    for (int e = lane; e < pool.dim; e += 32) store_float(out_type, out, e, load_float(pool.type, pool.cache, at + e));
  }
}

}  // namespace pk::device
