// The leaves of a state of nested dicts and lists, by path: hundreds of dicts and thousands of leaves at each save().
// Everything needs the GIL and throws what Python raises.
#include <Python.h>

#include "python/ask.h"

namespace lazyckpt {
namespace {

struct Kinds {
  py::object mapping = py::module_::import("collections.abc").attr("Mapping");
};

bool IsOf(PyObject* value, const py::object& type) {
  const int is = PyObject_IsInstance(value, type.ptr());
  if (is < 0) throw py::error_already_set();
  return is != 0;
}

bool IsMapping(PyObject* value) {
  if (PyDict_Check(value)) return true;
  const bool is_simple = value == Py_None || PyLong_Check(value) || PyFloat_Check(value) || PyUnicode_Check(value) ||
                         PyList_Check(value) || PyTuple_Check(value) || IsTensor(value);
  return !is_simple && IsOf(value, TheOnly<Kinds>().mapping);
}

class Collector {
 public:
  explicit Collector(const py::dict& leaves) : leaves_(leaves) {}

  void Collect(const py::tuple& path, PyObject* value) {
    if (Py_EnterRecursiveCall(" while looking for the leaves of a state") != 0) throw py::error_already_set();
    try {
      Descend(path, value);
    } catch (...) {
      Py_LeaveRecursiveCall();
      throw;
    }
    Py_LeaveRecursiveCall();
  }

  py::list objects;  // the paths of leaves that are no tensors

 private:
  void Descend(const py::tuple& path, PyObject* value) {
    if (IsTensor(value)) return Add(path, value);
    if (IsMapping(value)) {
      const py::list items = Returned(PyMapping_Items(value));  // a new list: other threads may change the mapping
      if (AreNamed(items)) {
        for (const py::handle item : items)
          Collect(Below(path, PyTuple_GET_ITEM(item.ptr(), 0)), PyTuple_GET_ITEM(item.ptr(), 1));
        return;
      }
    } else if (PyList_CheckExact(value) && HasContainers(value)) {
      const py::list items = Returned(PyList_GetSlice(value, 0, PyList_GET_SIZE(value)));
      for (size_t at = 0; at < items.size(); ++at)
        Collect(Below(path, py::int_(at).ptr()), PyList_GET_ITEM(items.ptr(), at));
      return;
    }
    objects.append(path);
    Add(path, value);
  }

  static bool AreNamed(const py::list& items) {
    for (const py::handle item : items) {
      const bool is_pair = PyTuple_Check(item.ptr()) && PyTuple_GET_SIZE(item.ptr()) == 2;
      if (!is_pair || !PyUnicode_CheckExact(PyTuple_GET_ITEM(item.ptr(), 0))) return false;
    }
    return !items.empty();
  }

  static bool HasContainers(PyObject* list) {
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(list); ++at) {
      PyObject* const inner = PyList_GET_ITEM(list, at);
      if (PyList_Check(inner) || IsTensor(inner) || IsMapping(inner)) return true;
    }
    return false;
  }

  static py::tuple Below(const py::tuple& path, PyObject* key) {
    const Py_ssize_t depth = PyTuple_GET_SIZE(path.ptr());
    py::tuple below(depth + 1);
    for (Py_ssize_t at = 0; at < depth; ++at)
      PyTuple_SET_ITEM(below.ptr(), at, Py_NewRef(PyTuple_GET_ITEM(path.ptr(), at)));
    PyTuple_SET_ITEM(below.ptr(), depth, Py_NewRef(key));
    return below;
  }

  void Add(const py::tuple& path, PyObject* value) {
    if (PyDict_SetItem(leaves_.ptr(), path.ptr(), value) < 0) throw py::error_already_set();
  }

  const py::dict& leaves_;
};

// The paths of leaves that are no tensors: see _engine.pyi.
py::list AddLeaves(const py::tuple& path, const py::object& value, const py::dict& leaves) {
  Collector collector(leaves);
  collector.Collect(path, value.ptr());
  return collector.objects;
}

}  // namespace

void DefineLeaves(py::module_& m) { m.def("add_leaves", &AddLeaves); }

}  // namespace lazyckpt
