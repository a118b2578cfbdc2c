#include "python/prefetch.h"

#include <cstdint>
#include <cstring>

#include "python/torch_questions.h"

namespace lazyckpt {
namespace {

constexpr Py_ssize_t kStep = 4;  // tensors

uintptr_t WordAt(const void* address, size_t offset) {
  uintptr_t word = 0;
  std::memcpy(&word, static_cast<const char*>(address) + offset, sizeof word);
  return word;
}

// The offset of the implementation's address in a tensor, and of the storage's address in the implementation. Torch
// promises neither, so they are searched for in one tensor; 0 if not found.
struct Anatomy {
  Anatomy() {
    try {
      const Ref tensor = Own(PyObject_CallNoArgs(Ask().tensor));
      const uintptr_t found = Address(Own(PyObject_GetAttrString(tensor.get(), "_cdata")));
      implementation = Find(tensor.get(), static_cast<size_t>(Py_TYPE(tensor.get())->tp_basicsize), found);
      if (implementation == 0) return;
      constexpr size_t kHead = 64;  // bytes; an implementation is three times as large
      const uintptr_t storage = Address(Ask().cdata(Ask().untyped_storage(tensor.get()).get()));
      in_implementation = Find(reinterpret_cast<const void*>(found), kHead, storage);
    } catch (const PythonError&) {
      PyErr_Clear();
    }
  }

  static uintptr_t Address(const Ref& number) {
    void* address = PyLong_AsVoidPtr(number.get());
    if (address == nullptr && PyErr_Occurred() != nullptr) throw PythonError();
    return reinterpret_cast<uintptr_t>(address);
  }

  static size_t Find(const void* object, size_t size, uintptr_t wanted) {
    if (wanted == 0) return 0;
    for (size_t at = sizeof(void*); at + sizeof wanted <= size; at += sizeof wanted)
      if (WordAt(object, at) == wanted) return at;
    return 0;
  }

  size_t implementation = 0;
  size_t in_implementation = 0;
};

const Anatomy& Parts() {
  static const Anatomy* parts = nullptr;  // guarded by the GIL, as in Ask()
  if (parts == nullptr) parts = new Anatomy;
  return *parts;
}

void Fetch(const void* address, int lines) {
  for (int line = 0; line < lines; ++line) __builtin_prefetch(static_cast<const char*>(address) + 64 * line);
}

}  // namespace

Prefetch::Prefetch(PyObject* tensors) : tensors_(tensors) {}

bool Prefetch::Works() { return Parts().implementation != 0 && Parts().in_implementation != 0; }

void Prefetch::operator()(Py_ssize_t now) const {
  if (PyObject* object = At(now + 3 * kStep); object != nullptr) Fetch(object, 1);
  if (const void* implementation = ImplementationOf(At(now + 2 * kStep)); implementation != nullptr)
    Fetch(implementation, 4);
  if (const void* implementation = ImplementationOf(At(now + kStep));
      implementation != nullptr && Parts().in_implementation != 0)
    Fetch(reinterpret_cast<const void*>(WordAt(implementation, Parts().in_implementation)), 2);
}

const void* Prefetch::ImplementationOf(PyObject* object) const {
  const bool known = object != nullptr && Parts().implementation != 0 &&
                     PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(Ask().tensor));
  return known ? reinterpret_cast<const void*>(WordAt(object, Parts().implementation)) : nullptr;
}

}  // namespace lazyckpt
