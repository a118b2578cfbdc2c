// Reads the version counters of tensors on the main thread, between two bytecodes. The GIL guards everything here.
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "python/engine_handle.h"

namespace lazyckpt {
namespace {

struct VersionReading {
  py::list tensors;
  bool requested = false;
  std::optional<std::vector<int64_t>> read{};  // one for each tensor, once they were read
};

using Readings = std::vector<std::shared_ptr<VersionReading>>;

Readings& Requested() {
  static auto* readings = new Readings;  // never deleted: a pending call may run while the process ends
  return *readings;
}

bool is_pending = false;  // one callback serves the process, since Python queues at most 32

// What the callback asks, looked up once.
struct TorchState {
  py::object module = py::module_::import("torch");
  py::object graph_task = module.attr("_C").attr("_current_graph_task_id");
  py::object dispatch_modes = module.attr("_C").attr("_len_torch_dispatch_stack");
  py::object is_excluded = module.attr("_C").attr("_dispatch_tls_is_dispatch_key_excluded");
  py::object in_place = module.attr("_C").attr("DispatchKey").attr("ADInplaceOrView");
  py::object no_torch_function = module.attr("_C").attr("DisableTorchFunction");
  py::object version = module.attr("Tensor").attr("_version");
  // The code that runs custom functions. None from torch 2.15 on, where that is native and leaves no frame.
  py::object apply =
      py::getattr(py::getattr(module.attr("autograd").attr("Function").attr("apply"), "__func__", py::none()),
                  "__code__", py::none());
};

// Whether Python runs in the middle of an operation, because of a custom function or a dispatch mode: the bytes may be
// new and the version old. Torch takes a mode off while it runs its code, but the key that moves versions is excluded
// then, until the operation returns to that key. Also true in a backward pass, where other threads of autograd may
// write, and where nothing tells whether a custom function runs: then the verdict comes at the gate, or in a call that
// waits.
bool InsideAnOperation(const TorchState& ask) {
  if (ask.apply.is_none()) return true;
  if (ask.graph_task().cast<int64_t>() != -1 || ask.dispatch_modes().cast<int64_t>() != 0) return true;
  if (ask.is_excluded(ask.in_place).cast<bool>()) return true;
  const auto own = [](auto* object) { return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(object)); };
  for (py::object frame = own(PyThreadState_GetFrame(PyThreadState_Get())); frame;) {
    auto* const at = reinterpret_cast<PyFrameObject*>(frame.ptr());
    if (own(PyFrame_GetCode(at)).is(ask.apply)) return true;
    frame = own(PyFrame_GetBack(at));
  }
  return false;
}

void ReadAll(const TorchState& ask, VersionReading* reading) {
  const descrgetfunc get = Py_TYPE(ask.version.ptr())->tp_descr_get;
  std::vector<int64_t> read;
  read.reserve(reading->tensors.size());
  for (const py::handle tensor : reading->tensors)
    read.push_back(Returned(get(ask.version.ptr(), tensor.ptr(), nullptr)).cast<int64_t>());
  reading->read = std::move(read);
}

// The callback. Reads nothing inside an operation; the requests must be made again then.
int AtPointOfProgramOrder(void*) {
  is_pending = false;
  const Readings readings = std::exchange(Requested(), {});
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  try {
    for (const auto& reading : readings) reading->requested = false;
    const auto& ask = TheOnly<TorchState>();
    if (!InsideAnOperation(ask)) {
      const py::object disabled = ask.no_torch_function();  // otherwise each read runs Python under torch.device(...)
      disabled.attr("__enter__")();
      try {
        for (const auto& reading : readings) ReadAll(ask, reading.get());
      } catch (...) {
        PyErr_Clear();
      }
      disabled.attr("__exit__")(py::none(), py::none(), py::none());
    }
  } catch (...) {  // never raise in the middle of other code
    PyErr_Clear();
  }
  PyErr_Restore(type, value, trace);
  return 0;
}

void Request(const std::shared_ptr<VersionReading>& reading) {
  if (!reading->requested && !reading->read) {
    Requested().push_back(reading);
    reading->requested = true;
  }
  if (!is_pending && !Requested().empty()) is_pending = Py_AddPendingCall(&AtPointOfProgramOrder, nullptr) == 0;
}

}  // namespace

void DefineVersions(py::module_& m) {
  py::class_<VersionReading, std::shared_ptr<VersionReading>>(m, "VersionReading")
      .def(py::init([](py::list tensors) {
        (void)TheOnly<TorchState>();  // imports, which the callback must not do
        return std::make_shared<VersionReading>(VersionReading{std::move(tensors)});
      }))
      .def("request", &Request)
      .def("versions", [](const VersionReading& reading) { return reading.read; });
}

}  // namespace lazyckpt
