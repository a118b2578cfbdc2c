// Reads pickles of plain state: lazyckpt/formats/plain_pickle.py says which these are. It has the data structures of
// torch's unpickler, a stack above each mark and a memo by number, so that it makes the same objects. Every other
// opcode, name, call or argument is refused. Everything needs the GIL. One file because it is one state machine: to see
// that no pickle does more than make plain state, read it whole.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "python/ask.h"

namespace lazyckpt {
namespace {

constexpr Py_ssize_t kMaxDimensions = 64;  // torch computes with no more

void Require(bool plain) {
  if (!plain) throw py::value_error("not a pickle of plain state");
}

void Succeed(int result) {
  if (result < 0) throw py::error_already_set();
}

bool Is(py::handle object, py::handle type) {
  return Py_IS_TYPE(object.ptr(), reinterpret_cast<PyTypeObject*>(type.ptr())) != 0;
}

struct Torch {
  py::object utils = py::module_::import("torch._utils");
  py::object rebuild_parameter = utils.attr("_rebuild_parameter");
  py::object rebuild_tensor_v2 = utils.attr("_rebuild_tensor_v2");
  py::object rebuild_tensor_v3 = utils.attr("_rebuild_tensor_v3");
  py::object ordered_dict = py::module_::import("collections").attr("OrderedDict");
  py::object from_bytes = py::module_::import("builtins").attr("int").attr("from_bytes");

  py::object torch = py::module_::import("torch");
  py::object empty = torch.attr("empty");
  py::object dtype = torch.attr("dtype");
  py::object typed_storage = torch.attr("storage").attr("TypedStorage");
  py::object untyped_storage = torch.attr("UntypedStorage");
  Question device{untyped_storage, "device"};
  Question nbytes{untyped_storage, "nbytes"};
  py::object tensor = torch.attr("Tensor");
  py::object new_empty = tensor.attr("new_empty");
  py::object set = tensor.attr("set_");

  py::object zero = py::int_(0);
  py::str storage{"storage"};
  py::object hooks = Interned("_backward_hooks");
  py::object requires_grad = Interned("requires_grad");
  py::object memory_of_typed = Interned("_untyped_storage");
  py::object dtype_of_typed = Interned("dtype");

  static py::object Interned(const char* name) { return Returned(PyUnicode_InternFromString(name)); }
};

// The bytes that are still to be read.
class Input {
 public:
  explicit Input(std::string_view data) : rest_(data) {}

  std::string_view Take(size_t size) {
    Require(size <= rest_.size());
    const std::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }

  uint64_t Number(size_t size) {  // little-endian
    const std::string_view bytes = Take(size);
    uint64_t value = 0;
    for (size_t i = 0; i < size; ++i) value |= uint64_t{static_cast<unsigned char>(bytes[i])} << 8 * i;
    return value;
  }

  std::string_view TwoLines() {  // without the last newline
    const size_t first = std::min(rest_.find('\n'), rest_.size());
    const size_t second = rest_.find('\n', first + 1);
    Require(second != std::string_view::npos);
    const std::string_view lines = Take(second);
    Take(1);
    return lines;
  }

 private:
  std::string_view rest_;
};

// Objects, in the order of their pushes. Nothing below the last mark can be reached.
class Stack {
 public:
  void Push(py::object object) { objects_.push_back(std::move(object)); }
  void Mark() { marks_.push_back(objects_.size()); }

  py::object& Top() { return *Last(1); }

  py::object Pop() {
    py::object top = std::move(Top());
    objects_.pop_back();
    return top;
  }

  py::tuple PopTuple(size_t count) {
    const auto first = Last(count);
    py::tuple popped(count);
    for (size_t i = 0; i < count; ++i) PyTuple_SET_ITEM(popped.ptr(), i, first[i].release().ptr());
    objects_.erase(first, objects_.end());
    return popped;
  }

  py::tuple PopMark() {
    Require(!marks_.empty());
    const py::tuple popped = PopTuple(objects_.size() - marks_.back());
    marks_.pop_back();
    return popped;
  }

