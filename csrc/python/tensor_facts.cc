// Reads the facts of tensors: from torch's exported C functions and the words of a tensor where that is possible, and
// in Python's way where it is not.
#include "python/tensor_facts.h"

#include <exception>
#include <utility>

#include "python/tensor_words.h"

namespace lazyckpt {
namespace {

// What a set of dispatch keys says, asked once of a tensor that has it.
struct Traits {
  uintptr_t keys;
  bool on_host, on_cuda, is_altered, is_inference;
};

struct Dtype {
  py::handle dtype{};
  int64_t itemsize = 0;
};

// What was learned about torch. It lives as long as the process, which has few sets of keys and dtypes.
struct Learned {
  std::vector<Traits> traits{};
  std::vector<Dtype> dtypes{};  // by torch's number
};

Learned& Known() {
  static auto* known = new Learned;  // the GIL guards it
  return *known;
}

Traits AskTraits(py::handle tensor, uintptr_t keys) {
  const FactQuestions& ask = ForFacts();
  const bool is_complex = Truth(ask.dtype(tensor).attr("is_complex"));
  return {.keys = keys,
          .on_host = Truth(ask.is_cpu(tensor)),
          .on_cuda = Truth(ask.is_cuda(tensor)),
          .is_altered = Truth(ask.is_neg(tensor)) || (is_complex && Truth(ask.is_conj(tensor))),
          .is_inference = Truth(ask.is_inference(tensor))};
}

const Traits& TraitsOf(py::handle tensor, uintptr_t keys) {
  std::vector<Traits>& all = Known().traits;
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].keys != keys) continue;
    if (i > 0) std::swap(all[i], all[0]);
    return all[0];
  }
  all.push_back(AskTraits(tensor, keys));
  return all.back();
}

Dtype AskDtype(py::handle tensor) {
  const py::object dtype = ForFacts().dtype(tensor);
  return {dtype, Integer(dtype.attr("itemsize"))};
}

const Dtype& DtypeOf(py::handle tensor, int32_t number) {
  std::vector<Dtype>& all = Known().dtypes;
  const auto at = static_cast<size_t>(number);
  if (at >= all.size()) all.resize(at + 1);
  if (!all[at].dtype) all[at] = AskDtype(tensor);
  return all[at];
}

bool ReadDirectly(py::handle tensor, TensorFacts* facts) {
  const Anatomy& parts = Parts();
  const Shim& shim = TheOnly<Shim>();
  const void* const implementation = parts.ImplementationOf(tensor.ptr());
  if (implementation == nullptr || WordAt(implementation, 0) != parts.kind) return false;
  facts->storage = PointerAt(implementation, parts.storage);
  if (facts->storage == nullptr) return false;
  void* const handle = reinterpret_cast<char*>(tensor.ptr()) + parts.implementation;
  int64_t dims = 0, *sizes = nullptr, *strides = nullptr;
  int32_t dtype = 0, device = 0;
  void* data = nullptr;
  if ((shim.dim(handle, &dims) | shim.sizes(handle, &sizes) | shim.strides(handle, &strides) |
       shim.offset(handle, &facts->offset) | shim.dtype(handle, &dtype) | shim.data(handle, &data) |
       shim.storage_size(handle, &facts->storage_nbytes)) != 0)
    return false;
  const Traits& traits = TraitsOf(tensor, WordAt(implementation, parts.keys));
  if (traits.on_cuda && shim.device(handle, &device) != 0) return false;
  const Dtype& known = DtypeOf(tensor, dtype);
  facts->data = reinterpret_cast<uintptr_t>(data);
  facts->dtype = known.dtype;
  facts->itemsize = known.itemsize;
  facts->sizes = {sizes, static_cast<size_t>(dims)};
  facts->strides = {strides, static_cast<size_t>(dims)};
  facts->device = traits.on_host ? kOnHost : traits.on_cuda ? device : kElsewhere;
  facts->is_altered = traits.is_altered;
  facts->is_inference = traits.is_inference;
  facts->requires_grad = WordAt(implementation, parts.autograd) != 0 && Truth(ForFacts().requires_grad(tensor));
  return true;
}

