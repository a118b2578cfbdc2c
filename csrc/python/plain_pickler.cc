// Writes the pickles of plain state in one native pass: nested dicts, lists and tuples of text, numbers and plain
// tensors. It writes, byte for byte, what lazyckpt/providers/pickles.py writes in Python, which is what torch.save
// writes; for any other object it gives up. Everything needs the GIL.
#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "python/pickled.h"
#include "python/tensor_facts.h"
#include "python/vocabulary.h"

namespace lazyckpt {
namespace {

// Opcodes of protocol 2. tests/capture/test_planned_again.py compares them with Python's.
constexpr char kMark = '(', kEmptyTuple = ')', kTuple = 't', kTuple1 = '\x85', kTuple2 = '\x86', kTuple3 = '\x87',
               kEmptyDict = '}', kSetItem = 's', kSetItems = 'u', kEmptyList = ']', kAppend = 'a', kAppends = 'e',
               kNone = 'N', kTrue = '\x88', kFalse = '\x89', kInt1 = 'K', kInt2 = 'M', kInt4 = 'J', kLong1 = '\x8a',
               kFloat = 'G', kGet1 = 'h', kGet4 = 'j', kPut1 = 'q', kPut4 = 'r', kReduce = 'R', kBuild = 'b',
               kPersistentId = 'Q';
constexpr Py_ssize_t kBatch = 1000;  // items between two marks, as Python's pickler has it

static_assert(std::endian::native == std::endian::little);

struct Types {
  py::object ordered_dict = py::module_::import("collections").attr("OrderedDict");
  py::object tensor = py::module_::import("torch").attr("Tensor");
  py::object dict = Returned(PyUnicode_InternFromString("__dict__"));
};

class Writer {
 public:
  // `before`: a pickle that is likely to be the same. `detached`: each tensor stands for a new one, detached from it.
  Writer(Vocabulary& vocabulary, uint32_t first, const PlainPickle& before, bool detached)
      : vocabulary_(vocabulary), before_(before), detached_(detached), next_(first) {
    pickle.opcodes.reserve(before.opcodes.size());
    pickle.gaps.reserve(before.gaps.size());
    pickle.storages.reserve(before.storages.size());
    pickle.identities.reserve(before.storages.size());
    pickle.pointers.reserve(before.storages.size());
    pickle.tensors.reserve(before.tensors.size());
    memo_.Reserve(before.objects);
    storage_numbers_.Reserve(before.storages.size());
  }

  // Returns false for an object that is not plain. The result is not to be used then.
  bool Save(PyObject* object) {
    if (object == Py_None) return Put(kNone);
    if (object == Py_True) return Put(kTrue);
    if (object == Py_False) return Put(kFalse);
    PyTypeObject* const type = Py_TYPE(object);
    if (type == &PyLong_Type) return SaveInteger(object);
    if (type == &PyFloat_Type) return SaveFloat(PyFloat_AS_DOUBLE(object));
    if (type == &PyTuple_Type && PyTuple_GET_SIZE(object) == 0) return Put(kEmptyTuple);
    if (detached_ && IsOfTorch(object)) return SaveTensor(object);
    if (const auto known = memo_.Find(object)) return PutPlace(*known, kGet1, kGet4);
    if (type == &PyUnicode_Type) return SaveText(object);
    if (type == reinterpret_cast<PyTypeObject*>(types_.tensor.ptr())) return SaveTensor(object);
    if (Py_EnterRecursiveCall(" while pickling an object") != 0) {
      PyErr_Clear();  // Python's pickler raises the same
      return false;
    }
    const bool saved = SaveContainer(object, type);
    Py_LeaveRecursiveCall();
    return saved;
  }

  size_t objects() const { return memo_.size(); }

  PlainPickle pickle{};
  py::list tensors{}, storages{};

