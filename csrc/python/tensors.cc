// What save() and restore() ask of every tensor. With tens of thousands of tensors, a Python pass for each question
// would load each tensor into the cache a dozen times, so one native pass asks all of them. Everything needs the GIL.
#include <cstdint>
#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "python/ask.h"

namespace lazyckpt {
namespace {

struct Questions {
  py::object torch = py::module_::import("torch");
  py::object dict = Returned(PyUnicode_InternFromString("__dict__"));
  py::object flatten = Returned(PyUnicode_InternFromString("__tensor_flatten__"));
  py::object local_tensor = Returned(PyUnicode_InternFromString("_local_tensor"));

  py::object storage = torch.attr("UntypedStorage");
  Question cdata{storage, "_cdata"};
  Question storage_nbytes{storage, "nbytes"};

  py::object parameter = py::module_::import("torch.nn").attr("Parameter");
  py::object tensor = torch.attr("Tensor");
  Question backward_hooks{tensor, "_backward_hooks"};
  Question data_ptr{tensor, "data_ptr"};
  Question dtype{tensor, "dtype"};
  Question element_size{tensor, "element_size"};
  Question get_device{tensor, "get_device"};
  Question is_conj{tensor, "is_conj"};
  Question is_contiguous{tensor, "is_contiguous"};
  Question is_cpu{tensor, "is_cpu"};
  Question is_cuda{tensor, "is_cuda"};
  Question is_inference{tensor, "is_inference"};
  Question is_neg{tensor, "is_neg"};
  Question nbytes{tensor, "nbytes"};
  Question requires_grad{tensor, "requires_grad"};
  Question shape{tensor, "shape"};
  Question storage_offset{tensor, "storage_offset"};
  Question stride{tensor, "stride"};
  Question untyped_storage{tensor, "untyped_storage"};
};

const Questions& Ask() { return TheOnly<Questions>(); }

uintptr_t WordAt(const void* address, size_t offset) {
  uintptr_t word = 0;
  std::memcpy(&word, static_cast<const char*>(address) + offset, sizeof word);
  return word;
}

size_t Find(const void* object, size_t size, uintptr_t wanted) {
  for (size_t at = sizeof(void*); wanted != 0 && at + sizeof wanted <= size; at += sizeof wanted)
    if (WordAt(object, at) == wanted) return at;
  return 0;
}

// The offset of the implementation's address in a tensor, and of the storage's address in the implementation. Torch
// promises neither, so they are searched for in one tensor; 0 if not found.
struct Anatomy {
  size_t implementation = 0;
  size_t in_implementation = 0;

  Anatomy() {
    try {
      const py::object tensor = Ask().tensor();
      const auto found = tensor.attr("_cdata").cast<uintptr_t>();
      implementation = Find(tensor.ptr(), static_cast<size_t>(Py_TYPE(tensor.ptr())->tp_basicsize), found);
      if (implementation == 0) return;
      constexpr size_t kHead = 64;  // bytes; an implementation is three times as large
      const auto storage = Ask().cdata(Ask().untyped_storage(tensor)).cast<uintptr_t>();
      in_implementation = Find(reinterpret_cast<const void*>(found), kHead, storage);
    } catch (const std::exception&) {  // another torch: without prefetching
    }
  }
};

void Fetch(const void* address, int lines) {
  for (int line = 0; line < lines; ++line) __builtin_prefetch(static_cast<const char*>(address) + 64 * line);
}

// Loads the next tensors of a list into the cache while this one is asked: training has emptied the caches since the
// last save, and tensors lie anywhere in memory. Only for speed.
class Prefetch {
 public:
  explicit Prefetch(const py::list& tensors) : tensors_(tensors.ptr()) {}

  void operator()(size_t now) const {  // the tensor `now` is about to be asked
    constexpr size_t kStep = 4;        // tensors
    if (parts_.in_implementation == 0) return;
    if (const void* object = At(now + 3 * kStep); object != nullptr) Fetch(object, 1);
    if (const void* implementation = ImplementationAt(now + 2 * kStep); implementation != nullptr)
      Fetch(implementation, 4);
    if (const void* implementation = ImplementationAt(now + kStep); implementation != nullptr)
      Fetch(reinterpret_cast<const void*>(WordAt(implementation, parts_.in_implementation)), 2);
  }

 private:
  PyObject* At(size_t at) const {
    return at < static_cast<size_t>(PyList_GET_SIZE(tensors_)) ? PyList_GET_ITEM(tensors_, at) : nullptr;
  }
  const void* ImplementationAt(size_t at) const {
    PyObject* const object = At(at);
    if (object == nullptr || !IsTensor(object)) return nullptr;
    return reinterpret_cast<const void*>(WordAt(object, parts_.implementation));
  }