 private:
  std::vector<py::object>::iterator Last(size_t count) {
    Require(count <= objects_.size() - (marks_.empty() ? 0 : marks_.back()));
    return objects_.end() - static_cast<ptrdiff_t>(count);
  }

  std::vector<py::object> objects_;
  std::vector<size_t> marks_;
};

// Keys are never nested, so hashing one takes no longer than reading it.
bool IsKey(PyObject* key) {
  return PyUnicode_CheckExact(key) || PyLong_CheckExact(key) || PyFloat_CheckExact(key) || PyBool_Check(key) ||
         key == Py_None;
}

void SetItems(py::handle target, const py::tuple& items) {
  Require(PyDict_CheckExact(target.ptr()) || Is(target, TheOnly<Torch>().ordered_dict));
  Require(items.size() % 2 == 0);
  for (size_t i = 0; i < items.size(); i += 2) {
    PyObject* const key = PyTuple_GET_ITEM(items.ptr(), i);
    Require(IsKey(key));
    Succeed(PyObject_SetItem(target.ptr(), key, PyTuple_GET_ITEM(items.ptr(), i + 1)));
  }
}

void Extend(py::handle target, const py::tuple& items) {
  Require(PyList_CheckExact(target.ptr()));
  const Py_ssize_t end = PyList_GET_SIZE(target.ptr());
  Succeed(PyList_SetSlice(target.ptr(), end, end, items.ptr()));
}

// A number of the pickle that is no bool and not negative.
int64_t Natural(PyObject* number) {
  Require(PyLong_CheckExact(number));
  const int64_t value = Integer(number);  // throws what Python raises for a larger one
  Require(value >= 0);
  return value;
}

// Makes tensors, each from an empty one of its kind: that is faster than from a dtype and a device.
class Tensors {
 public:
  // `arguments` are those of _rebuild_tensor_v2; with `has_dtype`, of _rebuild_tensor_v3.
  py::object Rebuild(py::handle arguments, bool has_dtype) {
    Require(PyTuple_GET_SIZE(arguments.ptr()) == (has_dtype ? 7 : 6));
    const auto argument = [&](Py_ssize_t i) { return PyTuple_GET_ITEM(arguments.ptr(), i); };
    PyObject *const storage = argument(0), *const offset = argument(1), *const size = argument(2),
                    *const stride = argument(3), *const requires_grad = argument(4), *const hooks = argument(5);
    Require(Is(storage, torch_.typed_storage) && PyBool_Check(requires_grad) && Is(hooks, torch_.ordered_dict));
    Require(!has_dtype || requires_grad == Py_False);
    const py::object memory = Returned(PyObject_GetAttr(storage, torch_.memory_of_typed.ptr()));
    const auto dtype = has_dtype ? py::reinterpret_borrow<py::object>(argument(6))
                                 : Returned(PyObject_GetAttr(storage, torch_.dtype_of_typed.ptr()));
    Require(Is(dtype, torch_.dtype));
    const Kind& kind = KindOf(dtype, torch_.device(memory));
    // torch would enlarge a storage that is too small.
    Require(Items(Natural(offset), size, stride) <= Integer(torch_.nbytes(memory)) / kind.itemsize);
    PyObject* const empty[] = {kind.empty.ptr(), torch_.zero.ptr()};
    py::object tensor = Returned(PyObject_Vectorcall(torch_.new_empty.ptr(), empty, 2, nullptr));
    PyObject* const set[] = {tensor.ptr(), memory.ptr(), offset, size, stride};
    tensor = Returned(PyObject_Vectorcall(torch_.set.ptr(), set, 5, nullptr));
    if (requires_grad == Py_True) Succeed(PyObject_SetAttr(tensor.ptr(), torch_.requires_grad.ptr(), Py_True));
    Succeed(PyObject_SetAttr(tensor.ptr(), torch_.hooks.ptr(), hooks));
    return tensor;
  }

 private:
  struct Kind {
    py::object dtype, device, empty;
    int64_t itemsize;
  };