bool ask_always = false;

void AppendIntegers(const py::tuple& tuple, std::vector<int64_t>* out) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple.ptr()); ++i)
    out->push_back(Integer(PyTuple_GET_ITEM(tuple.ptr(), i)));
}

// Whether a tensor is told directly as it is in Python's way: anything that this torch does otherwise shows here.
bool IsToldAsAsked(const py::object& tensor) {
  TensorFacts told, asked;
  TensorReader reader;
  const bool is_told = ReadDirectly(tensor, &told);
  ask_always = true;
  const bool is_asked = reader.Read(tensor, &asked);
  ask_always = false;
  const auto equal = [](auto a, auto b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); };
  return is_told && is_asked && told.storage == asked.storage && told.storage_nbytes == asked.storage_nbytes &&
         told.data == asked.data && told.dtype.is(asked.dtype) && told.itemsize == asked.itemsize &&
         told.offset == asked.offset && equal(told.sizes, asked.sizes) && equal(told.strides, asked.strides) &&
         told.device == asked.device && told.requires_grad == asked.requires_grad &&
         told.is_altered == asked.is_altered && told.is_inference == asked.is_inference &&
         WordAt(Parts().ImplementationOf(tensor.ptr()), Parts().keys) == Anatomy::KeysOf(tensor);
}

// Compares both ways once, with tensors of every kind that the words tell apart.
struct Trial {
  bool has_passed = false;

  Trial() {
    const Anatomy& parts = Parts();
    if (!TheOnly<Shim>().is_complete || parts.storage == 0 || parts.autograd == 0 || parts.keys == 0) return;
    try {
      has_passed = Passes();
    } catch (const std::exception&) {
    }
  }

 private:
  static bool Passes() {
    const py::module_ torch = py::module_::import("torch");
    const py::object zeros = torch.attr("zeros");
    const py::object plain = zeros(py::make_tuple(3, 4));
    const py::object part = plain.attr("narrow")(0, 1, 2).attr("t")();
    const py::object parameter = py::module_::import("torch.nn").attr("Parameter")(plain);
    const py::object complex = zeros(2, py::arg("dtype") = torch.attr("complex64"));
    py::object frozen;
    {
      const py::object mode = torch.attr("inference_mode")();
      mode.attr("__enter__")();
      frozen = zeros(2);
      mode.attr("__exit__")(py::none(), py::none(), py::none());
    }
    const py::object conjugated = complex.attr("conj")();
    const std::vector<py::object> tensors = {plain,      part,
                                             parameter,  parameter.attr("detach")(),
                                             frozen,     zeros(0),
                                             complex,    torch.attr("tensor")(1),
                                             conjugated, conjugated.attr("imag")};
    for (const py::object& tensor : tensors)
      if (!IsToldAsAsked(tensor)) return false;
    TensorFacts facts;
    return !ReadDirectly(torch.attr("eye")(2).attr("to_sparse")(), &facts);
  }
};

void Fetch(const void* address, int lines) {
  for (int line = 0; line < lines; ++line) __builtin_prefetch(static_cast<const char*>(address) + 64 * line);
}

}  // namespace

int64_t TensorFacts::numel() const {
  int64_t n = 1;
  for (const int64_t size : sizes) n *= size;
  return n;
}

bool TensorFacts::is_contiguous() const {
  int64_t expected = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (sizes[i] == 0) return true;
    if (sizes[i] == 1) continue;
    if (strides[i] != expected) return false;
    expected *= sizes[i];
  }
  return true;
}

bool TensorReader::Read(py::handle tensor, TensorFacts* facts) {
  // A subclass may answer for itself what sizes it has.
  return IsDirect() && IsOfTorch(tensor) ? ReadDirectly(tensor, facts) : Ask(tensor, facts);
}

bool TensorReader::IsDirect() { return !ask_always && TheOnly<Trial>().has_passed; }

void TensorReader::AskAlways(bool always) { ask_always = always; }

