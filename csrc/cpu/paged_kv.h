// Where the key or value rows of one sequence lie: contiguous, or in the pages of a block table; with the scales of codes.
#pragma once
#include <algorithm>

#include "../common/params.h"

namespace pk {

template <class T>
constexpr bool is_code = sizeof(T) == 1;

// Rows of kv head 0 of one sequence; other heads are `head_stride` elements further. A token's row is at
// base + page * page_stride + slot * slot_stride, and its scale (real = code * scale) likewise.
template <class T>
struct KvRows {
  const T* base;
  int64_t page_stride, slot_stride, head_stride;
  const int32_t* pages = nullptr;  // nullptr: one page holds everything
  int64_t page_size = 0;
  const float* scale = nullptr;
  int64_t scale_page_stride = 0, scale_slot_stride = 0, scale_head_stride = 0;

  // Addresses of the rows of tokens [first, last) and of their scales. Only these tokens' table entries are read.
  void locate(int64_t first, int64_t last, const T** rows, const float** scales) const {
    for (int64_t t = first; t < last;) {
      const int64_t slot = pages ? t % page_size : t, page = pages ? pages[t / page_size] : 0;
      const int64_t n = pages ? std::min(page_size - slot, last - t) : last - t;
      const T* row = base + page * page_stride + slot * slot_stride;
      for (int64_t i = 0; i < n; ++i) *rows++ = row + i * slot_stride;
      if constexpr (is_code<T>) {
        const float* s = scale + page * scale_page_stride + slot * scale_slot_stride;
        for (int64_t i = 0; i < n; ++i) *scales++ = s + i * scale_slot_stride;
      }
      t += n;
    }
  }
};

// k or v of all sequences: ragged [total, kv_heads, dim], where a sequence begins at row `first`.
template <class T>
KvRows<T> ragged_rows(const Tensor& data, int64_t first) {
  const int64_t* s = data.stride;
  return {data.as<T>() + first * s[0], 0, s[0], s[1]};
}

// Paged [pages, page_size, kv_heads, dim], with scales [pages, page_size, kv_heads], [kv_heads] or [].
template <class T>
KvRows<T> paged_rows(const Tensor& data, const Tensor& scale, const Tensor& block_table, int64_t sequence) {
  const int64_t *s = data.stride, *z = scale.stride;
  KvRows<T> rows{data.as<T>(), s[0], s[1], s[2], block_table.as<int32_t>() + sequence * block_table.stride[0], data.size[1]};
  if (!scale) return rows;
  rows.scale = scale.as<float>();
  if (scale.ndim == 3) rows.scale_page_stride = z[0], rows.scale_slot_stride = z[1], rows.scale_head_stride = z[2];
  if (scale.ndim == 1) rows.scale_head_stride = z[0];
  return rows;
}

}  // namespace pk
