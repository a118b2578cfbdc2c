// Loads the next tensors of a list into the cache while this one is asked.
#pragma once

#include <Python.h>

namespace lazyckpt {

// Training has emptied the caches since the last save, and tensors lie anywhere in memory. Only for speed. Needs the
// GIL; the list must outlive it.
class Prefetch {
 public:
  explicit Prefetch(PyObject* tensors);
  static bool Works();                    // whether the parts of a tensor were found in this torch
  void operator()(Py_ssize_t now) const;  // the tensor `now` is about to be asked

 private:
  PyObject* At(Py_ssize_t at) const { return at < PyList_GET_SIZE(tensors_) ? PyList_GET_ITEM(tensors_, at) : nullptr; }
  const void* ImplementationOf(PyObject* object) const;

  PyObject* tensors_;
};

}  // namespace lazyckpt
