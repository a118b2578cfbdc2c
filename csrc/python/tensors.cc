// What save() and restore() ask of every tensor. With tens of thousands of tensors, a Python pass for each question
// would load each tensor into the cache a dozen times, so one native pass asks all of them. Everything needs the GIL.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "python/spans.h"
#include "python/tensor_facts.h"

namespace lazyckpt {
namespace {

struct Questions {
  py::object torch = py::module_::import("torch");
  py::object tensor = torch.attr("Tensor");
  py::object parameter = py::module_::import("torch.nn").attr("Parameter");
  py::object flatten = Returned(PyUnicode_InternFromString("__tensor_flatten__"));
  py::object local_tensor = Returned(PyUnicode_InternFromString("_local_tensor"));
  Question cdata{torch.attr("UntypedStorage"), "_cdata"};
  Question storage_nbytes{torch.attr("UntypedStorage"), "nbytes"};
  Question data_ptr{tensor, "data_ptr"};
  Question element_size{tensor, "element_size"};
  Question is_conj{tensor, "is_conj"};
  Question is_contiguous{tensor, "is_contiguous"};
  Question is_neg{tensor, "is_neg"};
  Question nbytes{tensor, "nbytes"};
  Question storage_offset{tensor, "storage_offset"};
  Question untyped_storage{tensor, "untyped_storage"};
};

const Questions& Ask() { return TheOnly<Questions>(); }

// (description, storages by _cdata): see _engine.pyi.
std::optional<std::pair<py::bytes, py::dict>> LookAtTensors(const py::list& tensors) {
  py::dict storages;
  Numbers positions;
  std::vector<int64_t> looks;
  looks.reserve(tensors.size() * 10);
  TensorReader reader;
  TensorFacts facts;
  const Prefetch prefetch(tensors);
  for (size_t i = 0; i < tensors.size(); ++i) {
    prefetch(i);
    const auto tensor = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(tensors.ptr(), i));
    if (!reader.Read(tensor, &facts) || facts.is_altered || facts.device == kElsewhere) return std::nullopt;
    if (HasAttributes(tensor) || HasHooks(tensor)) return std::nullopt;
    const auto next = static_cast<uint32_t>(storages.size());
    const auto known = positions.FindOrAdd(facts.storage, next);
    looks.push_back(known.value_or(next));
    if (!known) {
      storages[py::int_(reinterpret_cast<uintptr_t>(facts.storage))] = StorageOf(tensor);
      looks.push_back(facts.device);
      looks.push_back(facts.storage_nbytes);
    }
    looks.push_back(static_cast<int64_t>(reinterpret_cast<uintptr_t>(facts.dtype.ptr())));  // dtypes live forever
    looks.push_back(facts.requires_grad);
    looks.push_back(facts.offset);
    looks.push_back(static_cast<int64_t>(facts.sizes.size()));
    looks.insert(looks.end(), facts.sizes.begin(), facts.sizes.end());
    looks.insert(looks.end(), facts.strides.begin(), facts.strides.end());
  }
  return std::pair(py::bytes(reinterpret_cast<const char*>(looks.data()), looks.size() * sizeof looks[0]), storages);
}

// (begin, bytes, offset) of each: see _engine.pyi.
py::list SpansOfTensors(const py::list& tensors) {
  std::vector<Use> uses;
  Numbers numbers;
  TensorReader reader;
  TensorFacts facts;
  for (const py::handle tensor : tensors) {
    if (!reader.Read(tensor, &facts)) throw py::value_error("expected plain tensors");
    const auto next = static_cast<uint32_t>(numbers.size());
    uses.push_back(UseOf(facts, numbers.FindOrAdd(facts.storage, next).value_or(next)));
  }
  const Spans found = SpansOf(uses);
  py::list spans;
  for (size_t i = 0; i < uses.size(); ++i) {
    const Span& span = found.spans[found.of[i]];
    spans.append(py::make_tuple(span.begin, span.nbytes, span.OffsetOf(uses[i])));
  }
  return spans;
}

// Whether both show the bytes of the storage of `saved`, all of them, in order and as they are.
bool ShowWhole(py::handle saved, py::handle live, const py::object& storage) {
  const Questions& ask = Ask();
  const int64_t nbytes = Integer(ask.storage_nbytes(storage));
  return nbytes > 0 && Integer(ask.nbytes(saved)) == nbytes && Truth(ask.is_contiguous(saved)) &&
         Truth(ask.is_contiguous(live)) && Truth(ask.is_conj(saved)) == Truth(ask.is_conj(live)) &&
         Truth(ask.is_neg(saved)) == Truth(ask.is_neg(live));
}

// (identities, storages, offsets, whole): see _engine.pyi.
py::tuple LookAtLandings(const py::list& saved, const py::list& live) {
  if (saved.size() != live.size()) throw py::value_error("saved and live differ in length");
  const Questions& ask = Ask();
  py::list identities, storages, offsets;
  std::string whole;
  whole.reserve(saved.size());
  const Prefetch prefetch_saved(saved), prefetch_live(live);
  for (size_t i = 0; i < saved.size(); ++i) {
    prefetch_saved(i);
    prefetch_live(i);
    const py::handle from = PyList_GET_ITEM(saved.ptr(), i), to = PyList_GET_ITEM(live.ptr(), i);
    const py::object storage = ask.untyped_storage(from);
    identities.append(ask.cdata(storage));
    storages.append(ask.untyped_storage(to));
    offsets.append(Integer(ask.storage_offset(to)) * Integer(ask.element_size(to)));
    whole.push_back(ShowWhole(from, to, storage));
  }
  return py::make_tuple(identities, storages, offsets, py::bytes(whole));
}

// One level of nesting; throws RecursionError if there are too many.
class Deeper {
 public:
  Deeper() {
    if (Py_EnterRecursiveCall(" while looking for tensors") != 0) throw py::error_already_set();
  }
  ~Deeper() { Py_LeaveRecursiveCall(); }
  Deeper(const Deeper&) = delete;
};

// Appends the tensors in `value`, and instances of subclasses to a list of their own. Runs no Python code, which could
// change the containers.
void Collect(PyObject* value, py::list& tensors, py::list& of_subclasses) {
  const bool is_plain = IsOfTorch(value);
  if (is_plain || IsTensor(value)) return (is_plain ? tensors : of_subclasses).append(py::handle(value));
  const bool is_dict = PyDict_Check(value);
  if (!is_dict && !PyList_Check(value) && !PyTuple_Check(value)) return;
  const Deeper deeper;
  Py_ssize_t at = 0;
  if (is_dict) {
    for (PyObject* item = nullptr; PyDict_Next(value, &at, nullptr, &item) != 0;) Collect(item, tensors, of_subclasses);
  } else {
    for (; at < PySequence_Fast_GET_SIZE(value); ++at)
      Collect(PySequence_Fast_GET_ITEM(value, at), tensors, of_subclasses);
  }
}

// Whether a tensor of a subclass holds other tensors instead of memory, and can name them.
bool IsWrapper(py::handle tensor) {
  if (!py::hasattr(py::type::handle_of(tensor), Ask().flatten)) return false;
  const py::object address = Ask().data_ptr.IfPlain(tensor);
  return !address || !Truth(address);
}

// The tensor inside a DTensor; no object if that is a wrapper, too, or for any other wrapper.
py::object LocalTensor(py::handle wrapper) {
  py::object local = py::getattr(wrapper, Ask().local_tensor, py::none());
  return IsOfTorch(local) ? local : py::object();
}

// What was seen of the tensors in a tree. Holds none of them.
struct Seen {
  struct Tensor {
    const void* object;
    const void* storage;
    int64_t nbytes;  // of the storage
    uintptr_t data;
    int device;
    bool requires_grad, is_inference, is_whole;
    bool operator==(const Tensor&) const = default;
  };
  std::vector<Tensor> tensors{};
  std::vector<int64_t> geometry{};  // of those that are not whole

