// What a save asks of every tensor, in one place: where its storage is, and how the tensor shows it.
//
// torch exports C functions that tell most of it in a few nanoseconds (the "shim" of AOTInductor). The rest is in the
// words of a tensor that tensor_facts.cc finds by comparison with what torch says in Python. With another torch, every
// fact is asked in Python's way, ten times as slowly.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "python/ask.h"

namespace lazyckpt {

constexpr int kOnHost = -1, kElsewhere = -2;  // instead of a CUDA device

struct TensorFacts {
  const void* storage = nullptr;  // the address of torch's object, `_cdata` in Python
  int64_t storage_nbytes = 0;
  uintptr_t data = 0;  // the address of the first element; 0 if there is none, as for memory on no device
  py::handle dtype{};  // lives forever
  int64_t itemsize = 0;
  int64_t offset = 0;                           // elements
  std::span<const int64_t> sizes{}, strides{};  // elements; valid until the next Read() or until the tensor changes
  int device = kOnHost;
  bool requires_grad = false;
  bool is_altered = false;  // negated or conjugated: its bytes are not its values
  bool is_inference = false;

  // The address of the storage's first byte; 0 if the tensor does not tell, since it has no element.
  uintptr_t storage_data() const { return data == 0 ? 0 : data - static_cast<uintptr_t>(offset * itemsize); }
  int64_t numel() const;
  bool is_contiguous() const;
  bool fills_storage() const { return numel() * itemsize == storage_nbytes && is_contiguous(); }
};

// Reads one tensor after the other. Everything needs the GIL.
class TensorReader {
 public:
  // Returns false for a tensor without a storage and sizes of its own: sparse, nested, …
  bool Read(py::handle tensor, TensorFacts* facts);

  // Whether the fast way is there.
  static bool IsDirect();
  // For tests: asks everything in Python's way.
  static void AskAlways(bool always);

 private:
  bool Ask(py::handle tensor, TensorFacts* facts);

  std::vector<int64_t> geometry_;  // of the last tensor that was asked in Python's way
};

// Whether an object is a tensor of no subclass but Parameter.
bool IsOfTorch(py::handle object);

py::object StorageOf(py::handle tensor);
uintptr_t AddressOf(py::handle storage);  // of its first byte

// Whether a tensor has attributes of the user's, or hooks: its pickle says more than its facts.
bool HasAttributes(py::handle tensor);
bool HasHooks(py::handle tensor);

// Numbers by address. An open table: a map of the standard library takes three times as long.
class Numbers {
 public:
  void Reserve(size_t count) {
    size_t size = 64;
    while (size < 2 * (count + 1)) size *= 2;
    if (size > slots_.size()) Resize(size);
  }
  size_t size() const { return count_; }

  // The number of `address`, or nullopt and from now on `next`.
  std::optional<uint32_t> FindOrAdd(const void* address, uint32_t next) {
    if (2 * (count_ + 1) > slots_.size()) Resize(std::max<size_t>(64, 4 * slots_.size()));
    Slot& slot = At(address);
    if (slot.address != nullptr) return slot.number;
    slot = {address, next};
    ++count_;
    return std::nullopt;
  }
  std::optional<uint32_t> Find(const void* address) {
    if (slots_.empty()) return std::nullopt;
    const Slot& slot = At(address);
    return slot.address == nullptr ? std::nullopt : std::optional(slot.number);
  }

 private:
  struct Slot {
    const void* address = nullptr;
    uint32_t number = 0;
  };

  Slot& At(const void* address) {
    const size_t mask = slots_.size() - 1;
    // Objects that were made together lie together, here as well.
    size_t at = reinterpret_cast<uintptr_t>(address) >> 4 & mask;
    while (slots_[at].address != nullptr && slots_[at].address != address) at = (at + 1) & mask;
    return slots_[at];
  }

  void Resize(size_t size) {
    std::vector<Slot> old(size);
    old.swap(slots_);
    for (const Slot& slot : old)
      if (slot.address != nullptr) At(slot.address) = slot;
  }

  std::vector<Slot> slots_{};
  size_t count_ = 0;
};

// Loads the next tensors of a list into the cache while this one is asked: training has emptied the caches since the
// last save, and tensors lie anywhere in memory. Only for speed.
class Prefetch {
 public:
  explicit Prefetch(const py::list& tensors) : tensors_(tensors.ptr()) {}

  void operator()(size_t now) const;  // the tensor `now` is about to be asked

 private:
  const void* ImplementationAt(size_t at) const;

  PyObject* tensors_;
};

bool PrefetchesTensors();

// Where a tensor was when it was read.
struct Addresses {
  const void *object, *implementation, *storage;
};
Addresses AddressesOf(py::handle tensor, const TensorFacts& facts);

// Loads the tensors that are likely to be read soon: those that an earlier pass read then. `now`: how many were read.
void PrefetchAgain(std::span<const Addresses> before, size_t now);

}  // namespace lazyckpt
