#include "python/tensors.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <vector>

namespace lazyckpt {
namespace {

struct DecRef {
  void operator()(PyObject* object) const { Py_DECREF(object); }
};
using Ref = std::unique_ptr<PyObject, DecRef>;

struct PythonError {};  // a Python error is set
struct NotPlain {};

Ref Own(PyObject* object) {
  if (object == nullptr) throw PythonError();
  return Ref(object);
}

PyObject* Named(PyObject* object, const char* name) { return Own(PyObject_GetAttrString(object, name)).release(); }

// An attribute of a class, or a method without arguments, found once: to look it up takes as long as to ask it.
class Question {
 public:
  Question(PyObject* type, const char* name)
      : found_(Named(type, name)), get_(PyCallable_Check(found_) != 0 ? nullptr : Py_TYPE(found_)->tp_descr_get) {}

  Ref operator()(PyObject* object) const {
    if (get_ != nullptr) return Own(get_(found_, object, nullptr));
    return Own(PyObject_Vectorcall(found_, &object, 1, nullptr));
  }

 private:
  PyObject* found_;   // for good, as its class
  descrgetfunc get_;  // of an attribute
};

struct Questions {
  PyObject* torch = Own(PyImport_ImportModule("torch")).release();
  PyObject* dict = Own(PyUnicode_InternFromString("__dict__")).release();
  PyObject* flatten = Own(PyUnicode_InternFromString("__tensor_flatten__")).release();

  PyObject* storage = Named(torch, "UntypedStorage");
  Question cdata{storage, "_cdata"};
  Question storage_nbytes{storage, "nbytes"};

  PyObject* parameter = Named(Own(PyImport_ImportModule("torch.nn")).get(), "Parameter");
  PyObject* tensor = Named(torch, "Tensor");
  Question backward_hooks{tensor, "_backward_hooks"};
  Question data_ptr{tensor, "data_ptr"};
  Question dtype{tensor, "dtype"};
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

// The GIL guards it. A static object would have a lock of its own, held by a thread that imports and may let go of the
// GIL meanwhile, and waited for by another one that has the GIL.
const Questions& Ask() {
  static const Questions* all = nullptr;
  if (all == nullptr) {
    const auto* made = new Questions;
    if (all == nullptr) all = made;  // else another thread was quicker
  }
  return *all;
}

uintptr_t WordAt(const void* address, size_t offset) {
  uintptr_t word = 0;
  std::memcpy(&word, static_cast<const char*>(address) + offset, sizeof word);
  return word;
}

// Where a tensor has the address of its implementation, and that the one of its storage: looked for in one of this
// torch, since nobody promises it. 0 if it is not found.
struct Anatomy {
  Anatomy() {
    try {
      const Ref tensor = Own(PyObject_CallNoArgs(Ask().tensor));
      const uintptr_t found = Address(Own(PyObject_GetAttrString(tensor.get(), "_cdata")));
      implementation = Find(tensor.get(), static_cast<size_t>(Py_TYPE(tensor.get())->tp_basicsize), found);
      if (implementation == 0) return;
      constexpr size_t kHead = 64;  // bytes; an implementation has three times as many
      const uintptr_t storage = Address(Ask().cdata(Ask().untyped_storage(tensor.get()).get()));
      in_implementation = Find(reinterpret_cast<const void*>(found), kHead, storage);
    } catch (const PythonError&) {
      PyErr_Clear();
    }
  }

  static uintptr_t Address(const Ref& number) {
    void* address = PyLong_AsVoidPtr(number.get());
    if (address == nullptr && PyErr_Occurred() != nullptr) throw PythonError();
    return reinterpret_cast<uintptr_t>(address);
  }

  static size_t Find(const void* object, size_t size, uintptr_t wanted) {
    if (wanted == 0) return 0;
    for (size_t at = sizeof(void*); at + sizeof wanted <= size; at += sizeof wanted)
      if (WordAt(object, at) == wanted) return at;
    return 0;
  }

  size_t implementation = 0;
  size_t in_implementation = 0;
};

// Has the next tensors of a list brought into the cache while this one is asked: a training has emptied it since the
// last save, and they lie anywhere. Changes no answer.
class Ahead {
 public:
  explicit Ahead(PyObject* tensors) : tensors_(tensors) {}

  void operator()(Py_ssize_t now) const {
    if (PyObject* object = At(now + 3 * kStep); object != nullptr) Fetch(object, 1);
    if (const void* implementation = ImplementationOf(At(now + 2 * kStep)); implementation != nullptr)
      Fetch(implementation, 4);
    if (const void* implementation = ImplementationOf(At(now + kStep));
        implementation != nullptr && parts_.in_implementation != 0)
      Fetch(reinterpret_cast<const void*>(WordAt(implementation, parts_.in_implementation)), 2);
  }

