#include "decode.cuh"

namespace pk::cuda {

template cudaError_t launch_splits<__half>(const Decode&, int, unsigned, cudaStream_t);

}  // namespace pk::cuda
