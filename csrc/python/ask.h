// Asks objects of torch by the names of Python attributes, at native speed: nothing here knows torch's binary
// interface. Everything needs the GIL and throws what Python raises.
#pragma once

#include <cstdint>

#include "python/engine_handle.h"

namespace lazyckpt {

inline bool Truth(const py::object& object) {
  const int truth = PyObject_IsTrue(object.ptr());
  if (truth < 0) throw py::error_already_set();
  return truth != 0;
}

// Much faster than a cast by pybind11.
inline int64_t Integer(py::handle object) {
  const int64_t value = PyLong_AsLongLong(object.ptr());
  if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

struct TensorType {
  py::object type = py::module_::import("torch").attr("Tensor");
};

inline bool IsTensor(PyObject* object) {
  return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(TheOnly<TensorType>().type.ptr())) != 0;
}

// An attribute of a class, or a method without arguments. Looked up once, since that takes as long as asking.
class Question {
 public:
  Question(const py::object& type, const char* name)
      : found_(type.attr(name)),
        get_(PyCallable_Check(found_.ptr()) != 0 ? nullptr : Py_TYPE(found_.ptr())->tp_descr_get) {}

  py::object operator()(py::handle object) const {
    PyObject* const asked = object.ptr();
    if (get_ != nullptr) return Returned(get_(found_.ptr(), asked, nullptr));
    return Returned(PyObject_Vectorcall(found_.ptr(), &asked, 1, nullptr));
  }

  // No object if there is no answer, as sparse tensors have no storage and nested ones no shape.
  py::object IfPlain(py::handle tensor) const {
    try {
      return (*this)(tensor);
    } catch (const py::error_already_set& error) {
      if (!error.matches(PyExc_RuntimeError)) throw;  // NotImplementedError is one
      return {};
    }
  }

 private:
  py::object found_;
  descrgetfunc get_;  // of an attribute
};

}  // namespace lazyckpt