 private:
  static constexpr Py_ssize_t kStep = 4;

  PyObject* At(Py_ssize_t at) const { return at < PyList_GET_SIZE(tensors_) ? PyList_GET_ITEM(tensors_, at) : nullptr; }

  const void* ImplementationOf(PyObject* object) const {
    const bool known = object != nullptr && parts_.implementation != 0 &&
                       PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(Ask().tensor));
    return known ? reinterpret_cast<const void*>(WordAt(object, parts_.implementation)) : nullptr;
  }

  static void Fetch(const void* address, int lines) {
    for (int line = 0; line < lines; ++line) __builtin_prefetch(static_cast<const char*>(address) + 64 * line);
  }

  static const Anatomy& Parts() {
    static const Anatomy* parts = nullptr;  // as Ask() has it
    if (parts == nullptr) parts = new Anatomy;
    return *parts;
  }

  PyObject* tensors_;
  const Anatomy& parts_ = Parts();
};

int64_t Integer(const Ref& object) {
  const int64_t value = PyLong_AsLongLong(object.get());
  if (value == -1 && PyErr_Occurred() != nullptr) throw PythonError();
  return value;
}

bool Truth(const Ref& object) {
  const int truth = PyObject_IsTrue(object.get());
  if (truth < 0) throw PythonError();
  return truth != 0;
}

// nullptr where there is no answer: sparse tensors have no storage, nested ones no shape.
Ref IfPlain(const Question& question, PyObject* tensor) {
  try {
    return question(tensor);
  } catch (const PythonError&) {
  }
  if (PyErr_ExceptionMatches(PyExc_NotImplementedError) == 0 && PyErr_ExceptionMatches(PyExc_RuntimeError) == 0)
    throw PythonError();
  PyErr_Clear();
  return nullptr;
}

void AppendIntegers(const Ref& tuple, std::vector<int64_t>* out) {
  if (!PyTuple_Check(tuple.get())) {
    PyErr_SetString(PyExc_TypeError, "expected the shape or the strides of a tensor");
    throw PythonError();
  }
  const Py_ssize_t size = PyTuple_GET_SIZE(tuple.get());
  for (Py_ssize_t i = 0; i < size; ++i) {
    const int64_t value = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.get(), i));
    if (value == -1 && PyErr_Occurred() != nullptr) throw PythonError();
    out->push_back(value);
  }
}

bool IsPlain(PyObject* tensor, bool is_complex) {
  const Questions& ask = Ask();
  return !Truth(Own(PyObject_GetAttr(tensor, ask.dict))) && !Truth(ask.backward_hooks(tensor)) &&
         !Truth(ask.is_neg(tensor)) && !(is_complex && Truth(ask.is_conj(tensor)));
}

int64_t DeviceOf(PyObject* tensor) {
  if (Truth(Ask().is_cpu(tensor))) return -1;
  if (Truth(Ask().is_cuda(tensor))) return Integer(Ask().get_device(tensor));
  throw NotPlain();
}

Ref Look(PyObject* tensors) {
  const Questions& ask = Ask();
  Ref storages = Own(PyDict_New());
  std::unordered_map<int64_t, int64_t> positions;
  std::vector<int64_t> looks;
  const Py_ssize_t count = PyList_GET_SIZE(tensors);
  positions.reserve(static_cast<size_t>(count));
  looks.reserve(static_cast<size_t>(count) * 10);
  const PyObject* last_dtype = nullptr;
  bool is_complex = false;
  const Ahead ahead(tensors);
  for (Py_ssize_t i = 0; i < count && i < PyList_GET_SIZE(tensors); ++i) {
    ahead(i);
    const Ref held(Py_NewRef(PyList_GET_ITEM(tensors, i)));
    PyObject* tensor = held.get();
    const Ref dtype = ask.dtype(tensor);
    const Ref storage = IfPlain(ask.untyped_storage, tensor);
    if (storage == nullptr) throw NotPlain();
    if (dtype.get() != last_dtype) {
      last_dtype = dtype.get();
      is_complex = Truth(Own(PyObject_GetAttrString(dtype.get(), "is_complex")));
    }
    if (!IsPlain(tensor, is_complex)) throw NotPlain();
    const Ref identity = ask.cdata(storage.get());
    const auto [known, is_new] = positions.try_emplace(Integer(identity), positions.size());
    looks.push_back(known->second);
    if (is_new) {
      if (PyDict_SetItem(storages.get(), identity.get(), storage.get()) < 0) throw PythonError();
      looks.push_back(DeviceOf(tensor));
      looks.push_back(Integer(ask.storage_nbytes(storage.get())));
    }
    looks.push_back(static_cast<int64_t>(reinterpret_cast<uintptr_t>(dtype.get())));  // a dtype lives forever
    looks.push_back(Truth(ask.requires_grad(tensor)));
    looks.push_back(Integer(ask.storage_offset(tensor)));
    const Ref shape = IfPlain(ask.shape, tensor);
    if (shape == nullptr) throw NotPlain();
    looks.push_back(PyTuple_Size(shape.get()));
    AppendIntegers(shape, &looks);
    AppendIntegers(ask.stride(tensor), &looks);
  }
  const Ref bytes = Own(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(looks.data()),
                                                  static_cast<Py_ssize_t>(looks.size() * sizeof looks[0])));
  return Own(PyTuple_Pack(2, bytes.get(), storages.get()));
}

