// How a self-test kernel is registered: by name, in a faulty and a sound version.
#pragma once
#include "cuda/device/platform.cuh"
#include "cuda/launch.h"

namespace pk::selftest {

// `out` and `in` hold kFloats floats each; `in` is read-only.
inline constexpr int kFloats = 4096;
using Kernel = void (*)(float* out, const float* in);

struct Entry {
  const char* name;
  Kernel sound, faulty;
  int threads;
  size_t shared_bytes;
};

#define PK_SELFTEST(name, threads, shared_bytes) {#name, name<false>, name<true>, threads, shared_bytes}

// Tables end with an empty entry.
extern const Entry kSharedMemoryFaults[], kBarrierFaults[], kHopperFaults[];

}  // namespace pk::selftest
