// A source position in 64 bits: either a return address, or a file name pointer with the line in the upper 16 bits.
#pragma once
#include <cstdint>

namespace emu {

using Site = uint64_t;

inline Site site(const char* file, int line) { return static_cast<uint64_t>(line) << 48 | reinterpret_cast<uintptr_t>(file); }
inline Site site(const void* return_address) { return reinterpret_cast<uintptr_t>(return_address); }
inline int line_of(Site s) { return static_cast<int>(s >> 48); }
inline const char* file_of(Site s) { return reinterpret_cast<const char*>(s & 0xffffffffffffull); }

}  // namespace emu

// Default arguments that capture the caller's position; two of them because a nested call would capture its own.
#define EMU_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define EMU_SITE ::emu::site(file, line)