 private:
  bool Put(char opcode) {
    pickle.opcodes.push_back(opcode);
    return true;
  }
  template <class T>
  bool Put(char opcode, T argument) {
    pickle.opcodes.push_back(opcode);
    pickle.opcodes.append(reinterpret_cast<const char*>(&argument), sizeof argument);
    return true;
  }
  bool PutPlace(uint32_t place, char opcode1, char opcode4) {
    return place < 256 ? Put(opcode1, static_cast<uint8_t>(place)) : Put(opcode4, place);
  }
  bool Memoize(PyObject* object) {
    const uint32_t place = next_++;
    memo_.FindOrAdd(object, place);
    return PutPlace(place, kPut1, kPut4);
  }

  bool PutInteger(int64_t value) {
    if (0 <= value && value < 1 << 8) return Put(kInt1, static_cast<uint8_t>(value));
    if (0 <= value && value < 1 << 16) return Put(kInt2, static_cast<uint16_t>(value));
    if (value == static_cast<int32_t>(value)) return Put(kInt4, static_cast<int32_t>(value));
    int size = sizeof value;  // as few bytes as hold it with its sign
    const auto byte = [value](int at) { return static_cast<uint8_t>(value >> 8 * at); };
    while (byte(size - 1) == (value < 0 ? 0xFF : 0) && (byte(size - 2) >> 7 != 0) == (value < 0)) --size;
    Put(kLong1, static_cast<uint8_t>(size));
    for (int at = 0; at < size; ++at) Put(static_cast<char>(byte(at)));
    return true;
  }
  bool SaveInteger(PyObject* object) {
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return overflow == 0 && PutInteger(value);
  }
  bool SaveFloat(double value) {
    const auto bits = std::bit_cast<uint64_t>(value);
    return Put(kFloat, __builtin_bswap64(bits));
  }
  bool SaveText(PyObject* object) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(object, &size);
    if (text == nullptr) {  // a lone surrogate
      PyErr_Clear();
      return false;
    }
    if (static_cast<uint64_t>(size) >= UINT32_MAX) return false;
    Put(kUnicode, static_cast<uint32_t>(size));
    pickle.opcodes.append(text, static_cast<size_t>(size));
    return Memoize(object);
  }

  bool SaveContainer(PyObject* object, PyTypeObject* type) {
    if (type == &PyDict_Type) return Put(kEmptyDict) && Memoize(object) && SaveItems(object);
    if (type == &PyList_Type) return Put(kEmptyList) && Memoize(object) && SaveElements(object);
    if (type == &PyTuple_Type) return SaveTuple(object);
    if (type == reinterpret_cast<PyTypeObject*>(types_.ordered_dict.ptr())) return SaveOrderedDict(object);
    return false;
  }

  bool SavePair(PyObject* key, PyObject* value) {
    const auto held = std::pair(py::reinterpret_borrow<py::object>(key), py::reinterpret_borrow<py::object>(value));
    return Save(key) && Save(value);
  }

  bool SaveItems(PyObject* dict) {
    const Py_ssize_t size = PyDict_GET_SIZE(dict);
    if (size == 0) return true;
    Py_ssize_t at = 0, in_batch = kBatch;
    PyObject *key = nullptr, *value = nullptr;
    if (size == 1) return PyDict_Next(dict, &at, &key, &value) != 0 && SavePair(key, value) && Put(kSetItem);
    for (; in_batch == kBatch; Put(kSetItems)) {
      Put(kMark);
      for (in_batch = 0; in_batch < kBatch && PyDict_Next(dict, &at, &key, &value) != 0; ++in_batch)
        if (!SavePair(key, value) || PyDict_GET_SIZE(dict) != size) return false;
    }
    return true;
  }

