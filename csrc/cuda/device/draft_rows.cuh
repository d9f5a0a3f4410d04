// Which request a target row belongs to: request b owns rows cu_draft[b] + b to cu_draft[b + 1] + b.
#pragma once
#include "platform.cuh"

namespace pk::device {

PK_DEVICE int owner_of(const int32_t* cu_draft, int64_t stride, int requests, int row) {
  int low = 0, high = requests;  // the first b that begins after the row lies in (low, high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (cu_draft[middle * stride] + middle <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace pk::device
