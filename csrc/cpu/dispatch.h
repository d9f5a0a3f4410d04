// From a runtime dtype to a compile-time type: visit(t, [&]<class T>() { ... }).
#pragma once
#include <stdexcept>
#include <string>

#include "../common/params.h"

namespace pk {

[[noreturn]] inline void fail(const std::string& text) { throw std::invalid_argument(text); }

template <class F>
void visit_float(DType t, F&& f) {
  switch (t) {
    case DType::f32:
      return f.template operator()<float>();
    case DType::f16:
      return f.template operator()<f16>();
    case DType::bf16:
      return f.template operator()<bf16>();
    default:
      fail("expected a floating-point tensor");
  }
}

// What a KV cache may hold.
template <class F>
void visit_cache(DType t, F&& f) {
  switch (t) {
    case DType::i8:
      return f.template operator()<int8_t>();
    case DType::fp8_e4m3:
      return f.template operator()<fp8>();
    default:
      return visit_float(t, f);
  }
}

template <class F>
void visit_index(DType t, F&& f) {
  if (t == DType::i32) return f.template operator()<int32_t>();
  if (t == DType::i64) return f.template operator()<int64_t>();
  fail("expected an int32 or int64 tensor");
}

// Element i of an index tensor of either width.
inline int64_t index_at(const Tensor& t, int64_t i) {
  return t.dtype == DType::i32 ? t.as<int32_t>()[i * t.stride[0]] : t.as<int64_t>()[i * t.stride[0]];
}

}  // namespace pk
