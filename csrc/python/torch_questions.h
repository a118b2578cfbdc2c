// Questions to torch's tensors and storages, asked by the names of their Python attributes: nothing here knows torch's
// binary interface. Every function needs the GIL.
#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>

namespace lazyckpt {

struct DecRef {
  void operator()(PyObject* object) const { Py_DECREF(object); }
};
using Ref = std::unique_ptr<PyObject, DecRef>;

struct PythonError {};  // thrown while a Python error is set

// Takes a new reference; throws PythonError if there is none.
inline Ref Own(PyObject* object) {
  if (object == nullptr) throw PythonError();
  return Ref(object);
}

int64_t Integer(const Ref& object);
bool Truth(const Ref& object);

// An attribute of a class, or a method without arguments. Looked up once, since that takes as long as asking.
class Question {
 public:
  Question(PyObject* type, const char* name)
      : found_(Own(PyObject_GetAttrString(type, name)).release()),
        get_(PyCallable_Check(found_) != 0 ? nullptr : Py_TYPE(found_)->tp_descr_get) {}

  Ref operator()(PyObject* object) const {
    if (get_ != nullptr) return Own(get_(found_, object, nullptr));
    return Own(PyObject_Vectorcall(found_, &object, 1, nullptr));
  }

 private:
  PyObject* found_;   // never released, like its class
  descrgetfunc get_;  // of an attribute
};

struct Questions {
  PyObject* torch = Own(PyImport_ImportModule("torch")).release();
  PyObject* dict = Own(PyUnicode_InternFromString("__dict__")).release();
  PyObject* flatten = Own(PyUnicode_InternFromString("__tensor_flatten__")).release();

  PyObject* storage = Own(PyObject_GetAttrString(torch, "UntypedStorage")).release();
  Question cdata{storage, "_cdata"};
  Question storage_nbytes{storage, "nbytes"};

  PyObject* parameter =
      Own(PyObject_GetAttrString(Own(PyImport_ImportModule("torch.nn")).get(), "Parameter")).release();
  PyObject* tensor = Own(PyObject_GetAttrString(torch, "Tensor")).release();
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

// The questions of the process, made once.
const Questions& Ask();

// Asks a tensor; nullptr if it has no answer, as sparse tensors have no storage and nested ones no shape.
Ref IfPlain(const Question& question, PyObject* tensor);

}  // namespace lazyckpt
