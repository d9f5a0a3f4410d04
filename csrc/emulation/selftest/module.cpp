// A Python extension over emulated launchers: how the CUDA bindings are loaded where there is no device.
#include <pybind11/pybind11.h>

#include <cstdint>

extern "C" int selftest_strided(const float* in, float* out, int stride);

PYBIND11_MODULE(selftest_module, m) {
  m.def("strided", [](intptr_t in, intptr_t out, int stride) {
    return selftest_strided(reinterpret_cast<const float*>(in), reinterpret_cast<float*>(out), stride);
  });
}
