#include "prefill.cuh"

namespace pk::cuda {

template cudaError_t launch_prefill<__half>(const PrefillArgs&, int, cudaStream_t);

}  // namespace pk::cuda
