#include "tensors.h"

#include <cstdint>
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

// Made once and kept: interned names are looked up by address.
struct Names {
  PyObject* cdata = PyUnicode_InternFromString("_cdata");
  PyObject* dict = PyUnicode_InternFromString("__dict__");
  PyObject* backward_hooks = PyUnicode_InternFromString("_backward_hooks");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* get_device = PyUnicode_InternFromString("get_device");
  PyObject* is_complex = PyUnicode_InternFromString("is_complex");
  PyObject* is_conj = PyUnicode_InternFromString("is_conj");
  PyObject* is_contiguous = PyUnicode_InternFromString("is_contiguous");
  PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
  PyObject* is_cuda = PyUnicode_InternFromString("is_cuda");
  PyObject* is_inference = PyUnicode_InternFromString("is_inference");
  PyObject* is_neg = PyUnicode_InternFromString("is_neg");
  PyObject* is_nested = PyUnicode_InternFromString("is_nested");
  PyObject* nbytes = PyUnicode_InternFromString("nbytes");
  PyObject* requires_grad = PyUnicode_InternFromString("requires_grad");
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* storage_offset = PyUnicode_InternFromString("storage_offset");
  PyObject* stride = PyUnicode_InternFromString("stride");
  PyObject* untyped_storage = PyUnicode_InternFromString("untyped_storage");
};
const Names& names() {
  static const Names all;
  return all;
}

Ref Get(PyObject* object, PyObject* name) { return Own(PyObject_GetAttr(object, name)); }
Ref Call(PyObject* object, PyObject* method) { return Own(PyObject_CallMethodNoArgs(object, method)); }

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

// The storage of a tensor; sparse tensors and wrapper subclasses have none.
Ref StorageOf(PyObject* tensor) {
  PyObject* storage = PyObject_CallMethodNoArgs(tensor, names().untyped_storage);
  if (storage != nullptr) return Ref(storage);
  if (PyErr_ExceptionMatches(PyExc_NotImplementedError) == 0 && PyErr_ExceptionMatches(PyExc_RuntimeError) == 0)
    throw PythonError();
  PyErr_Clear();
  throw NotPlain();
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
  const Names& n = names();
  return !Truth(Get(tensor, n.dict)) && !Truth(Get(tensor, n.backward_hooks)) && !Truth(Get(tensor, n.is_nested)) &&
         !Truth(Call(tensor, n.is_neg)) && !(is_complex && Truth(Call(tensor, n.is_conj)));
}

int64_t DeviceOf(PyObject* tensor) {
  if (Truth(Get(tensor, names().is_cpu))) return -1;
  if (Truth(Get(tensor, names().is_cuda))) return Integer(Call(tensor, names().get_device));
  throw NotPlain();
}

Ref Look(PyObject* tensors) {
  const Names& n = names();
  Ref storages = Own(PyDict_New());
  std::unordered_map<int64_t, int64_t> positions;
  std::vector<int64_t> looks;
  const Py_ssize_t count = PyList_GET_SIZE(tensors);
  looks.reserve(static_cast<size_t>(count) * 10);
  const PyObject* last_dtype = nullptr;
  bool is_complex = false;
  for (Py_ssize_t i = 0; i < count && i < PyList_GET_SIZE(tensors); ++i) {
    const Ref held(Py_NewRef(PyList_GET_ITEM(tensors, i)));
    PyObject* tensor = held.get();
    const Ref dtype = Get(tensor, n.dtype);
    const Ref storage = StorageOf(tensor);
    if (dtype.get() != last_dtype) {
      last_dtype = dtype.get();
      is_complex = Truth(Get(dtype.get(), n.is_complex));
    }
    if (!IsPlain(tensor, is_complex)) throw NotPlain();
    const Ref identity = Get(storage.get(), n.cdata);
    const auto [known, is_new] = positions.try_emplace(Integer(identity), positions.size());
    looks.push_back(known->second);
    if (is_new) {
      if (PyDict_SetItem(storages.get(), identity.get(), storage.get()) < 0) throw PythonError();
      looks.push_back(DeviceOf(tensor));
      looks.push_back(Integer(Call(storage.get(), n.nbytes)));
    }
    looks.push_back(static_cast<int64_t>(reinterpret_cast<uintptr_t>(dtype.get())));  // a dtype lives forever
    looks.push_back(Truth(Get(tensor, n.requires_grad)));
    looks.push_back(Integer(Call(tensor, n.storage_offset)));
    const Ref shape = Get(tensor, n.shape);
    looks.push_back(PyTuple_Size(shape.get()));
    AppendIntegers(shape, &looks);
    AppendIntegers(Call(tensor, n.stride), &looks);
  }
  const Ref bytes = Own(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(looks.data()),
                                                  static_cast<Py_ssize_t>(looks.size() * sizeof looks[0])));
  return Own(PyTuple_Pack(2, bytes.get(), storages.get()));
}

Ref Storages(PyObject* tensors) {
  const Names& n = names();
  const Py_ssize_t count = PyList_GET_SIZE(tensors);
  Ref identities = Own(PyList_New(0));
  Ref sizes = Own(PyList_New(0));
  std::vector<char> whole;
  whole.reserve(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count && i < PyList_GET_SIZE(tensors); ++i) {
    const Ref held(Py_NewRef(PyList_GET_ITEM(tensors, i)));
    PyObject* tensor = held.get();
    const Ref storage = StorageOf(tensor);
    const Ref identity = Get(storage.get(), n.cdata);
    const Ref size = Call(storage.get(), n.nbytes);
    const bool fills = Integer(Get(tensor, n.nbytes)) == Integer(size) && Truth(Call(tensor, n.is_contiguous));
    whole.push_back(fills && !Truth(Call(tensor, n.is_inference)));
    if (PyList_Append(identities.get(), identity.get()) < 0) throw PythonError();
    if (PyList_Append(sizes.get(), size.get()) < 0) throw PythonError();
  }
  const Ref bytes = Own(PyBytes_FromStringAndSize(whole.data(), static_cast<Py_ssize_t>(whole.size())));
  return Own(PyTuple_Pack(3, identities.get(), sizes.get(), bytes.get()));
}

PyObject* Guarded(Ref (*ask)(PyObject*), PyObject* tensors) {
  if (!PyList_Check(tensors)) {
    PyErr_SetString(PyExc_TypeError, "expected a list of tensors");
    return nullptr;
  }
  try {
    return ask(tensors).release();
  } catch (const PythonError&) {
    return nullptr;
  } catch (const NotPlain&) {
    Py_RETURN_NONE;
  }
}

}  // namespace

PyObject* LookAtTensors(PyObject* tensors) { return Guarded(Look, tensors); }
PyObject* StoragesOfTensors(PyObject* tensors) { return Guarded(Storages, tensors); }

}  // namespace lazyckpt
