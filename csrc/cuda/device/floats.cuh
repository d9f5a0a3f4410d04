// Eight floats at a time from memory of any float type. The type is a value, the same for the whole grid: its branch costs
// nothing beside the memory access, and one kernel serves every combination of types.
#pragma once
#include "common/dtype.h"
#include "platform.cuh"

namespace pk::device {

constexpr int kFloats = 8;  // a 128-bit access of 2-byte elements, two of float32

// The address of an element.
PK_DEVICE const void* offset(const void* p, DType type, int64_t elements) {
  return static_cast<const char*>(p) + elements * (type == DType::f32 ? 4 : 2);
}
PK_DEVICE void* offset(void* p, DType type, int64_t elements) { return static_cast<char*>(p) + elements * (type == DType::f32 ? 4 : 2); }

PK_DEVICE float load_float(DType type, const void* p, int64_t i) {
  if (type == DType::f32) return static_cast<const float*>(p)[i];
  if (type == DType::f16) return __half2float(static_cast<const __half*>(p)[i]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
}

PK_DEVICE void store_float(DType type, void* p, int64_t i, float x) {
  if (type == DType::f32) {
    static_cast<float*>(p)[i] = x;
  } else if (type == DType::f16) {
    static_cast<__half*>(p)[i] = __float2half_rn(x);
  } else {
    static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16_rn(x);
  }
}

// x rounded to `type`.
PK_DEVICE float round_float(DType type, float x) {
  if (type == DType::f32) return x;
  return type == DType::f16 ? __half2float(__float2half_rn(x)) : __bfloat162float(__float2bfloat16_rn(x));
}

PK_DEVICE float2 unpack(DType type, uint32_t pair) {
  if (type == DType::bf16) return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  return {__half2float(__ushort_as_half(static_cast<unsigned short>(pair))),
          __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16)))};
}

// Elements i to i + 7, 16-byte aligned.
PK_DEVICE void load_floats(DType type, const void* p, int64_t i, float (&x)[kFloats]) {
  if (type == DType::f32) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint4 v = load_global_128(static_cast<const float*>(p) + i + 4 * h);
      x[4 * h] = __uint_as_float(v.x);
      x[4 * h + 1] = __uint_as_float(v.y);
      x[4 * h + 2] = __uint_as_float(v.z);
      x[4 * h + 3] = __uint_as_float(v.w);
    }
    return;
  }
  const uint4 v = load_global_128(static_cast<const uint16_t*>(p) + i);
  const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const float2 f = unpack(type, pairs[j]);
    x[2 * j] = f.x;
    x[2 * j + 1] = f.y;
  }
}

PK_DEVICE void store_floats(DType type, void* p, int64_t i, const float (&x)[kFloats]) {
  if (type == DType::f32) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      store_global_128(static_cast<float*>(p) + i + 4 * h, {__float_as_uint(x[4 * h]), __float_as_uint(x[4 * h + 1]),
                                                            __float_as_uint(x[4 * h + 2]), __float_as_uint(x[4 * h + 3])});
    }
    return;
  }
  uint32_t v[4];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    v[j] = type == DType::f16 ? pack<__half>(x[2 * j], x[2 * j + 1]) : pack<__nv_bfloat16>(x[2 * j], x[2 * j + 1]);
  }
  store_global_128(static_cast<uint16_t*>(p) + i, {v[0], v[1], v[2], v[3]});
}

}  // namespace pk::device