  bool SaveElements(PyObject* list) {
    const Py_ssize_t size = PyList_GET_SIZE(list);
    const auto save = [&](Py_ssize_t at) {
      const auto held = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(list, at));
      return Save(held.ptr()) && PyList_GET_SIZE(list) == size;
    };
    if (size == 1) return save(0) && Put(kAppend);
    for (Py_ssize_t at = 0; at < size; Put(kAppends)) {
      Put(kMark);
      for (const Py_ssize_t end = std::min(size, at + kBatch); at < end; ++at)
        if (!save(at)) return false;
    }
    return true;
  }

  bool SaveTuple(PyObject* tuple) {
    const Py_ssize_t size = PyTuple_GET_SIZE(tuple);
    if (size > 3) Put(kMark);
    for (Py_ssize_t at = 0; at < size; ++at)
      if (!Save(PyTuple_GET_ITEM(tuple, at))) return false;
    if (memo_.Find(tuple)) return false;  // it holds itself
    constexpr char kOpcodes[] = {kTuple1, kTuple2, kTuple3};
    return Put(size > 3 ? kTuple : kOpcodes[size - 1]) && Memoize(tuple);
  }

  // As its __reduce__ says: the class is called, the items are set, and then its attributes, if it has some.
  bool SaveOrderedDict(PyObject* dict) {
    if (const auto known = memo_.Find(types_.ordered_dict.ptr())) {
      PutPlace(*known, kGet1, kGet4);
    } else {
      pickle.opcodes += "ccollections\nOrderedDict\n";
      Memoize(types_.ordered_dict.ptr());
    }
    Put(kEmptyTuple);
    Put(kReduce);
    Memoize(dict);
    // Not PyDict_Next, which knows nothing of move_to_end().
    const py::list items = Returned(PyObject_CallMethod(dict, "items", nullptr));
    const size_t size = items.size();
    for (size_t at = 0; at < size;) {
      const size_t end = std::min(size, at + kBatch);
      const bool is_only = at + 1 == size;
      if (!is_only) Put(kMark);
      for (; at < end; ++at) {
        PyObject* const item = PyList_GET_ITEM(items.ptr(), at);
        if (!SavePair(PyTuple_GET_ITEM(item, 0), PyTuple_GET_ITEM(item, 1))) return false;
      }
      Put(is_only ? kSetItem : kSetItems);
    }
    const py::object attributes = Returned(PyObject_GetAttr(dict, types_.dict.ptr()));
    if (!PyDict_CheckExact(attributes.ptr()) || memo_.Find(attributes.ptr())) return false;
    if (PyDict_GET_SIZE(attributes.ptr()) == 0) return true;
    return Save(attributes.ptr()) && Put(kBuild);
  }

  void PutWord(int number) {
    if (places_.size() < vocabulary_.words.size()) places_.resize(vocabulary_.words.size(), -1);
    int& place = places_[static_cast<size_t>(number)];
    if (place >= 0) {
      Put(kGet1, static_cast<uint8_t>(place));
      return;
    }
    pickle.opcodes += vocabulary_.words[number];
    if (next_place_ == vocabulary_.places) return;
    place = static_cast<int>(next_place_++);
    Put(kPut1, static_cast<uint8_t>(place));
  }

  void PutIntegers(std::span<const int64_t> tuple) {
    if (tuple.empty()) {
      Put(kEmptyTuple);
      return;
    }
    if (tuple.size() > 3) Put(kMark);
    for (const int64_t n : tuple) PutInteger(n);
    constexpr char kOpcodes[] = {kTuple1, kTuple2, kTuple3};
    Put(tuple.size() > 3 ? kTuple : kOpcodes[tuple.size() - 1]);
  }