  const Kind& KindOf(const py::object& dtype, const py::object& device) {
    for (const Kind& kind : kinds_)
      if (kind.dtype.is(dtype) && kind.device.equal(device)) return kind;
    const py::object empty = torch_.empty(0, py::arg("dtype") = dtype, py::arg("device") = device);
    return kinds_.emplace_back(dtype, device, empty, Integer(dtype.attr("itemsize")));
  }

  // How many items of a storage a view reaches to. Many tensors may share one tuple of a million sizes.
  static int64_t Items(int64_t offset, PyObject* size, PyObject* stride) {
    Require(PyTuple_CheckExact(size) && PyTuple_CheckExact(stride));
    const Py_ssize_t dimensions = PyTuple_GET_SIZE(size);
    Require(dimensions <= kMaxDimensions && PyTuple_GET_SIZE(stride) == dimensions);
    int64_t last = offset;
    bool empty = false, fits = true;
    for (Py_ssize_t i = 0; i < dimensions; ++i) {
      const int64_t n = Natural(PyTuple_GET_ITEM(size, i)), step = Natural(PyTuple_GET_ITEM(stride, i));
      int64_t reach = 0;
      if (n == 0) empty = true;
      fits = fits && !__builtin_mul_overflow(n - 1, step, &reach) && !__builtin_add_overflow(last, reach, &last);
    }
    if (empty) return 0;
    Require(fits && !__builtin_add_overflow(last, 1, &last));
    return last;
  }

  const Torch& torch_ = TheOnly<Torch>();
  std::vector<Kind> kinds_;
};

class Unpickler {
 public:
  Unpickler(std::string_view data, py::object persistent_load, py::dict globals)
      : input_(data), max_places_(data.size()), load_(std::move(persistent_load)), globals_(std::move(globals)) {}

  py::object Read() {
    for (;;) {
      const auto opcode = static_cast<char>(input_.Number(1));
      if (opcode == '.') return stack_.Pop();
      Do(opcode);
    }
  }

 private:
  void Do(char opcode) {
    // clang-format off
    switch (opcode) {
      case '\x80': return Require(input_.Number(1) == 2);  // PROTO
      case '(': return stack_.Mark();  // MARK
      case 'h': return Get(input_.Number(1));  // BINGET
      case 'j': return Get(input_.Number(4));  // LONG_BINGET
      case 'q': return Put(input_.Number(1));  // BINPUT
      case 'r': return Put(input_.Number(4));  // LONG_BINPUT
      case 'N': return stack_.Push(py::none());  // NONE
      case '\x88': return stack_.Push(py::bool_(true));  // NEWTRUE
      case '\x89': return stack_.Push(py::bool_(false));  // NEWFALSE
      case 'K': return stack_.Push(py::int_(input_.Number(1)));  // BININT1
      case 'M': return stack_.Push(py::int_(input_.Number(2)));  // BININT2
      case 'J': return stack_.Push(py::int_(static_cast<int32_t>(input_.Number(4))));  // BININT
      case '\x8a': return stack_.Push(Long(input_.Take(input_.Number(1))));  // LONG1
      case 'G': return stack_.Push(Float(input_.Take(8)));  // BINFLOAT
      case 'X': return stack_.Push(Text(input_.Take(input_.Number(4))));  // BINUNICODE
      case 'c': return stack_.Push(Global(input_.TwoLines()));  // GLOBAL
      case ')': return stack_.Push(py::tuple());  // EMPTY_TUPLE
      case '\x85': return stack_.Push(stack_.PopTuple(1));  // TUPLE1
      case '\x86': return stack_.Push(stack_.PopTuple(2));  // TUPLE2
      case '\x87': return stack_.Push(stack_.PopTuple(3));  // TUPLE3
      case 't': return stack_.Push(stack_.PopMark());  // TUPLE
      case ']': return stack_.Push(py::list());  // EMPTY_LIST
      case '}': return stack_.Push(py::dict());  // EMPTY_DICT
      default: return Change(opcode);
    }
    // clang-format on
  }

