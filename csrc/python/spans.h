// Which bytes of their storages tensors show: a compact archive holds no others.
#pragma once

#include <cstdint>
#include <vector>

#include "python/tensor_facts.h"

namespace lazyckpt {

// The bytes of a storage from the first to the last element of one tensor.
struct Use {
  uint32_t storage;  // its number
  int64_t storage_nbytes;
  int64_t begin, end;  // both 0 if the tensor has no element
  int64_t offset;      // of the tensor in the storage, in elements
  int64_t itemsize;
};

Use UseOf(const TensorFacts& facts, uint32_t storage);

// Some bytes of a storage, which a file holds as a storage of their own.
struct Span {
  uint32_t storage;
  int64_t begin, nbytes;

  // The offset in the span, in elements, of a tensor that has its bytes there.
  int64_t OffsetOf(const Use& use) const {
    const bool lies_nowhere = nbytes == 0 && use.storage_nbytes > 0;
    return lies_nowhere ? 0 : use.offset - begin / use.itemsize;
  }
};

struct Spans {
  std::vector<Span> spans{};   // in the order of the first tensor of each
  std::vector<uint32_t> of{};  // the number of the span of each tensor
};

// The spans of tensors, in their order. Tensors that have a byte in common have one span. All of a storage is one span
// if that covers it, or if a tensor reaches beyond it; tensors without elements then belong to that span, too.
Spans SpansOf(const std::vector<Use>& uses);

}  // namespace lazyckpt
