// Conversions between Python and the engine: arrays, streams, results and errors.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/job.h"
#include "status.h"

namespace lazyckpt {

namespace py = pybind11;

// Owns the result of a function of Python's C API; throws the Python error that is set if it is nullptr.
py::object Returned(PyObject* result);

// Throws an OSError with errno, message and file name, unless the status is OK. Only here a Status becomes an
// exception.
void Raise(const Status& status);

// The items of a flat buffer, which must stay alive; ValueError otherwise.
template <class T>
std::span<const T> Flat(const py::buffer_info& info, const char* name) {
  if (info.ndim != 1 || info.itemsize != static_cast<py::ssize_t>(sizeof(T)) ||
      (info.size > 1 && info.strides[0] != info.itemsize))
    throw py::value_error(std::string(name) + ": expected a flat array of " + std::to_string(sizeof(T)) +
                          "-byte items");
  return {static_cast<const T*>(info.ptr), static_cast<size_t>(info.size)};
}

template <class T>
std::vector<T> ToVector(const py::buffer& buffer, const char* name) {
  const py::buffer_info info = buffer.request();
  const auto flat = Flat<T>(info, name);
  return {flat.begin(), flat.end()};
}

// Pairs of device and handle.
std::vector<StreamRef> ToStreams(const std::optional<py::buffer>& streams);

}  // namespace lazyckpt
