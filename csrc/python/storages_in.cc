// StoragesIn: the tensors in a tree of containers, and their storages.
#include <vector>

#include "python/prefetch.h"
#include "python/tensors.h"
#include "python/torch_questions.h"

namespace lazyckpt {
namespace {

// One level of nesting; throws RecursionError if there are too many.
class Deeper {
 public:
  Deeper() {
    if (Py_EnterRecursiveCall(" while looking for tensors") != 0) throw PythonError();
  }
  ~Deeper() { Py_LeaveRecursiveCall(); }
  Deeper(const Deeper&) = delete;
  Deeper& operator=(const Deeper&) = delete;
};

// Appends the tensors in `value`, and instances of subclasses to a list of their own. Runs no Python code, which could
// change the containers.
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
  const Prefetch prefetch(found.get());
  for (Py_ssize_t i = 0; i < count; ++i) {
    prefetch(i);
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

PyObject* StoragesIn(PyObject* tree) {
  try {
    return Storages(tree).release();
  } catch (const PythonError&) {
    return nullptr;
  }
}

}  // namespace lazyckpt
