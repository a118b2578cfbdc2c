// What save() asks of every tensor, in one native pass: with tens of thousands of tensors, a Python pass for each
// question would load each tensor into the cache a dozen times. Both functions need the GIL and return nullptr with a
// Python error set if a question fails.
#pragma once

#include <Python.h>

namespace lazyckpt {

// Describes a list of tensors: (description, storages). The description is bytes that are equal if and only if a pickle
// says the same of the tensors, apart from their bytes and the keys of their storages. The storages are a dict by
// _cdata. Returns None if a tensor is not plain: it has attributes of its own or hooks, is nested, sparse, negated or
// conjugated, or is neither on a CPU nor on CUDA.
PyObject* LookAtTensors(PyObject* tensors);

// Finds the tensors that have a storage in dicts, lists and tuples, at any depth: (tensors, identities, sizes, whole,
// wrappers). For each tensor: the _cdata of its storage, its bytes, and 1 if the tensor is contiguous, fills its
// storage and is no inference tensor, otherwise 0. `wrappers` are the wrapper subclasses, which hold other tensors
// instead of memory and have a method __tensor_flatten__.
PyObject* StoragesIn(PyObject* tree);

}  // namespace lazyckpt
