#include "python/torch_questions.h"

namespace lazyckpt {

// The GIL guards `all`. A static object would have a lock of its own: a thread that imports torch would hold it,
// release the GIL, and deadlock with a thread that has the GIL and waits for the lock.
const Questions& Ask() {
  static const Questions* all = nullptr;
  if (all == nullptr) {
    const auto* made = new Questions;
    if (all == nullptr) all = made;  // otherwise another thread was faster
  }
  return *all;
}

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

}  // namespace lazyckpt
