// Tensor maps for TMA, made on the host: CUtensorMap under nvcc, its emulation under g++, by the same rules.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#include <cuda.h>
#include <cuda_runtime.h>
#else
#include <cuda_runtime_api.h>

#include "emulation/device.h"
#endif

namespace pk {

enum class TensorType : int { f16, bf16 };
enum class TensorSwizzle : int { none = 0, bytes32 = 1, bytes64 = 2, bytes128 = 3 };

// A view of `rank` dimensions, innermost first and contiguous, read in boxes.
struct TensorMapSpec {
  const void* base;
  TensorType type;
  int rank;
  uint64_t size[5];
  uint64_t stride_bytes[5];  // [0] is the element's size
  uint32_t box[5];
  TensorSwizzle swizzle;
};

// The rules of cuTensorMapEncodeTiled, and that a swizzled row fills its span (so that tiles are dense). Null if all hold.
inline const char* tensor_map_error(const TensorMapSpec& s) {
  constexpr uint64_t kElement = 2;
  if (s.rank < 1 || s.rank > 5) return "a tensor map has 1 to 5 dimensions";
  if (reinterpret_cast<uintptr_t>(s.base) % 16 != 0) return "a tensor map's base is a multiple of 16 bytes";
  for (int d = 0; d < s.rank; d++) {
    if (s.size[d] == 0 || s.size[d] > uint64_t{1} << 32) return "a tensor map's sizes are 1 to 2^32";
    if (s.box[d] == 0 || s.box[d] > 256) return "a tensor map's box has 1 to 256 elements a side";
    if (d > 0 && (s.stride_bytes[d] % 16 != 0 || s.stride_bytes[d] >= uint64_t{1} << 40))
      return "a tensor map's strides are multiples of 16 bytes below 2^40";
  }
  if (s.stride_bytes[0] != kElement) return "a tensor map's innermost dimension is contiguous";
  const uint64_t row = s.box[0] * kElement;
  if (row % 16 != 0) return "a tensor map's box is a multiple of 16 bytes wide";
  if (s.swizzle != TensorSwizzle::none && row != uint64_t{16} << static_cast<int>(s.swizzle))
    return "a swizzled box is as wide as the swizzle's span";
  return nullptr;
}

#ifdef __CUDACC__

using HostTensorMap = CUtensorMap;

inline cudaError_t encode(const TensorMapSpec& s, HostTensorMap* out) {
  if (tensor_map_error(s)) return cudaErrorInvalidValue;
  void* entry = nullptr;  // from the driver at run time: the module must load where there is none
  cudaDriverEntryPointQueryResult found;
  const cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
  if (e != cudaSuccess) return e;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  const auto encode_tiled = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  const cuuint32_t step[5] = {1, 1, 1, 1, 1};
  const CUtensorMapDataType type = s.type == TensorType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult r = encode_tiled(out, type, static_cast<cuuint32_t>(s.rank), const_cast<void*>(s.base), s.size, s.stride_bytes + 1, s.box,
                                  step, CU_TENSOR_MAP_INTERLEAVE_NONE, static_cast<CUtensorMapSwizzle>(s.swizzle),
                                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

#else

using HostTensorMap = emu::TensorMap;

inline cudaError_t encode(const TensorMapSpec& s, HostTensorMap* out) {
  if (tensor_map_error(s)) return cudaErrorInvalidValue;
  *out = {static_cast<const unsigned char*>(s.base), 2, s.rank, static_cast<emu::Swizzle>(s.swizzle), {}, {}, {}};
  for (int d = 0; d < s.rank; d++) {
    out->size[d] = s.size[d];
    out->stride_bytes[d] = s.stride_bytes[d];
    out->box[d] = s.box[d];
  }
  return cudaSuccess;
}

#endif

}  // namespace pk
