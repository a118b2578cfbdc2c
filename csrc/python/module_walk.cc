// Walks a module as torch.nn.Module.state_dict() does, and runs no Python code. It gives up where torch would run other
// code than its own. Everything needs the GIL.
#include <array>
#include <cstddef>
#include <optional>
#include <unordered_map>

#include "python/tensor_facts.h"

namespace lazyckpt {
namespace {

py::object Interned(const char* text) { return Returned(PyUnicode_InternFromString(text)); }

constexpr size_t kMethods = 4, kContainers = 6;

// What torch itself has.
struct ModuleClass {
  struct Method {
    py::object name, torchs;  // no object if it was replaced before it was first looked up
  };

  Method Of(const char* name) const {
    const py::object method = module.attr(name), code = py::getattr(method, "__code__", py::none());
    const bool is_torchs = code.is_none() || py::object(code.attr("co_filename")).equal(file);
    return {Interned(name), is_torchs ? method : py::object()};
  }

  py::object module = py::module_::import("torch.nn.modules.module").attr("Module");
  py::object file = module.attr("__init__").attr("__code__").attr("co_filename");
  std::array<Method, kMethods> methods{Of("state_dict"), Of("_save_to_state_dict"), Of("get_extra_state"),
                                       Of("__getattribute__")};
  py::object parameters = Interned("_parameters"), buffers = Interned("_buffers"), modules = Interned("_modules"),
             passing = Interned("_non_persistent_buffers_set"), hooks = Interned("_state_dict_hooks"),
             pre_hooks = Interned("_state_dict_pre_hooks");
  std::array<py::object, kContainers> containers{parameters, buffers, modules, passing, hooks, pre_hooks};
  py::object version = Interned("_version"), saved_version = Interned("version"), metadata = Interned("_metadata");
  py::str dot{"."};
  py::object ordered_dict = py::module_::import("collections").attr("OrderedDict");
  py::object function_modes = py::module_::import("torch").attr("_C").attr("_len_torch_function_stack");
  py::object dispatch_modes = py::module_::import("torch").attr("_C").attr("_len_torch_dispatch_stack");
};

// An attribute of a class; no object if it has none.
py::object InClass(PyTypeObject* type, const py::object& name) {
  PyObject* const found = PyObject_GetAttr(reinterpret_cast<PyObject*>(type), name.ptr());
  if (found == nullptr) PyErr_Clear();
  return py::reinterpret_steal<py::object>(found);
}

PyObject* In(PyObject* dict, py::handle name) {
  PyObject* const found = PyDict_GetItemWithError(dict, name.ptr());
  if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return found;
}

// A class that was looked at.
struct Class {
  unsigned tag = 0;  // Python gives a class another one when it or a class above it changes, and 0 where it has none
  std::optional<py::object> version{};
};

std::unordered_map<PyTypeObject*, Class>& Classes() {
  static auto* classes = new std::unordered_map<PyTypeObject*, Class>;  // the GIL guards it
  return *classes;
}

class Walk {
 public:
  // Returns false if there is anything that torch does not handle alone.
  bool Add(PyObject* module, const py::object& prefix) {
    const std::optional<py::object> version = VersionIn(Py_TYPE(module));
    if (!version || Py_EnterRecursiveCall(" in state_dict()") != 0) return PyErr_Clear(), false;
    const bool added = AddPlain(module, *version, prefix);
    Py_LeaveRecursiveCall();
    return added;
  }

  py::object state() const {
    py::setattr(state_, torch_.metadata, metadata_);
    return state_;
  }

 private:
  // The version of a class whose instances torch alone handles.
  static std::optional<py::object> VersionIn(PyTypeObject* type) {
    Class& known = Classes()[type];
    if (known.tag == 0 || known.tag != TagOf(type)) {
      known.version = LookAt(type);
      known.tag = TagOf(type);
    }
    return known.version;
  }

  static unsigned TagOf(PyTypeObject* type) {
#if PY_VERSION_HEX < 0x030C0000
    if (PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG) == 0) return 0;  // it is one that was
#endif
    return type->tp_version_tag;
  }

  static std::optional<py::object> LookAt(PyTypeObject* type) {
    const ModuleClass& torch = TheOnly<ModuleClass>();
    if (PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(torch.module.ptr())) == 0) return std::nullopt;
    for (const ModuleClass::Method& method : torch.methods)
      if (!method.torchs || !InClass(type, method.name).is(method.torchs)) return std::nullopt;
    for (const py::object& container : torch.containers)
      if (InClass(type, container)) return std::nullopt;
    const py::object version = InClass(type, torch.version);
    if (!version || PyLong_CheckExact(version.ptr()) == 0) return std::nullopt;
    return version;
  }

