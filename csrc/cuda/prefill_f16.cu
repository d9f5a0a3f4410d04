#include "prefill.cuh"

namespace pk::cuda {

template cudaError_t launch_prefill<__half>(const PrefillArgs&, const PrefillShape&, cudaStream_t);

}  // namespace pk::cuda
