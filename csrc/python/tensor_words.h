// Where torch keeps the facts of a tensor: the words of its objects that are read, and the exported C functions.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>

#include "python/ask.h"

namespace lazyckpt {

struct FactQuestions {
  py::object torch = py::module_::import("torch");

#if PY_VERSION_HEX >= 0x030B0000
  Question attributes{py::module_::import("builtins").attr("object"), "__getstate__"};  // None if there are none
#endif
  Question cdata{torch.attr("UntypedStorage"), "_cdata"};
  Question storage_data_ptr{torch.attr("UntypedStorage"), "data_ptr"};
  Question storage_nbytes{torch.attr("UntypedStorage"), "nbytes"};

  py::object parameter = py::module_::import("torch.nn").attr("Parameter");
  py::object tensor = torch.attr("Tensor");
  Question backward_hooks{tensor, "_backward_hooks"};
  Question data_ptr{tensor, "data_ptr"};
  Question dtype{tensor, "dtype"};
  Question get_device{tensor, "get_device"};
  Question implementation{tensor, "_cdata"};
  Question is_conj{tensor, "is_conj"};
  Question is_cpu{tensor, "is_cpu"};
  Question is_cuda{tensor, "is_cuda"};
  Question is_inference{tensor, "is_inference"};
  Question is_neg{tensor, "is_neg"};
  Question requires_grad{tensor, "requires_grad"};
  Question shape{tensor, "shape"};
  Question storage_offset{tensor, "storage_offset"};
  Question stride{tensor, "stride"};
  Question untyped_storage{tensor, "untyped_storage"};
  Question version{tensor, "_version"};
};

inline const FactQuestions& ForFacts() { return TheOnly<FactQuestions>(); }

constexpr size_t kWord = sizeof(uintptr_t);
constexpr size_t kImplementationBytes = 22 * kWord;  // all of one in torch 2.13

inline uintptr_t WordAt(const void* address, size_t offset) {
  uintptr_t word = 0;
  std::memcpy(&word, static_cast<const char*>(address) + offset, sizeof word);
  return word;
}

inline const void* PointerAt(const void* address, size_t offset) {
  return reinterpret_cast<const void*>(WordAt(address, offset));
}

// The offset of the only such word behind the first; 0 if there is none, or if there are several.
template <class Predicate>
size_t OnlyWord(const void* object, size_t size, Predicate is_wanted) {
  size_t found = 0;
  for (size_t at = kWord; at + kWord <= size; at += kWord) {
    if (!is_wanted(at, WordAt(object, at))) continue;
    if (found != 0) return 0;
    found = at;
  }
  return found;
}

// The words of a tensor and of its implementation that are read. torch promises none, so they are searched for; 0 if
// not found.
struct Anatomy {
  size_t implementation = 0;  // in the Python object: the address of the implementation
  // In the implementation:
  size_t storage = 0;   // the address of the storage
  size_t autograd = 0;  // 0 if the tensor needs no gradient and has no hooks
  size_t keys = 0;      // the set of dispatch keys: the device, and what kind of tensor it is
  uintptr_t kind = 0;   // the first word of every strided tensor: sparse, nested and other tensors are of other classes

  Anatomy() {
    try {
      Find();
    } catch (const std::exception&) {  // another torch
    }
  }

  const void* ImplementationOf(PyObject* tensor) const { return PointerAt(tensor, implementation); }

 private:
  void Find() {
    const py::object zeros = ForFacts().torch.attr("zeros");
    const py::object tensor = zeros(3);
    const auto at = tensor.attr("_cdata").cast<uintptr_t>();
    const size_t size = static_cast<size_t>(Py_TYPE(tensor.ptr())->tp_basicsize);
    implementation = OnlyWord(tensor.ptr(), size, [at](size_t, uintptr_t word) { return word == at; });
    if (implementation == 0) return;
    const auto* const words = reinterpret_cast<const void*>(at);
    const auto wanted = ForFacts().cdata(ForFacts().untyped_storage(tensor)).cast<uintptr_t>();
    storage = OnlyWord(words, kImplementationBytes, [wanted](size_t, uintptr_t word) { return word == wanted; });
    if (storage == 0) return;
    const auto set = KeysOf(tensor);
    keys = OnlyWord(words, kImplementationBytes, [set](size_t, uintptr_t word) { return word == set; });
    uintptr_t before[kImplementationBytes / kWord];
    std::memcpy(before, words, sizeof before);
    tensor.attr("requires_grad_")();
    autograd = OnlyWord(words, kImplementationBytes,
                        [&before](size_t offset, uintptr_t word) { return before[offset / kWord] == 0 && word != 0; });
    kind = WordAt(words, 0);
  }

 public:
  static uintptr_t KeysOf(const py::object& tensor) {
    return ForFacts().torch.attr("_C").attr("_dispatch_keys")(tensor).attr("raw_repr")().cast<uintptr_t>();
  }
};

inline const Anatomy& Parts() { return TheOnly<Anatomy>(); }

// The exported C functions. A handle is the address of a word that holds the address of a tensor's implementation; such
// a word is in the Python object. They are asked of strided tensors alone, for which they cannot fail.
struct Shim {
  using Handle = void*;
  int32_t (*dim)(Handle, int64_t*) = nullptr;
  int32_t (*sizes)(Handle, int64_t**) = nullptr;
  int32_t (*strides)(Handle, int64_t**) = nullptr;
  int32_t (*offset)(Handle, int64_t*) = nullptr;
  int32_t (*dtype)(Handle, int32_t*) = nullptr;
  int32_t (*device)(Handle, int32_t*) = nullptr;
  int32_t (*data)(Handle, void**) = nullptr;
  int32_t (*storage_size)(Handle, int64_t*) = nullptr;
  bool is_complete = false;

  Shim() {
    void* const library = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
    if (library == nullptr) return;
    const auto find = [library]<class F>(F* function, const char* name) {
      *function = reinterpret_cast<F>(dlsym(library, name));
      return *function != nullptr;
    };
    is_complete = find(&dim, "aoti_torch_get_dim") && find(&sizes, "aoti_torch_get_sizes") &&
                  find(&strides, "aoti_torch_get_strides") && find(&offset, "aoti_torch_get_storage_offset") &&
                  find(&dtype, "aoti_torch_get_dtype") && find(&device, "aoti_torch_get_device_index") &&
                  find(&data, "aoti_torch_get_data_ptr") && find(&storage_size, "aoti_torch_get_storage_size");
  }
};

}  // namespace lazyckpt
