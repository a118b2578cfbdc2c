// What save() asks of every tensor, asked of all of them in one native pass: with tens of thousands of tensors, a pass
// in Python for each question brings each tensor through the cache a dozen times. Knows torch by the names of the
// Python attributes of its tensors, and nothing of its binary interface.
#pragma once

#include <Python.h>

namespace lazyckpt {

// Of a list of tensors: all that a pickle says of them besides their bytes and their storages' keys, as bytes that are
// equal if and only if that is equal; and their storages, each once, in a dict by _cdata. None if one of them is not
// plain (has attributes of its own, hooks, is nested, sparse, negated or conjugated, or is neither on a CPU nor on
// CUDA). nullptr with a Python error set if a question fails.
PyObject* LookAtTensors(PyObject* tensors);

// Of the tensors that have a storage, however deep they are in dicts, lists and tuples: these tensors, as a list; the
// _cdata of their storages, as a list; the sizes of these in bytes, as a list; and as bytes, 1 for a tensor that is
// contiguous, fills its storage and is no inference tensor, 0 for others. Last, as a list, the wrapper subclasses: they
// hold other tensors instead of memory and have a method __tensor_flatten__. nullptr with a Python error set if a
// question fails.
PyObject* StoragesIn(PyObject* tree);

}  // namespace lazyckpt
