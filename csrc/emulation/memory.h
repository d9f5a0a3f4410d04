// Device memory: the ranges that kernels may touch.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace emu {

struct Range {
  const unsigned char* base;
  size_t bytes;
  bool writable;
  std::string label;
};

// The registered range that holds all of [p, p + n), or null.
const Range* find_range(const void* p, size_t n);

// "4 bytes past the end of `k_cache` (4096 bytes)": where an address that no range holds lies.
std::string describe_address(const void* p, size_t n);

}  // namespace emu