  // The opcodes that change an object, or make one of others.
  void Change(char opcode) {
    const bool marked = opcode == 'u' || opcode == 'e';
    const size_t count = opcode == 's' ? 2 : opcode == 'a' || opcode == 'b' || opcode == 'R' ? 1 : 0;
    const py::tuple items = marked ? stack_.PopMark() : stack_.PopTuple(count);
    const py::handle item = count == 1 ? PyTuple_GET_ITEM(items.ptr(), 0) : nullptr;
    py::object& target = stack_.Top();
    // clang-format off
    switch (opcode) {
      case 's': case 'u': return SetItems(target, items);        // SETITEM, SETITEMS
      case 'a': case 'e': return Extend(target, items);          // APPEND, APPENDS
      case 'b': return Build(target, item);                      // BUILD
      case 'R': return (void)(target = Call(target, item));      // REDUCE
      case 'Q': return (void)(target = Storage(target));         // BINPERSID
      default: Require(false);
    }
    // clang-format on
  }

  void Get(size_t place) {
    Require(place < memo_.size() && memo_[place]);
    stack_.Push(memo_[place]);
  }

  void Put(size_t place) {
    Require(place < max_places_);  // a place costs no more memory than the opcodes
    if (place >= memo_.size()) memo_.resize(place + 1);
    memo_[place] = stack_.Top();
  }

  static py::object Long(std::string_view bytes) {
    return TheOnly<Torch>().from_bytes(py::bytes(bytes), "little", py::arg("signed") = true);
  }

  static py::object Float(std::string_view bytes) {  // big-endian
    uint64_t bits = 0;
    for (const char byte : bytes) bits = bits << 8 | static_cast<unsigned char>(byte);
    return py::float_(std::bit_cast<double>(bits));
  }

  static py::object Text(std::string_view bytes) {
    return Returned(PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "surrogatepass"));
  }

  py::object Global(std::string_view lines) const {
    PyObject* const found = PyDict_GetItemWithError(globals_.ptr(), py::bytes(lines).ptr());
    Require(found != nullptr);
    return py::reinterpret_borrow<py::object>(found);
  }

  py::object Storage(const py::object& saved_id) const {
    Require(PyTuple_CheckExact(saved_id.ptr()) && PyTuple_GET_SIZE(saved_id.ptr()) > 0);
    const py::handle word = PyTuple_GET_ITEM(saved_id.ptr(), 0);
    Require(PyUnicode_CheckExact(word.ptr()) && word.equal(TheOnly<Torch>().storage));
    return Returned(PyObject_CallOneArg(load_.ptr(), saved_id.ptr()));
  }

  // The attributes of an OrderedDict, such as a state dict's _metadata.
  static void Build(py::handle target, py::handle state) {
    Require(Is(target, TheOnly<Torch>().ordered_dict) && PyDict_CheckExact(state.ptr()));
    Succeed(PyDict_Update(target.attr("__dict__").ptr(), state.ptr()));
  }

  py::object Call(py::handle function, py::handle arguments) {
    const Torch& torch = TheOnly<Torch>();
    Require(PyTuple_CheckExact(arguments.ptr()));
    const Py_ssize_t count = PyTuple_GET_SIZE(arguments.ptr());
    if (function.is(torch.rebuild_tensor_v2)) return tensors_.Rebuild(arguments, false);
    if (function.is(torch.rebuild_tensor_v3)) return tensors_.Rebuild(arguments, true);
    if (function.is(torch.ordered_dict) && count == 0) return torch.ordered_dict();
    Require(function.is(torch.rebuild_parameter) && count == 3);
    const auto argument = [&](Py_ssize_t i) { return PyTuple_GET_ITEM(arguments.ptr(), i); };
    Require(Is(argument(0), torch.tensor) && PyBool_Check(argument(1)) && Is(argument(2), torch.ordered_dict));
    return Returned(PyObject_CallObject(function.ptr(), arguments.ptr()));
  }

  Input input_;
  const size_t max_places_;
  Stack stack_;
  std::vector<py::object> memo_;
  const py::object load_;
  const py::dict globals_;
  Tensors tensors_;
};

}  // namespace

void DefinePlainPickle(py::module_& m) {
  m.def("read_plain_pickle", [](const py::bytes& data, py::object persistent_load, py::dict globals) {
    return Unpickler(data, std::move(persistent_load), std::move(globals)).Read();
  });
}

}  // namespace lazyckpt
