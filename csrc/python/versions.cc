// Reads the version counters of tensors: at once, or on the main thread between two bytecodes. The GIL guards
// everything here.
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "python/tensor_facts.h"
#include "python/tensor_words.h"

namespace lazyckpt {
namespace {

// Where torch keeps the version of a tensor. torch promises none of it, so it is searched for, as Anatomy is.
struct VersionWords {
  size_t counter = 0;  // in the implementation: the address of the counter, which a tensor shares with its views
  size_t count = 0;    // in the counter, 32 bits; 0 if not found

  VersionWords() {
    if (!TensorReader::IsDirect()) return;
    try {
      Find();
    } catch (const std::exception&) {  // another torch
    }
  }

  const void* CounterOf(const void* implementation) const { return PointerAt(implementation, counter); }
  uint32_t CountIn(const void* counter_of_tensor) const { return CountAt(counter_of_tensor, count); }

 private:
  static uint32_t CountAt(const void* counter_of_tensor, size_t offset) {
    return __atomic_load_n(reinterpret_cast<const uint32_t*>(static_cast<const char*>(counter_of_tensor) + offset),
                           __ATOMIC_RELAXED);
  }

  void Find() {
    constexpr size_t kMostBytes = 32;  // of a counter: a table of functions, one or two counts of references, the count
    const py::object zeros = ForFacts().torch.attr("zeros");
    const py::object tensor = zeros(3), detached = tensor.attr("detach")(), other = zeros(3);
    const auto words = [](const py::object& of) { return Parts().ImplementationOf(of.ptr()); };
    counter = OnlyWord(words(tensor), kImplementationBytes, [&](size_t at, uintptr_t word) {
      return at != Parts().storage && word == WordAt(words(detached), at) && word != WordAt(words(other), at);
    });
    if (counter == 0) return;
    const auto counts = [&](size_t at) {
      for (int writes = 0; writes < 3; ++writes) {
        if (CountAt(CounterOf(words(tensor)), at) != Integer(ForFacts().version(tensor))) return false;
        detached.attr("zero_")();
      }
      return true;
    };
    for (size_t at = kWord; at < kMostBytes && count == 0; at += sizeof(uint32_t)) count = counts(at) ? at : 0;
  }
};

constexpr int64_t kUncounted = -1;  // of a tensor that was made in inference mode

int64_t VersionOf(py::handle tensor) {
  const VersionWords& words = TheOnly<VersionWords>();
  if (words.count != 0 && TensorReader::IsDirect() && IsOfTorch(tensor)) {
    const void* const implementation = Parts().ImplementationOf(tensor.ptr());
    if (implementation != nullptr && WordAt(implementation, 0) == Parts().kind) {
      const void* const counter = words.CounterOf(implementation);
      if (counter != nullptr) return words.CountIn(counter);
    }
  }
  if (Truth(ForFacts().is_inference(tensor))) return kUncounted;
  return Integer(ForFacts().version(tensor));
}

// Loads the counters of the next tensors into the cache. Only for speed.
void PrefetchVersions(const py::list& tensors, size_t now) {
  constexpr size_t kStep = 4;  // tensors
  const VersionWords& words = TheOnly<VersionWords>();
  if (words.count == 0) return;
  const auto at = [&tensors](size_t i) { return i < tensors.size() ? PyList_GET_ITEM(tensors.ptr(), i) : nullptr; };
  const auto implementation_at = [&at](size_t i) {
    PyObject* const tensor = at(i);
    return tensor != nullptr && IsTensor(tensor) ? Parts().ImplementationOf(tensor) : nullptr;
  };
  __builtin_prefetch(at(now + 3 * kStep));
  if (const void* next = implementation_at(now + 2 * kStep); next != nullptr)
    __builtin_prefetch(static_cast<const char*>(next) + words.counter);
  if (const void* next = implementation_at(now + kStep); next != nullptr) __builtin_prefetch(words.CounterOf(next));
}

std::vector<int64_t> VersionsOf(const py::list& tensors) {
  std::vector<int64_t> versions;
  versions.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    PrefetchVersions(tensors, i);
    const auto tensor = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(tensors.ptr(), i));
    versions.push_back(VersionOf(tensor));
  }
  return versions;
}

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

// The addresses of the codes that run custom functions, of the newest request.
py::object& CustomFunctions() {
  static auto* codes = new py::object;
  return *codes;
}

// What the callback asks, looked up once.
struct TorchState {
  py::object module = py::module_::import("torch");
  py::object graph_task = module.attr("_C").attr("_current_graph_task_id");
  py::object dispatch_modes = module.attr("_C").attr("_len_torch_dispatch_stack");
  py::object is_excluded = module.attr("_C").attr("_dispatch_tls_is_dispatch_key_excluded");
  py::object in_place = module.attr("_C").attr("DispatchKey").attr("ADInplaceOrView");
  py::object no_torch_function = module.attr("_C").attr("DisableTorchFunction");
};

// Whether Python runs in the middle of an operation, because of a custom function or a dispatch mode: the bytes may be
// new and the version old. Torch takes a mode off while it runs its code, but the key that moves versions is excluded
// then, until the operation returns to that key. Also true in a backward pass, where other threads of autograd may
// write, and where nothing tells whether a custom function runs: then the verdict comes at the gate, or in a call that
// waits.
bool InsideAnOperation(const TorchState& ask) {
  const py::object codes = CustomFunctions();
  if (codes.is_none()) return true;
  if (ask.graph_task().cast<int64_t>() != -1 || ask.dispatch_modes().cast<int64_t>() != 0) return true;
  if (ask.is_excluded(ask.in_place).cast<bool>()) return true;
  const auto own = [](auto* object) { return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(object)); };
  for (py::object frame = own(PyThreadState_GetFrame(PyThreadState_Get())); frame;) {
    auto* const at = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const py::int_ code(reinterpret_cast<uintptr_t>(own(PyFrame_GetCode(at)).ptr()));
    if (PySet_Contains(codes.ptr(), code.ptr()) != 0) return true;
    frame = own(PyFrame_GetBack(at));
  }
  return false;
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
        for (const auto& reading : readings) reading->read = VersionsOf(reading->tensors);
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

void Request(const std::shared_ptr<VersionReading>& reading, const py::object& custom_functions) {
  CustomFunctions() = custom_functions;
  if (!reading->requested && !reading->read) {
    Requested().push_back(reading);
    reading->requested = true;
  }
  if (!is_pending && !Requested().empty()) is_pending = Py_AddPendingCall(&AtPointOfProgramOrder, nullptr) == 0;
}

}  // namespace

void DefineVersions(py::module_& m) {
  m.def("versions_of", [](const py::list& tensors) {
    const auto versions = VersionsOf(tensors);
    return py::bytes(reinterpret_cast<const char*>(versions.data()), versions.size() * sizeof versions[0]);
  });
  m.def("reads_versions_directly", [] { return TensorReader::IsDirect() && TheOnly<VersionWords>().count != 0; });

  py::class_<VersionReading, std::shared_ptr<VersionReading>>(m, "VersionReading")
      .def(py::init([](py::list tensors) {
        (void)TheOnly<TorchState>();  // imports, and calls torch, which the callback must not do
        (void)TheOnly<VersionWords>();
        return std::make_shared<VersionReading>(VersionReading{std::move(tensors)});
      }))
      .def("request", &Request, py::arg("custom_functions").none(true))
      .def("versions", [](const VersionReading& reading) { return reading.read; });
}

}  // namespace lazyckpt
