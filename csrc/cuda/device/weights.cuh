// Weights in any format, dense or in the plain packed layout, as floats: eight columns of one row at a time.
#pragma once
#include "common/params.h"
#include "quant.cuh"

namespace pk::device {

constexpr int kGroup = 32;  // columns that share a scale in the block formats

// By value to kernels. `wide`: every row begins on a 16-byte boundary.
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
  __host__ __device__ bool blocked() const {
    return format == WeightFormat::q4_0 || format == WeightFormat::q4_1 || format == WeightFormat::q8_0;
  }
  __host__ __device__ bool has_row_scale() const { return format == WeightFormat::int8 || format == WeightFormat::fp8_e4m3; }
  // The scale of a row's codes: behind all codes, at any address.
  PK_DEVICE float row_scale(int64_t row) const {
    const uint8_t* p = data + rows * columns + 4 * row;
    return __uint_as_float(uint32_t{p[0]} | uint32_t{p[1]} << 8 | uint32_t{p[2]} << 16 | uint32_t{p[3]} << 24);
  }
};

PK_DEVICE float half_at(const uint8_t* p) { return __half2float(__ushort_as_half(*reinterpret_cast<const unsigned short*>(p))); }

// Bytes of a GGUF block: float16 scale (and minimum), then nibbles (low: columns 0 to 15, high: 16 to 31) or int8 codes.
__host__ __device__ constexpr int block_bytes(WeightFormat f) { return f == WeightFormat::q4_0 ? 18 : f == WeightFormat::q4_1 ? 20 : 34; }

// Columns 8 unit to 8 unit + 7 of a row in the block formats.
PK_DEVICE void load_block_unit(const Weight& w, int64_t row, int unit, float (&x)[kFloats]) {
  const uint8_t* block = w.data + (row * (w.columns / kGroup) + unit / 4) * block_bytes(w.format);
  const bool nibbles = w.format != WeightFormat::q8_0, minimum = w.format == WeightFormat::q4_1;
  const float d = half_at(block), m = minimum ? half_at(block + 2) : nibbles ? -8.f * d : 0.f;
  const uint8_t* codes = block + (minimum ? 4 : 2) + unit % (nibbles ? 2 : 4) * kFloats;
  const int shift = unit % 4 / 2 * 4;
#pragma unroll
  for (int i = 0; i < kFloats; i += 2) {
    const uint32_t two = *reinterpret_cast<const uint16_t*>(codes + i);
    x[i] = __fmaf_rn(nibbles ? static_cast<float>(two >> shift & 15u) : decode(DType::i8, two & 0xffu), d, m);
    x[i + 1] = __fmaf_rn(nibbles ? static_cast<float>(two >> shift >> 8 & 15u) : decode(DType::i8, two >> 8), d, m);
  }
}

// Columns 8 unit to 8 unit + 7 of a row, 0 past the last; without the scale of rows that have one.
PK_DEVICE void load_unit(const Weight& w, int64_t row, int unit, float (&x)[kFloats]) {
  if (w.blocked()) return load_block_unit(w, row, unit, x);
  const int64_t at = row * w.row_stride + int64_t{unit} * kFloats;
  const int count = static_cast<int>(w.columns - int64_t{unit} * kFloats);
  const bool codes = w.has_row_scale();
  if (w.wide && !codes && count >= kFloats) return load_floats(w.type, w.data, at, x);
#pragma unroll
  for (int i = 0; i < kFloats; i++) {
    x[i] = i >= count ? 0.f : codes ? decode(w.type, w.data[at + i]) : load_float(w.type, w.data, at + i);
  }
}

}  // namespace pk::device
