// How Python hands a tensor over: None, or (data pointer, dtype code, shape, strides).
#pragma once
#include <pybind11/pybind11.h>

#include "../common/params.h"

namespace pybind11::detail {

template <>
struct type_caster<pk::Tensor> {
  PYBIND11_TYPE_CASTER(pk::Tensor, const_name("Tensor"));

  bool load(handle src, bool) {
    value = pk::Tensor{};
    if (src.is_none()) return true;
    if (!PyTuple_Check(src.ptr()) || PyTuple_GET_SIZE(src.ptr()) != 4) return false;
    PyObject* t = src.ptr();
    PyObject *shape = PyTuple_GET_ITEM(t, 2), *stride = PyTuple_GET_ITEM(t, 3);
    const Py_ssize_t ndim = PyTuple_Size(shape);
    if (ndim < 0 || ndim > pk::kMaxDims || PyTuple_Size(stride) != ndim) return false;
    value.data = reinterpret_cast<void*>(PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(t, 0)));
    value.dtype = static_cast<pk::DType>(PyLong_AsLong(PyTuple_GET_ITEM(t, 1)));
    value.ndim = int32_t(ndim);
    for (Py_ssize_t i = 0; i < ndim; ++i) {
      value.size[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i));
      value.stride[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(stride, i));
    }
    return !PyErr_Occurred();
  }
};

}  // namespace pybind11::detail
