// Launches kernels: on the device under nvcc, in csrc/emulation under g++. Launchers (<family>.cu) are the same source for both.
#pragma once
#ifdef __CUDACC__
#include <cuda_runtime.h>
#else
#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include "emulation/emu.h"
#endif

#include <cstddef>
#include <cstdint>

namespace pk {

struct Grid {
  dim3 blocks, threads;
  size_t shared_bytes = 0;  // dynamic
};

// Enqueues `kernel` on `stream`. No synchronisation, no allocation: legal while a graph is captured. The status is the
// launch's own; faults of the running kernel show in later calls (in the emulation, at once, and in its report).
template <class... P, class... A>
cudaError_t launch(void (*kernel)(P...), const Grid& grid, cudaStream_t stream, A&&... arguments) {
#ifdef __CUDACC__
  constexpr size_t kWithoutOptIn = 48 << 10;
  if (grid.shared_bytes > kWithoutOptIn) {
    const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(grid.shared_bytes));
    if (e != cudaSuccess) return e;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid.blocks;
  config.blockDim = grid.threads;
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, static_cast<P>(arguments)...);
#else
  (void)stream;
  return emu::launch(kernel, grid.blocks, grid.threads, grid.shared_bytes, static_cast<P>(arguments)...);
#endif
}

}  // namespace pk
