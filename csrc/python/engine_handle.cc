#include "python/engine_handle.h"

#include <unistd.h>

namespace lazyckpt {

void Raise(const Status& status) {
  if (status.ok()) return;
  const auto path = Returned(PyUnicode_DecodeFSDefault(status.path().c_str()));  // may not be UTF-8
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

std::string ToPath(const py::object& path) {
  PyObject* bytes = nullptr;
  if (PyUnicode_FSConverter(path.ptr(), &bytes) == 0) throw py::error_already_set();
  return py::reinterpret_steal<py::bytes>(bytes);
}

NoGil::~NoGil() {
  try {
    PyEval_RestoreThread(state_);
  } catch (...) {
    for (;;) pause();
  }
}

EngineHandle::EngineHandle(const EngineOptions& options) : pid_(getpid()) {
  CallWithoutGil([&] {
    Status status;
    engine_ = Engine::Create(options, &status).release();
    return status;
  });
}

EngineHandle::~EngineHandle() {
  if (!alive()) return;
  NoGil no_gil;  // it may wait for the disk
  delete engine_;
}

bool EngineHandle::alive() const { return getpid() == pid_; }

Engine& EngineHandle::get() const {
  if (!alive()) throw std::runtime_error("this engine belongs to the parent of this process");
  return *engine_;
}

}  // namespace lazyckpt
