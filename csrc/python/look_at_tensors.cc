// LookAtTensors: what a pickle says of tensors, in one pass.
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "python/prefetch.h"
#include "python/tensors.h"
#include "python/torch_questions.h"

namespace lazyckpt {
namespace {

struct NotPlain {};

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
  const Prefetch prefetch(tensors);
  for (Py_ssize_t i = 0; i < count && i < PyList_GET_SIZE(tensors); ++i) {
    prefetch(i);
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
    looks.push_back(static_cast<int64_t>(reinterpret_cast<uintptr_t>(dtype.get())));  // dtypes live forever
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

}  // namespace lazyckpt
