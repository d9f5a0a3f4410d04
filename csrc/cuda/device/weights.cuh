// Weights in any format, dense or in the plain packed layout, as floats: 32 columns of one row at a time.
#pragma once
#include "common/params.h"
#include "quant.cuh"

namespace pk::device {

constexpr int kGroup = 32;  // columns that share a scale in the block formats

// By value to kernels. `wide`: 32 columns of any row begin on a 16-byte boundary.
struct Weight {
  const uint8_t* data;
  WeightFormat format;
  DType type;  // of float elements, or of codes with a scale per row
  int64_t rows, columns, row_stride;
  bool wide;

  Weight(const Tensor& t, WeightFormat f, int64_t n, int64_t k)
      : data(t.as<const uint8_t>()), format(f), type(t.dtype), rows(n), columns(k), row_stride(f == WeightFormat::dense ? t.stride[0] : k) {
    if (f == WeightFormat::float32) type = DType::f32;
    if (f == WeightFormat::bfloat16) type = DType::bf16;
    if (f == WeightFormat::float16) type = DType::f16;
    if (f == WeightFormat::int8) type = DType::i8;
    if (f == WeightFormat::fp8_e4m3) type = DType::fp8_e4m3;
    wide = reinterpret_cast<uintptr_t>(data) % 16 == 0 && row_stride * size_of(type) % 16 == 0;
  }
  PK_DEVICE bool blocked() const { return format == WeightFormat::q4_0 || format == WeightFormat::q4_1 || format == WeightFormat::q8_0; }
  PK_DEVICE bool has_row_scale() const { return format == WeightFormat::int8 || format == WeightFormat::fp8_e4m3; }
  // The scale of a row's codes: behind all codes, at any address.
  PK_DEVICE float row_scale(int64_t row) const {
    const uint8_t* p = data + rows * columns + 4 * row;
    return __uint_as_float(uint32_t{p[0]} | uint32_t{p[1]} << 8 | uint32_t{p[2]} << 16 | uint32_t{p[3]} << 24);
  }
};

PK_DEVICE float half_at(const uint8_t* p) { return __half2float(__ushort_as_half(*reinterpret_cast<const unsigned short*>(p))); }

// A GGUF block: float16 scale (and minimum), then nibbles (low: columns 0 to 15, high: 16 to 31) or int8 codes.
PK_DEVICE void load_block(const Weight& w, int64_t row, int group, float (&x)[kGroup]) {
  const int bytes = w.format == WeightFormat::q4_0 ? 18 : w.format == WeightFormat::q4_1 ? 20 : 34;
  const uint8_t* block = w.data + (row * (w.columns / kGroup) + group) * bytes;
  const float d = half_at(block);
  if (w.format == WeightFormat::q8_0) {
#pragma unroll
    for (int i = 0; i < kGroup; i += 2) {
      const uint32_t two = *reinterpret_cast<const uint16_t*>(block + 2 + i);
      x[i] = decode(DType::i8, two & 0xffu) * d;
      x[i + 1] = decode(DType::i8, two >> 8) * d;
    }
    return;
  }
  const bool minimum = w.format == WeightFormat::q4_1;
  const float m = minimum ? half_at(block + 2) : -8.f * d;
  const uint8_t* codes = block + (minimum ? 4 : 2);
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    const uint32_t two = *reinterpret_cast<const uint16_t*>(codes + i);
    x[i] = __fmaf_rn(static_cast<float>(two & 15u), d, m);
    x[i + 1] = __fmaf_rn(static_cast<float>(two >> 8 & 15u), d, m);
    x[i + 16] = __fmaf_rn(static_cast<float>(two >> 4 & 15u), d, m);
    x[i + 17] = __fmaf_rn(static_cast<float>(two >> 12), d, m);
  }
}

// Columns 32 group to 32 group + 31 of a row, 0 past the last; without the scale of rows that have one.
PK_DEVICE void load_group(const Weight& w, int64_t row, int group, float (&x)[kGroup]) {
  if (w.blocked()) return load_block(w, row, group, x);
  const int64_t at = row * w.row_stride + int64_t{group} * kGroup;
  const int count = static_cast<int>(w.columns - int64_t{group} * kGroup);
  const bool codes = w.has_row_scale();
  if (w.wide && count >= kGroup) {
    if (codes) {
#pragma unroll
      for (int i = 0; i < kGroup; i += 16) {
        const uint4 v = load_global_128(w.data + at + i);
        const uint32_t four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 16; j++) x[i + j] = decode(w.type, four[j / 4] >> (8 * (j % 4)) & 0xffu);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kGroup; i += kFloats) {
      float part[kFloats];
      load_floats(w.type, w.data, at + i, part);
#pragma unroll
      for (int j = 0; j < kFloats; j++) x[i + j] = part[j];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kGroup; i++) {
    x[i] = i >= count ? 0.f : codes ? decode(w.type, w.data[at + i]) : load_float(w.type, w.data, at + i);
  }
}

}  // namespace pk::device
