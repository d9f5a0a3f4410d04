#include "prefill_sm90.cuh"

namespace pk::cuda {

template cudaError_t launch_prefill_sm90<__nv_bfloat16>(const PrefillSm90Args&, int, cudaStream_t);

}  // namespace pk::cuda
