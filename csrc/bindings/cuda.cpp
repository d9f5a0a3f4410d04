// The CUDA module: a table of contents. Arguments follow pykernels/contract in order, then device, stream and scratch memory.
// Compiled for the GPU, and against csrc/emulation for the tests.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>

#include "../cuda/kernels.h"
#include "caster.h"
#include "words.h"

namespace py = pybind11;

namespace pk::cuda {
namespace {

void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(cudaGetErrorName(status)) + ": " + cudaGetErrorString(status));
}

// Makes `device` current and puts the caller's device back.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&before_));
    if (device != before_) check(cudaSetDevice(device));
    moved_ = device != before_;
  }
  ~DeviceGuard() {
    if (moved_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool moved_ = false;
};

// Binds an op whose parameter block is built from the contract's arguments by `make`.
template <class P, class... Args>
void bind(py::module_& m, const char* name, cudaError_t (*launcher)(const P&, const Launch&), P (*make)(Args...)) {
  m.def(name, [launcher, make](Args... args, int device, uintptr_t stream, uintptr_t scratch) {
    const P params = make(args...);
    py::gil_scoped_release release;
    const DeviceGuard guard(device);
    check(launcher(params, {reinterpret_cast<cudaStream_t>(stream), reinterpret_cast<void*>(scratch)}));
  });
}

// The op's `<name>_scratch_bytes`, from the same arguments.
template <class P, class... Args>
void bind_scratch(py::module_& m, const std::string& name, int64_t (*bytes)(const P&), P (*make)(Args...)) {
  m.def((name + "_scratch_bytes").c_str(), [bytes, make](Args... args) { return bytes(make(args...)); });
}

// Which of an op's two kernels its arguments choose: pure, for tests and reports.
template <class P, class... Args>
void bind_choice(py::module_& m, const std::string& name, bool (*on_wgmma)(const P&, int), P (*make)(Args...)) {
  m.def((name + "_on_wgmma").c_str(), [on_wgmma, make](Args... args, int capability) { return on_wgmma(make(args...), capability); });
}

void register_attention(py::module_& m) {
  bind(m, "prefill_attention", prefill_attention, make_prefill);
  bind(m, "paged_prefill_attention", paged_prefill_attention, make_paged_prefill);
  bind_choice(m, "prefill_attention", prefill_attention_on_wgmma, make_prefill);
  bind_choice(m, "paged_prefill_attention", paged_prefill_attention_on_wgmma, make_paged_prefill);
  bind(m, "paged_decode_attention", paged_decode_attention, make_paged_decode);
  bind_scratch(m, "paged_decode_attention", paged_decode_attention_scratch_bytes, make_paged_decode);
  bind(m, "merge_attention_states", merge_attention_states, make<MergeParams, 6>());
}

void register_kv_cache(py::module_& m) {
  bind(m, "append_kv", append_kv, make<AppendParams, 7>());
  bind(m, "rope_append_kv", rope_append_kv, make_rope_append);
  bind(m, "gather_kv", gather_kv, make<GatherParams, 8>());
  bind(m, "copy_pages", copy_pages, make<CopyPagesParams, 6>());
  bind_scratch(m, "copy_pages", copy_pages_scratch_bytes, make<CopyPagesParams, 6>());
  bind(m, "swap_pages", swap_pages, make<SwapPagesParams, 10>());
}

void register_sampling(py::module_& m) {
  bind(m, "sample", sample, make_sample);
  bind_scratch(m, "sample", sample_scratch_bytes, make_sample);
  bind(m, "verify_draft", verify_draft, make<VerifyParams, 12>());
  bind_scratch(m, "verify_draft", verify_draft_scratch_bytes, make<VerifyParams, 12>());
  bind(m, "philox_uniform", philox_uniform, make<PhiloxParams, 3>());
}

void register_linear(py::module_& m) {
  bind(m, "linear", linear, make_linear);
  bind(m, "embedding", embedding, make_embedding);
}

void register_pointwise(py::module_& m) {
  bind(m, "rms_norm", rms_norm, make_rms_norm);
  bind(m, "rotary_embedding", rotary_embedding, make_rotary);
  bind(m, "gated_activation", gated_activation, make_gated_activation);
}

// Null, or why no kernel can run.
const char* driver_error() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) return cudaGetErrorString(status);
  return count ? nullptr : "there is no CUDA device";
}

}  // namespace
}  // namespace pk::cuda

PYBIND11_MODULE(PK_MODULE, m) {
  m.def("driver_error", pk::cuda::driver_error);
  pk::cuda::register_attention(m);
  pk::cuda::register_kv_cache(m);
  pk::cuda::register_sampling(m);
  pk::cuda::register_linear(m);
  pk::cuda::register_pointwise(m);
}
