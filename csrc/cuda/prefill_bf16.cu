#include "prefill.cuh"

namespace pk::cuda {

template cudaError_t launch_prefill<__nv_bfloat16>(const PrefillArgs&, int, cudaStream_t);

}  // namespace pk::cuda
