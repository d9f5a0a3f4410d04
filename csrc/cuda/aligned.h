// Whether 128-bit accesses are legal: host-side, pure.
#pragma once
#include <algorithm>
#include <cstdint>

#include "common/params.h"

namespace pk::cuda {

// Every row of the tensor (its last dimension, contiguous) begins on a 16-byte boundary. Absent tensors do not object.
inline bool rows_aligned(const Tensor& t) {
  if (!t) return true;
  if (reinterpret_cast<uintptr_t>(t.data) % 16 != 0) return false;
  for (int d = 0; d + 1 < t.ndim; d++) {
    if (t.size[d] > 1 && t.stride[d] * size_of(t.dtype) % 16 != 0) return false;
  }
  return true;
}

// Whether units of eight elements hold whole pairs, and what is not rotated fills whole units.
inline bool fills_units(int pairs, int head_dim, bool interleaved) {
  return pairs % (interleaved ? 4 : 8) == 0 && (head_dim - 2 * pairs) % 8 == 0;
}

}  // namespace pk::cuda