  bool AddPlain(PyObject* module, const py::object& version, const py::object& prefix) {
    const py::object own = Returned(PyObject_GenericGetDict(module, nullptr));
    for (const ModuleClass::Method& method : torch_.methods)
      if (In(own.ptr(), method.name) != nullptr) return false;
    PyObject* const own_version = In(own.ptr(), torch_.version);
    if (own_version != nullptr && PyLong_CheckExact(own_version) == 0) return false;
    for (const py::handle name : {torch_.hooks, torch_.pre_hooks}) {
      PyObject* const hooks = In(own.ptr(), name);
      if (hooks == nullptr || Py_TYPE(hooks) != ordered_dict_ || PyDict_GET_SIZE(hooks) != 0) return false;
    }
    PyObject* const passing = In(own.ptr(), torch_.passing);
    if (passing == nullptr || PySet_CheckExact(passing) == 0) return false;
    PyObject* const modules = In(own.ptr(), torch_.modules);

    py::dict about;
    about[torch_.saved_version] = own_version == nullptr ? py::handle(version) : py::handle(own_version);
    const Py_ssize_t length = PyUnicode_GET_LENGTH(prefix.ptr());
    const py::object path = Returned(PyUnicode_Substring(prefix.ptr(), 0, length > 0 ? length - 1 : 0));
    Set(metadata_, path.ptr(), about.ptr());
    return AddTensors(In(own.ptr(), torch_.parameters), prefix, nullptr) &&
           AddTensors(In(own.ptr(), torch_.buffers), prefix, passing) && AddModules(modules, prefix);
  }

  // `passing`: names that are left out.
  bool AddTensors(PyObject* tensors, const py::object& prefix, PyObject* passing) {
    if (!IsPlainDict(tensors)) return false;
    PyObject *name = nullptr, *tensor = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(tensors, &at, &name, &tensor) != 0;) {
      if (tensor == Py_None) continue;
      if (PyUnicode_CheckExact(name) == 0 || !IsOfTorch(tensor)) return false;
      if (passing != nullptr && PySet_GET_SIZE(passing) > 0 && PySet_Contains(passing, name) != 0) continue;
      Set(state_, Returned(PyUnicode_Concat(prefix.ptr(), name)).ptr(), tensor);
    }
    return true;
  }

  bool AddModules(PyObject* modules, const py::object& prefix) {
    if (!IsPlainDict(modules)) return false;
    PyObject *name = nullptr, *module = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(modules, &at, &name, &module) != 0;) {
      if (module == Py_None) continue;
      if (PyUnicode_CheckExact(name) == 0) return false;
      const py::object path = Returned(PyUnicode_Concat(prefix.ptr(), name));
      if (!Add(module, Returned(PyUnicode_Concat(path.ptr(), torch_.dot.ptr())))) return false;
    }
    return true;
  }

  // PyDict_Next knows nothing of an OrderedDict's move_to_end().
  static bool IsPlainDict(PyObject* object) { return object != nullptr && PyDict_CheckExact(object); }

  static void Set(const py::object& dict, PyObject* key, PyObject* value) {
    if (PyObject_SetItem(dict.ptr(), key, value) != 0) throw py::error_already_set();
  }

  const ModuleClass& torch_ = TheOnly<ModuleClass>();
  py::object state_ = torch_.ordered_dict(), metadata_ = torch_.ordered_dict();
  PyTypeObject* const ordered_dict_ = reinterpret_cast<PyTypeObject*>(torch_.ordered_dict.ptr());
};

py::object LiveState(const py::object& module) {
  const ModuleClass& torch = TheOnly<ModuleClass>();
  if (Truth(torch.function_modes()) || Truth(torch.dispatch_modes())) return py::none();  // they may change a tensor
  constexpr size_t kMostClasses = 10'000;  // of those that are made at run time
  if (Classes().size() > kMostClasses) Classes().clear();
  Walk walk;
  if (!walk.Add(module.ptr(), py::str(""))) return py::none();
  return walk.state();
}

}  // namespace

void DefineModuleWalk(py::module_& m) { m.def("live_state", &LiveState); }

}  // namespace lazyckpt