bool TensorReader::Ask(py::handle tensor, TensorFacts* facts) {
  const FactQuestions& ask = ForFacts();
  const py::object storage = ask.untyped_storage.IfPlain(tensor);
  if (!storage) return false;
  const py::object shape = ask.shape.IfPlain(tensor);
  if (!shape) return false;
  const py::object data = ask.data_ptr.IfPlain(tensor);
  const Traits traits = AskTraits(tensor, 0);
  const Dtype dtype = AskDtype(tensor);
  geometry_.clear();
  AppendIntegers(shape, &geometry_);
  const size_t dims = geometry_.size();
  AppendIntegers(ask.stride(tensor), &geometry_);
  *facts = {.storage = reinterpret_cast<const void*>(Integer(ask.cdata(storage))),
            .storage_nbytes = Integer(ask.storage_nbytes(storage)),
            .data = data ? static_cast<uintptr_t>(Integer(data)) : 0,
            .dtype = dtype.dtype,
            .itemsize = dtype.itemsize,
            .offset = Integer(ask.storage_offset(tensor)),
            .sizes = std::span(geometry_).first(dims),
            .strides = std::span(geometry_).subspan(dims),
            .device = traits.on_host   ? kOnHost
                      : traits.on_cuda ? static_cast<int>(Integer(ask.get_device(tensor)))
                                       : kElsewhere,
            .requires_grad = Truth(ask.requires_grad(tensor)),
            .is_altered = traits.is_altered,
            .is_inference = traits.is_inference};
  return true;
}

bool IsOfTorch(py::handle object) {
  const py::handle type(reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())));
  return type.is(ForFacts().tensor) || type.is(ForFacts().parameter);
}

py::object StorageOf(py::handle tensor) { return ForFacts().untyped_storage(tensor); }

uintptr_t AddressOf(py::handle storage) {
  return static_cast<uintptr_t>(Integer(ForFacts().storage_data_ptr(storage)));
}

// Not by `__dict__`, which makes a dict that stays with the tensor: of 344 bytes in Python 3.13.
bool HasAttributes(py::handle tensor) {
#if PY_VERSION_HEX < 0x030B0000
  PyObject** const dict = _PyObject_GetDictPtr(tensor.ptr());
  return dict != nullptr && *dict != nullptr && PyDict_GET_SIZE(*dict) != 0;
#else
  return Truth(ForFacts().attributes(tensor));
#endif
}

bool HasHooks(py::handle tensor) {
  const Anatomy& parts = Parts();
  if (TensorReader::IsDirect() && WordAt(parts.ImplementationOf(tensor.ptr()), parts.autograd) == 0) return false;
  return Truth(ForFacts().backward_hooks(tensor));
}

void Prefetch::operator()(size_t now) const {
  constexpr size_t kStep = 4;  // tensors
  const Anatomy& parts = Parts();
  if (parts.storage == 0) return;
  const auto length = static_cast<size_t>(PyList_GET_SIZE(tensors_));
  if (now + 3 * kStep < length) Fetch(PyList_GET_ITEM(tensors_, now + 3 * kStep), 1);
  if (const void* implementation = ImplementationAt(now + 2 * kStep); implementation != nullptr)
    Fetch(implementation, 4);
  if (const void* implementation = ImplementationAt(now + kStep); implementation != nullptr)
    Fetch(PointerAt(implementation, parts.storage), 2);
}

const void* Prefetch::ImplementationAt(size_t at) const {
  if (at >= static_cast<size_t>(PyList_GET_SIZE(tensors_))) return nullptr;
  PyObject* const object = PyList_GET_ITEM(tensors_, at);
  return IsTensor(object) ? Parts().ImplementationOf(object) : nullptr;
}

Addresses AddressesOf(py::handle tensor, const TensorFacts& facts) {
  return {tensor.ptr(), Parts().ImplementationOf(tensor.ptr()), facts.storage};
}

void PrefetchAgain(std::span<const Addresses> before, size_t now) {
  if (now + 12 < before.size()) Fetch(before[now + 12].object, 1);
  if (now + 8 >= before.size()) return;
  Fetch(before[now + 8].implementation, 3);
  Fetch(before[now + 8].storage, 2);
}

bool PrefetchesTensors() { return Parts().storage != 0; }

}  // namespace lazyckpt
