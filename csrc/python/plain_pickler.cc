// Writes the pickles of plain state in one native pass: nested dicts, lists and tuples of text, numbers and plain
// tensors. It writes, byte for byte, what lazyckpt/providers/pickles.py writes in Python, which is what torch.save
// writes; for any other object it gives up. Everything needs the GIL.
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "python/opcodes.h"
#include "python/pickled.h"
#include "python/spans.h"
#include "python/tensor_facts.h"
#include "python/vocabulary.h"

namespace lazyckpt {
namespace {

constexpr Py_ssize_t kBatch = 1000;  // items between two marks, as Python's pickler has it

struct Types {
  py::object ordered_dict = py::module_::import("collections").attr("OrderedDict");
  py::object tensor = py::module_::import("torch").attr("Tensor");
  py::object dict = Returned(PyUnicode_InternFromString("__dict__"));
};

// How tensors are written.
struct How {
  bool is_detached = false;  // each stands for a new one, detached from it
  bool is_compact = false;   // each span of a storage is a storage of its own
};

class Writer : private Opcodes {
 public:
  // `before`: a pickle that is likely to be the same.
  Writer(Vocabulary& vocabulary, uint32_t first, const PlainPickle& before, How how)
      : Opcodes(&pickle.opcodes), vocabulary_(vocabulary), before_(before), how_(how), next_(first) {
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
  bool SaveAll(PyObject* object) { return Save(object) && (!how_.is_compact || FillIn()); }

  size_t objects() const { return memo_.size(); }

  PlainPickle pickle{};
  py::list tensors{}, storages{};

 private:
  bool Save(PyObject* object) {
    if (object == Py_None) return Put(kNone);
    if (object == Py_True) return Put(kTrue);
    if (object == Py_False) return Put(kFalse);
    PyTypeObject* const type = Py_TYPE(object);
    if (type == &PyLong_Type) return SaveInteger(object);
    if (type == &PyFloat_Type) return PutFloat(PyFloat_AS_DOUBLE(object));
    if (type == &PyTuple_Type && PyTuple_GET_SIZE(object) == 0) return Put(kEmptyTuple);
    if (how_.is_detached && IsOfTorch(object)) return SaveTensor(object);
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

  bool Memoize(PyObject* object) {
    const uint32_t place = next_++;
    memo_.FindOrAdd(object, place);
    return PutPlace(place, kPut1, kPut4);
  }

  bool SaveInteger(PyObject* object) {
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return overflow == 0 && PutInteger(value);
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

  // The end of a storage with so many elements, and the offset of a tensor there.
  void PutPosition(int64_t elements, int64_t offset) {
    PutInteger(elements);
    Put(kTuple);
    Put(kPersistentId);
    PutInteger(offset);
  }

  // Writes the positions that were left out, and makes each span a storage. Returns false if torch refuses its dtypes.
  bool FillIn() {
    const Spans found = SpansOf(uses_);
    const PlainPickle before = std::exchange(pickle, {.gaps = pickle.gaps, .tensors = pickle.tensors});
    const py::list storages_before = std::exchange(storages, py::list());
    pickle.opcodes.reserve(before.opcodes.size() + 16 * uses_.size());
    size_t done = 0;
    const auto copy_until = [&](size_t end) {
      pickle.opcodes.append(before.opcodes, done, end - done);
      done = end;
    };
    for (size_t i = 0; i < uses_.size(); ++i) {
      const auto& [at, dtype, itemsize] = left_[i];
      const uint32_t number = found.of[i];
      const Span& span = found.spans[number];
      if (number == pickle.storages.size()) {
        pickle.storages.push_back({span.nbytes, dtype, before.storages[span.storage].device, span.begin});
        pickle.identities.push_back(before.identities[span.storage]);
        pickle.pointers.push_back(before.pointers[span.storage]);
        storages.append(storages_before[span.storage]);
      } else if (pickle.storages[number].dtype != dtype) {
        return false;
      }
      copy_until(before.gaps[i].at);
      pickle.gaps[i] = {pickle.opcodes.size(), number};
      copy_until(at);
      PutPosition(span.nbytes / itemsize, span.OffsetOf(uses_[i]));
    }
    copy_until(before.opcodes.size());
    return true;
  }

  bool SaveTensor(PyObject* tensor) {
    PrefetchAgain(before_.tensors, pickle.tensors.size());
    TensorFacts facts;
    if (!how_.is_detached && (HasAttributes(tensor) || HasHooks(tensor))) return false;
    if (!reader_.Read(tensor, &facts)) return false;
    if (facts.is_altered || facts.device == kElsewhere) return false;
    const DtypeWords& dtype = vocabulary_.Of(facts.dtype);
    if (!dtype.is_plain) return false;
    const auto next = static_cast<uint32_t>(pickle.storages.size());
    const auto known = storage_numbers_.FindOrAdd(facts.storage, next);
    if (!known) {
      pickle.storages.push_back({facts.storage_nbytes, dtype.storage_dtype, facts.device, 0});
      pickle.identities.push_back(reinterpret_cast<uintptr_t>(facts.storage));
      const py::object storage = StorageOf(tensor);
      pickle.pointers.push_back(facts.data != 0 ? facts.storage_data() : AddressOf(storage));
      storages.append(storage);
    } else if (pickle.storages[*known].dtype != dtype.storage_dtype && !how_.is_compact) {
      return false;  // torch refuses it
    }
    PutWord(dtype.rebuild);
    Put(kMark);
    Put(kMark);
    PutWord(vocabulary_.storage);
    PutWord(dtype.storage_type);
    pickle.gaps.push_back({pickle.opcodes.size(), known.value_or(next)});
    PutWord(vocabulary_.OfDevice(facts.device));
    if (how_.is_compact) {
      uses_.push_back(UseOf(facts, known.value_or(next)));
      left_.push_back({pickle.opcodes.size(), dtype.storage_dtype, dtype.storage_itemsize});
    } else {
      PutPosition(facts.storage_nbytes / dtype.storage_itemsize, facts.offset);
    }
    PutIntegers(facts.sizes);
    PutIntegers(facts.strides);
    Put(facts.requires_grad && !how_.is_detached ? kTrue : kFalse);
    PutWord(vocabulary_.ordered_dict);
    Put(kEmptyTuple);
    Put(kReduce);
    if (dtype.own >= 0) PutWord(dtype.own);
    Put(kTuple);
    Put(kReduce);
    pickle.tensors.push_back(AddressesOf(tensor, facts));
    tensors.append(py::handle(tensor));
    return how_.is_detached ? PutPlace(next_++, kPut1, kPut4) : Memoize(tensor);
  }

  Vocabulary& vocabulary_;
  const PlainPickle& before_;
  const How how_;
  // Of a compact pickle, by tensor: the bytes that it shows, and where its position goes once those of all are known.
  struct Left {
    size_t at;        // in the opcodes
    PyObject* dtype;  // of the storage
    int64_t itemsize;
  };
  std::vector<Use> uses_{};
  std::vector<Left> left_{};
  const Types& types_ = TheOnly<Types>();
  TensorReader reader_{};
  Numbers memo_{}, storage_numbers_{};
  std::vector<int> places_{};  // by word; -1: none yet
  uint32_t next_place_ = 0;    // of a word
  uint32_t next_;              // of any other object
};

py::object Pickle(Vocabulary& vocabulary, const py::object& object, uint32_t first, const PlainPickle* before,
                  How how) {
  const PlainPickle nothing;
  Writer writer(vocabulary, first, before == nullptr ? nothing : *before, how);
  if (!writer.SaveAll(object.ptr())) return py::none();
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
      .def_property_readonly("offsets", &PlainPickle::Column<int64_t, &PlainPickle::Storage::offset>)
      .def_property_readonly("sizes", &PlainPickle::Column<int64_t, &PlainPickle::Storage::nbytes>)
      .def_property_readonly("devices", &PlainPickle::Column<int64_t, &PlainPickle::Storage::device>)
      .def_property_readonly("dtypes", &PlainPickle::Dtypes);
  py::class_<Vocabulary>(m, "Vocabulary")
      .def(py::init<py::object, py::object, const py::bytes&, const py::bytes&, uint32_t>(), "of_dtype"_a,
           "of_device"_a, "storage"_a, "ordered_dict"_a, "places"_a)
      .def(
          "pickle",
          [](Vocabulary& vocabulary, const py::object& object, uint32_t first, const PlainPickle* before,
             bool detached) { return Pickle(vocabulary, object, first, before, {.is_detached = detached}); },
          "object"_a, "first"_a, "before"_a = py::none(), "detached"_a = false)
      .def(
          "pickle_compact",
          [](Vocabulary& vocabulary, const py::object& object, uint32_t first, const PlainPickle* before) {
            return Pickle(vocabulary, object, first, before, {.is_compact = true});
          },
          "object"_a, "first"_a, "before"_a = py::none());
}

}  // namespace lazyckpt
