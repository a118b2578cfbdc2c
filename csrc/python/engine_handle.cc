#include "python/engine_handle.h"

namespace lazyckpt {

py::object Returned(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

// Not by pybind11, as of an argument: if that lacks memory, it says so without any, and the process ends.
std::string PathOf(const py::object& path) {
  PyObject* bytes = nullptr;
  if (PyUnicode_FSConverter(path.ptr(), &bytes) == 0) throw py::error_already_set();
  return std::string(py::reinterpret_steal<py::bytes>(bytes));
}

void Raise(const Status& status) {
  if (status.ok()) return;
  const auto path = Returned(PyUnicode_DecodeFSDefault(status.path().c_str()));  // it need not be UTF-8
  py::object error = py::module_::import("builtins").attr("OSError")(status.error(), status.message(), path);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw py::error_already_set();
}

std::vector<StreamRef> ToStreams(const std::optional<py::buffer>& streams) {
  std::vector<StreamRef> refs;
  if (!streams) return refs;
  const auto flat = ToVector<uint64_t>(*streams, "streams");
  if (flat.size() % 2 != 0) throw py::value_error("streams: expected pairs");
  for (size_t i = 0; i < flat.size(); i += 2) refs.push_back({static_cast<int>(flat[i]), flat[i + 1]});
  return refs;
}

EngineHandle::EngineHandle(const EngineOptions& options) {
  Status status;
  {
    NoGil no_gil;
    engine_ = Engine::Create(options, &status).release();
  }
  Raise(status);
}

EngineHandle::~EngineHandle() {
  if (!alive()) return;
  NoGil no_gil;  // it may have to wait for the disk
  delete engine_;
}

Engine& EngineHandle::get() const {
  if (!alive()) throw std::runtime_error("this engine belongs to the parent of this process");
  return *engine_;
}

}  // namespace lazyckpt
