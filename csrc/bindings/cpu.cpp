// The CPU module of one ISA level: a table of contents. Arguments follow pykernels/contract in order.
#include <pybind11/stl.h>

#include <stdexcept>

#include "../cpu/ceilings.h"
#include "../cpu/kernels.h"
#include "../cpu/plan.h"
#include "../cpu/simd.h"
#include "../cpu/threads.h"
#include "caster.h"
#include "words.h"

namespace py = pybind11;

namespace pk {
namespace {

thread_local Plan* recording = nullptr;

// Runs the op now without the interpreter lock, or appends it to the plan that this thread records.
template <class P>
void submit(void (*kernel)(const P&), const P& params) {
  if (recording) return recording->add(kernel, params);
  py::gil_scoped_release release;
  kernel(params);
}

// Binds an op whose parameter block is built from the contract's arguments by `make`.
template <class P, class... Args>
void bind(py::module_& m, const char* name, void (*kernel)(const P&), P (*make)(Args...)) {
  m.def(name, [kernel, make](Args... args) { submit(kernel, make(args...)); });
}

void register_attention(py::module_& m) {
  bind(m, "prefill_attention", prefill_attention, make_prefill);
  bind(m, "paged_prefill_attention", paged_prefill_attention, make_paged_prefill);
  bind(m, "paged_decode_attention", paged_decode_attention, make_paged_decode);
  bind(m, "merge_attention_states", merge_attention_states, make<MergeParams, 6>());
}

void register_kv_cache(py::module_& m) {
  bind(m, "append_kv", append_kv, make<AppendParams, 7>());
  bind(m, "rope_append_kv", rope_append_kv, make_rope_append);
  bind(m, "gather_kv", gather_kv, make<GatherParams, 8>());
  bind(m, "copy_pages", copy_pages, make<CopyPagesParams, 6>());
  bind(m, "swap_pages", swap_pages, make<SwapPagesParams, 10>());
}

void register_sampling(py::module_& m) {
  bind(m, "sample", sample, make_sample);
  bind(m, "verify_draft", verify_draft, make<VerifyParams, 12>());
  bind(m, "philox_uniform", philox_uniform, make<PhiloxParams, 3>());
}

void register_linear(py::module_& m) {
  bind(m, "linear", linear, make_linear);
  bind(m, "embedding", embedding, make_embedding);
  m.def("repack_rows16", [](uintptr_t plain, uintptr_t rows16, const std::string& format, int64_t rows, int64_t columns) {
    const WeightFormat f = weight_format(format);
    py::gil_scoped_release release;
    repack_rows16(reinterpret_cast<const uint8_t*>(plain), reinterpret_cast<uint8_t*>(rows16), f, rows, columns);
  });
}

void register_pointwise(py::module_& m) {
  bind(m, "rms_norm", rms_norm, make_rms_norm);
  bind(m, "rotary_embedding", rotary_embedding, make_rotary);
  bind(m, "gated_activation", gated_activation, make_gated_activation);
}

void register_plan(py::module_& m) {
  py::class_<Plan>(m, "Plan", py::module_local())  // one per level: several modules may live in a process
      .def(py::init<>())
      .def("__len__", &Plan::size)
      .def("run", &Plan::run, py::call_guard<py::gil_scoped_release>())
      .def("run_timed", &Plan::run_timed, py::call_guard<py::gil_scoped_release>());
  m.def("record", [](Plan* plan) { recording = plan; }, py::arg("plan").none(true));
  m.def("set_num_threads", [](int n) {
    if (n < 1) throw std::invalid_argument("threads must be at least 1, got " + std::to_string(n));
    set_num_threads(n);
  });
  m.def("num_threads", [] { return team().size(); });
  m.def("borrow_openmp", [](uintptr_t parallel, uintptr_t threads, uintptr_t thread) {  // addresses, 0 for none; see OpenMp
    borrow_openmp({reinterpret_cast<decltype(OpenMp::parallel)>(parallel), reinterpret_cast<decltype(OpenMp::threads)>(threads),
                   reinterpret_cast<decltype(OpenMp::thread)>(thread)});
  });
  m.def("default_threads", default_threads);
}

void register_ceilings(py::module_& m) {
  m.def("compute_kinds", compute_kinds);
  m.def("probe_read", [](int64_t bytes_per_thread, bool shared, int threads, int samples, double seconds) {
    py::gil_scoped_release release;
    return probe_read(bytes_per_thread, shared, {threads, samples, seconds});
  });
  m.def("probe_copy", [](int64_t bytes_per_thread, int threads, int samples, double seconds) {
    py::gil_scoped_release release;
    return probe_copy(bytes_per_thread, {threads, samples, seconds});
  });
  m.def("probe_compute", [](const std::string& kind, int threads, int samples, double seconds) {
    py::gil_scoped_release release;
    return probe_compute(kind, {threads, samples, seconds});
  });
}

}  // namespace
}  // namespace pk

PYBIND11_MODULE(PK_MODULE, m) {
  m.attr("lanes") = pk::kLanes;
  pk::register_attention(m);
  pk::register_kv_cache(m);
  pk::register_sampling(m);
  pk::register_linear(m);
  pk::register_pointwise(m);
  pk::register_plan(m);
  pk::register_ceilings(m);
}
