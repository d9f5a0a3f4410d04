// Element types that cross the boundary between Python and the kernels. Codes agree with pykernels/native.py.
#pragma once
#include <cstdint>

namespace pk {

enum class DType : int32_t { f32 = 0, f16 = 1, bf16 = 2, i8 = 3, fp8_e4m3 = 4, i32 = 5, i64 = 6, u8 = 7, boolean = 8 };

inline int size_of(DType t) {
  constexpr int bytes[] = {4, 2, 2, 1, 1, 4, 8, 1, 1};
  return bytes[int(t)];
}

// Storage types. They only name bits; arithmetic is in float.
struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};
struct fp8 {
  uint8_t bits;
};

}  // namespace pk
