// The launchers of the CUDA backend: one declaration per op. Each enqueues on a stream and returns the status of its
// launches; none synchronises or allocates. Memory for partial results comes from the caller: `<op>_scratch_bytes` says
// how much, exactly, from shapes alone (never from device data, so that a captured graph stays valid).
#pragma once
#ifdef __CUDACC__
#include <cuda_runtime.h>
#else
#include <cuda_runtime_api.h>
#endif

#include "common/params.h"

namespace pk::cuda {

struct Launch {
  cudaStream_t stream = nullptr;
  void* scratch = nullptr;  // aligned to 256 bytes
};

cudaError_t rms_norm(const RmsNormParams&, const Launch&);

}  // namespace pk::cuda