  bool SaveTensor(PyObject* tensor) {
    PrefetchAgain(before_.tensors, pickle.tensors.size());
    TensorFacts facts;
    if (!detached_ && (HasAttributes(tensor) || HasHooks(tensor))) return false;
    if (!reader_.Read(tensor, &facts)) return false;
    if (facts.is_altered || facts.device == kElsewhere) return false;
    const DtypeWords& dtype = vocabulary_.Of(facts.dtype);
    if (!dtype.is_plain) return false;
    const auto next = static_cast<uint32_t>(pickle.storages.size());
    const auto known = storage_numbers_.FindOrAdd(facts.storage, next);
    if (!known) {
      pickle.storages.push_back({facts.storage_nbytes, dtype.storage_dtype, facts.device});
      pickle.identities.push_back(reinterpret_cast<uintptr_t>(facts.storage));
      const py::object storage = StorageOf(tensor);
      pickle.pointers.push_back(facts.data != 0 ? facts.storage_data() : AddressOf(storage));
      storages.append(storage);
    } else if (pickle.storages[*known].dtype != dtype.storage_dtype) {
      return false;  // torch refuses it
    }
    PutWord(dtype.rebuild);
    Put(kMark);
    Put(kMark);
    PutWord(vocabulary_.storage);
    PutWord(dtype.storage_type);
    pickle.gaps.push_back({pickle.opcodes.size(), known.value_or(next)});
    PutWord(vocabulary_.OfDevice(facts.device));
    PutInteger(facts.storage_nbytes / dtype.storage_itemsize);
    Put(kTuple);
    Put(kPersistentId);
    PutInteger(facts.offset);
    PutIntegers(facts.sizes);
    PutIntegers(facts.strides);
    Put(facts.requires_grad && !detached_ ? kTrue : kFalse);
    PutWord(vocabulary_.ordered_dict);
    Put(kEmptyTuple);
    Put(kReduce);
    if (dtype.own >= 0) PutWord(dtype.own);
    Put(kTuple);
    Put(kReduce);
    pickle.tensors.push_back(AddressesOf(tensor, facts));
    tensors.append(py::handle(tensor));
    return detached_ ? PutPlace(next_++, kPut1, kPut4) : Memoize(tensor);
  }

  Vocabulary& vocabulary_;
  const PlainPickle& before_;
  const bool detached_;
  const Types& types_ = TheOnly<Types>();
  TensorReader reader_{};
  Numbers memo_{}, storage_numbers_{};
  std::vector<int> places_{};  // by word; -1: none yet
  uint32_t next_place_ = 0;    // of a word
  uint32_t next_;              // of any other object
};

py::object Pickle(Vocabulary& vocabulary, const py::object& object, uint32_t first, const PlainPickle* before,
                  bool detached) {
  const PlainPickle nothing;
  Writer writer(vocabulary, first, before == nullptr ? nothing : *before, detached);
  if (!writer.Save(object.ptr())) return py::none();
  writer.pickle.objects = writer.objects();
  return py::make_tuple(std::move(writer.pickle), std::move(writer.tensors), std::move(writer.storages));
}

}  // namespace

void DefinePlainPickler(py::module_& m) {
  using namespace pybind11::literals;
  py::class_<PlainPickle>(m, "PlainPickle")
      .def("is_same", &PlainPickle::IsSame)
      .def("has_same_storages", &PlainPickle::HasSameStorages)
      .def("has_same_memory", &PlainPickle::HasSameMemory)
      .def("with_keys", &PlainPickle::With)
      .def_readonly("identities", &PlainPickle::identities)
      .def_readonly("pointers", &PlainPickle::pointers)
      .def_property_readonly("sizes", &PlainPickle::Column<int64_t, &PlainPickle::Storage::nbytes>)
      .def_property_readonly("devices", &PlainPickle::Column<int64_t, &PlainPickle::Storage::device>)
      .def_property_readonly("dtypes", &PlainPickle::Dtypes);
  py::class_<Vocabulary>(m, "Vocabulary")
      .def(py::init<py::object, py::object, const py::bytes&, const py::bytes&, uint32_t>(), "of_dtype"_a,
           "of_device"_a, "storage"_a, "ordered_dict"_a, "places"_a)
      .def("pickle", &Pickle, "object"_a, "first"_a, "before"_a = py::none(), "detached"_a = false);
}

}  // namespace lazyckpt
