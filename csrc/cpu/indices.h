// Checks of index contents, on the calling thread and before any write. The text names the op, the element, the range.
#pragma once
#include <string>

#include "dispatch.h"

namespace pk {

// Fails unless low <= value < high. `bound` says in words where `high` comes from.
inline void check_index(const char* op, const char* name, int64_t at, int64_t value, int64_t low, int64_t high, const char* bound) {
  if (value >= low && value < high) return;
  fail(std::string(op) + ": " + name + "[" + std::to_string(at) + "] must be at least " + std::to_string(low) + " and below " + bound +
       " (" + std::to_string(high) + "), got " + std::to_string(value));
}

// Tokens of one sequence: its length fits the block table, and every page that it uses exists.
inline void check_pages(const char* op, const Tensor& block_table, const Tensor& seqlens, int64_t b, int64_t num_pages, int64_t page_size) {
  const int64_t length = index_at(seqlens, b), capacity = block_table.size[1] * page_size;
  check_index(op, "seqlens_k", b, length, 0, capacity + 1, "max_pages_per_seq * page_size + 1");
  const int32_t* row = block_table.as<int32_t>() + b * block_table.stride[0];
  for (int64_t i = 0; i * page_size < length; ++i)
    if (row[i] < 0 || row[i] >= num_pages)
      fail(std::string(op) + ": block_table[" + std::to_string(b) + ", " + std::to_string(i) +
           "] must be at least 0 and below num_pages (" + std::to_string(num_pages) + "), got " + std::to_string(row[i]));
}

}  // namespace pk