// One level more of what may be nested without end. RecursionError where it is too many.
class Deeper {
 public:
  Deeper() {
    if (Py_EnterRecursiveCall(" while looking for tensors") != 0) throw PythonError();
  }
  ~Deeper() { Py_LeaveRecursiveCall(); }
  Deeper(const Deeper&) = delete;
  Deeper& operator=(const Deeper&) = delete;
};

// Appends the tensors in `value`, subclass instances to a list of their own. Runs no Python code: it could change the
// containers meanwhile.
void Collect(PyObject* value, PyObject* tensors, PyObject* of_subclasses) {
  const Questions& ask = Ask();
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(value));
  const bool is_plain = type == ask.tensor || type == ask.parameter;
  if (is_plain || PyObject_TypeCheck(value, reinterpret_cast<PyTypeObject*>(ask.tensor))) {
    if (PyList_Append(is_plain ? tensors : of_subclasses, value) < 0) throw PythonError();
    return;
  }
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
bool IsWrapper(PyObject* tensor) {
  const Questions& ask = Ask();
  if (PyObject_HasAttr(reinterpret_cast<PyObject*>(Py_TYPE(tensor)), ask.flatten) == 0) return false;
  const Ref address = IfPlain(ask.data_ptr, tensor);
  return address == nullptr || !Truth(address);
}

Ref Storages(PyObject* tree) {
  const Questions& ask = Ask();
  const Ref found = Own(PyList_New(0));
  Ref of_subclasses = Own(PyList_New(0));
  Ref wrappers = Own(PyList_New(0));
  Collect(tree, found.get(), of_subclasses.get());
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(of_subclasses.get()); ++i) {
    PyObject* tensor = PyList_GET_ITEM(of_subclasses.get(), i);
    if (PyList_Append(IsWrapper(tensor) ? wrappers.get() : found.get(), tensor) < 0) throw PythonError();
  }
  const Py_ssize_t count = PyList_GET_SIZE(found.get());
  Ref tensors = Own(PyList_New(0));
  Ref identities = Own(PyList_New(0));
  Ref sizes = Own(PyList_New(0));
  std::vector<char> whole;
  whole.reserve(static_cast<size_t>(count));
  const Ahead ahead(found.get());
  for (Py_ssize_t i = 0; i < count; ++i) {
    ahead(i);
    PyObject* tensor = PyList_GET_ITEM(found.get(), i);
    const Ref storage = IfPlain(ask.untyped_storage, tensor);
    if (storage == nullptr) continue;
    const Ref identity = ask.cdata(storage.get());
    const Ref size = ask.storage_nbytes(storage.get());
    const bool fills = Integer(ask.nbytes(tensor)) == Integer(size) && Truth(ask.is_contiguous(tensor));
    whole.push_back(fills && !Truth(ask.is_inference(tensor)));
    if (PyList_Append(tensors.get(), tensor) < 0) throw PythonError();
    if (PyList_Append(identities.get(), identity.get()) < 0) throw PythonError();
    if (PyList_Append(sizes.get(), size.get()) < 0) throw PythonError();
  }
  const Ref bytes = Own(PyBytes_FromStringAndSize(whole.data(), static_cast<Py_ssize_t>(whole.size())));
  return Own(PyTuple_Pack(5, tensors.get(), identities.get(), sizes.get(), bytes.get(), wrappers.get()));
}

}  // namespace

PyObject* LookAtTensors(PyObject* tensors) {
  if (!PyList_Check(tensors)) {
    PyErr_SetString(PyExc_TypeError, "expected a list of tensors");
    return nullptr;
  }
  try {
    return Look(tensors).release();
  } catch (const PythonError&) {
    return nullptr;
  } catch (const NotPlain&) {
    Py_RETURN_NONE;
  }
}

PyObject* StoragesIn(PyObject* tree) {
  try {
    return Storages(tree).release();
  } catch (const PythonError&) {
    return nullptr;
  }
}

}  // namespace lazyckpt