  bool operator==(const Seen&) const = default;

  void Add(py::handle tensor, const TensorFacts& facts) {
    const bool is_whole = facts.fills_storage() && !facts.is_inference;
    tensors.push_back({tensor.ptr(), facts.storage, facts.storage_nbytes, facts.data, facts.device, facts.requires_grad,
                       facts.is_inference, is_whole});
    if (is_whole) return;
    geometry.insert(geometry.end(), {facts.itemsize, facts.offset, static_cast<int64_t>(facts.sizes.size())});
    geometry.insert(geometry.end(), facts.sizes.begin(), facts.sizes.end());
    geometry.insert(geometry.end(), facts.strides.begin(), facts.strides.end());
  }

  bool IsOnHost() const {
    return std::all_of(tensors.begin(), tensors.end(), [](const Tensor& t) { return t.device == kOnHost; });
  }
  py::list Identities() const {
    py::list identities;
    for (const Tensor& t : tensors) identities.append(py::int_(reinterpret_cast<uintptr_t>(t.storage)));
    return identities;
  }
  py::list Sizes() const {
    py::list sizes;
    for (const Tensor& t : tensors) sizes.append(py::int_(t.nbytes));
    return sizes;
  }
  py::bytes Whole() const {
    std::string whole;
    for (const Tensor& t : tensors) whole.push_back(t.is_whole);
    return whole;
  }
};

// (tensors, seen, wrappers): see _engine.pyi.
py::tuple StoragesIn(const py::object& tree, bool inside_dtensors) {
  py::list found, of_subclasses, wrappers, tensors;
  Collect(tree.ptr(), found, of_subclasses);
  for (const py::handle tensor : of_subclasses) {
    const bool is_wrapper = IsWrapper(tensor);
    const py::object local = is_wrapper && inside_dtensors ? LocalTensor(tensor) : py::object();
    (is_wrapper && !local ? wrappers : found).append(local ? local : tensor);
  }
  Seen seen;
  seen.tensors.reserve(found.size());
  TensorReader reader;
  TensorFacts facts;
  const Prefetch prefetch(found);
  for (size_t i = 0; i < found.size(); ++i) {
    prefetch(i);
    const py::handle tensor = PyList_GET_ITEM(found.ptr(), i);
    if (!reader.Read(tensor, &facts)) continue;
    seen.Add(tensor, facts);
    tensors.append(tensor);
  }
  return py::make_tuple(std::move(tensors), std::move(seen), std::move(wrappers));
}

}  // namespace

void DefineTensors(py::module_& m) {
  using namespace pybind11::literals;
  py::class_<Seen>(m, "Seen")
      .def("__eq__", [](const Seen& a, const Seen& b) { return a == b; })
      .def_property_readonly("is_on_host", &Seen::IsOnHost)
      .def_property_readonly("identities", &Seen::Identities)
      .def_property_readonly("sizes", &Seen::Sizes)
      .def_property_readonly("whole", &Seen::Whole);
  m.def("look_at_tensors", &LookAtTensors);
  m.def("spans_of", &SpansOfTensors);
  m.def("look_at_landings", &LookAtLandings);
  m.def("storages_in", &StoragesIn, "tree"_a, "inside_dtensors"_a = false);
  m.def("prefetches_tensors", &PrefetchesTensors);
  m.def("reads_tensors_directly", &TensorReader::IsDirect);
  m.def("ask_tensors_always", &TensorReader::AskAlways);
}

}  // namespace lazyckpt
