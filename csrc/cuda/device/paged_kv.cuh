// Where a token's keys and values are: in a ragged tensor, or in the pages of a block table. Offsets are 64-bit from the
// first multiplication; a negative page is never dereferenced.
#pragma once
#include "common/params.h"
#include "platform.cuh"

namespace pk::device {

// Division by a number that is known at launch: one multiplication. Dividends are below 2^31.
struct Divider {
  int divisor = 1;
  uint32_t magic = 1, shift = 0;

  Divider() = default;
  explicit Divider(int64_t by) : divisor(static_cast<int>(by)) {
    while (shift < 31 && (int64_t{1} << shift) < by) shift++;
    magic = static_cast<uint32_t>((uint64_t{1} << 32) * static_cast<uint64_t>((int64_t{1} << shift) - by) / static_cast<uint64_t>(by) + 1);
  }
  PK_DEVICE int quotient(int n) const {
    const auto u = static_cast<uint32_t>(n);
    return static_cast<int>((__umulhi(u, magic) + u) >> shift);
  }
  PK_DEVICE int remainder(int n, int quotient) const { return n - quotient * divisor; }
};

// Token t of a sequence is slot {page, offset}. A ragged tensor is one page of all its tokens.
struct Slot {
  int page, offset;
  PK_DEVICE bool exists() const { return page >= 0; }
};

struct Pages {
  const int* table = nullptr;  // [batch, max_pages_per_seq], null when ragged
  int64_t table_stride = 0;
  Divider page_size;

  PK_DEVICE int page(int batch, int token) const { return table ? table[batch * table_stride + page_size.quotient(token)] : 0; }
  // The slot of a token whose page is known. `first` is the sequence's first token in a ragged tensor.
  PK_DEVICE Slot slot_in(int page, int first, int token) const {
    return {page, table ? page_size.remainder(token, page_size.quotient(token)) : first + token};
  }
  PK_DEVICE Slot slot(int batch, int first, int token) const { return slot_in(page(batch, token), first, token); }
};

// Keys or values [pages, page_size, kv_heads, dim], or [tokens, kv_heads, dim]: bytes between neighbours.
struct TokenRows {
  const char* data = nullptr;
  int64_t page = 0, token = 0, head = 0;

  TokenRows() = default;
  explicit TokenRows(const Tensor& t) : data(t.as<const char>()) {
    const int64_t bytes = size_of(t.dtype);
    page = t.ndim == 4 ? t.stride[0] * bytes : 0;
    token = t.stride[t.ndim - 3] * bytes;
    head = t.stride[t.ndim - 2] * bytes;
  }
  PK_DEVICE int64_t offset(Slot s, int kv_head) const {  // factors without a sign: two instructions each
    return static_cast<uint32_t>(s.page) * page + static_cast<uint32_t>(s.offset) * token + static_cast<uint32_t>(kv_head) * head;
  }
  PK_DEVICE const char* row(Slot s, int kv_head) const { return data + offset(s, kv_head); }
};

// Scales of codes: one, one per kv head, or one per slot and kv head. Strides are 0 where a scale is shared.
struct Scales {
  const float* data = nullptr;
  int64_t page = 0, token = 0, head = 0;
  bool per_token = false;

  Scales() = default;
  explicit Scales(const Tensor& t) {
    if (!t) return;
    data = t.as<const float>();
    per_token = t.ndim == 3;
    if (per_token) page = t.stride[0], token = t.stride[1];
    if (t.ndim > 0) head = t.stride[t.ndim - 1];
  }
  PK_DEVICE float at(Slot s, int kv_head) const { return data[s.page * page + s.offset * token + kv_head * head]; }
  PK_DEVICE float shared(int kv_head) const { return data && !per_token ? data[kv_head * head] : 1.f; }  // 1 where each has its own
};

}  // namespace pk::device