  PyObject* tensors_;
  const Anatomy& parts_ = TheOnly<Anatomy>();
};

bool IsPlain(py::handle tensor, bool is_complex) {
  const Questions& ask = Ask();
  return !Truth(Returned(PyObject_GetAttr(tensor.ptr(), ask.dict.ptr()))) && !Truth(ask.backward_hooks(tensor)) &&
         !Truth(ask.is_neg(tensor)) && !(is_complex && Truth(ask.is_conj(tensor)));
}

void AppendIntegers(const py::tuple& tuple, std::vector<int64_t>* out) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple.ptr()); ++i)
    out->push_back(Integer(PyTuple_GET_ITEM(tuple.ptr(), i)));
}

// (description, storages by _cdata): see _engine.pyi.
std::optional<std::pair<py::bytes, py::dict>> LookAtTensors(const py::list& tensors) {
  const Questions& ask = Ask();
  py::dict storages;
  std::unordered_map<int64_t, int64_t> positions;
  std::vector<int64_t> looks;
  positions.reserve(tensors.size());
  looks.reserve(tensors.size() * 10);
  const PyObject* last_dtype = nullptr;
  bool is_complex = false;
  const Prefetch prefetch(tensors);
  for (size_t i = 0; i < tensors.size(); ++i) {
    prefetch(i);
    const auto tensor = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(tensors.ptr(), i));
    const py::object dtype = ask.dtype(tensor);
    const py::object storage = ask.untyped_storage.IfPlain(tensor);
    if (!storage) return std::nullopt;
    if (dtype.ptr() != last_dtype) {
      last_dtype = dtype.ptr();
      is_complex = Truth(dtype.attr("is_complex"));
    }
    if (!IsPlain(tensor, is_complex)) return std::nullopt;
    const py::object identity = ask.cdata(storage);
    const auto [known, is_new] = positions.try_emplace(Integer(identity), positions.size());
    looks.push_back(known->second);
    if (is_new) {
      if (PyDict_SetItem(storages.ptr(), identity.ptr(), storage.ptr()) < 0) throw py::error_already_set();
      const bool on_host = Truth(ask.is_cpu(tensor));
      if (!on_host && !Truth(ask.is_cuda(tensor))) return std::nullopt;
      looks.push_back(on_host ? -1 : Integer(ask.get_device(tensor)));
      looks.push_back(Integer(ask.storage_nbytes(storage)));
    }
    looks.push_back(static_cast<int64_t>(reinterpret_cast<uintptr_t>(dtype.ptr())));  // dtypes live forever
    looks.push_back(Truth(ask.requires_grad(tensor)));
    looks.push_back(Integer(ask.storage_offset(tensor)));
    const py::object shape = ask.shape.IfPlain(tensor);
    if (!shape) return std::nullopt;
    looks.push_back(static_cast<int64_t>(py::len(shape)));
    AppendIntegers(shape, &looks);
    AppendIntegers(ask.stride(tensor), &looks);
  }
  return std::pair(py::bytes(reinterpret_cast<const char*>(looks.data()), looks.size() * sizeof looks[0]), storages);
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

bool IsOfTorch(py::handle object) {
  const py::handle type(reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())));
  return type.is(Ask().tensor) || type.is(Ask().parameter);
}

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

// (tensors, identities, sizes, whole, wrappers): see _engine.pyi.
py::tuple StoragesIn(const py::object& tree, bool inside_dtensors) {
  const Questions& ask = Ask();
  py::list found, of_subclasses, wrappers, tensors, identities, sizes;
  Collect(tree.ptr(), found, of_subclasses);
  for (const py::handle tensor : of_subclasses) {
    const bool is_wrapper = IsWrapper(tensor);
    const py::object local = is_wrapper && inside_dtensors ? LocalTensor(tensor) : py::object();
    (is_wrapper && !local ? wrappers : found).append(local ? local : tensor);
  }
  std::string whole;
  whole.reserve(found.size());
  const Prefetch prefetch(found);
  for (size_t i = 0; i < found.size(); ++i) {
    prefetch(i);
    const py::handle tensor = PyList_GET_ITEM(found.ptr(), i);
    const py::object storage = ask.untyped_storage.IfPlain(tensor);
    if (!storage) continue;
    const py::object size = ask.storage_nbytes(storage);
    const bool fills = Integer(ask.nbytes(tensor)) == Integer(size) && Truth(ask.is_contiguous(tensor));
    whole.push_back(fills && !Truth(ask.is_inference(tensor)));
    tensors.append(tensor);
    identities.append(ask.cdata(storage));
    sizes.append(size);
  }
  return py::make_tuple(tensors, identities, sizes, py::bytes(whole), wrappers);
}

}  // namespace

void DefineTensors(py::module_& m) {
  using namespace pybind11::literals;
  m.def("look_at_tensors", &LookAtTensors);
  m.def("look_at_landings", &LookAtLandings);
  m.def("storages_in", &StoragesIn, "tree"_a, "inside_dtensors"_a = false);
  m.def("prefetches_tensors", [] { return TheOnly<Anatomy>().in_implementation != 0; });
}

}  // namespace lazyckpt
