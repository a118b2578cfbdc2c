// The staging ring: one host buffer that every checkpoint passes through (DataStates-LLM, V-A1: coalescing).
#pragma once

#include <cstddef>
#include <deque>
#include <span>

#include "io/backend.h"
#include "status.h"

namespace lazyckpt {

// A FIFO of byte regions in one anonymous mapping.
//
// Regions are contiguous, start and end on kBlockBytes, and never overlap while live. Space is reused in the order of
// allocation, behind the oldest live region. No region crosses a slice, since io_uring and CUDA register one slice at
// once.
//
// The owner's mutex guards the bookkeeping. The memory of a region belongs to the thread that allocated it until Free.
// A forked child does not inherit the mapping.
class Ring {
 public:
  static constexpr size_t kSliceBytes = size_t{1} << 30;

  Ring() = default;
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Reserves addresses for max_bytes. Memory is used only up to the capacity, which is 0 at first.
  Status Map(size_t max_bytes, size_t slice_bytes = kSliceBytes);

  // Raises the capacity, up to max_bytes; false if a region is live.
  bool Grow(size_t capacity_bytes);

  // Returns a region of `bytes`, rounded up to kBlockBytes, in the first `within` bytes of the ring, or nullptr while
  // there is no room. Constant time. Throws std::bad_alloc before it changes anything.
  std::byte* Allocate(size_t bytes, size_t within);

  // Returns a region from Allocate, in any order.
  void Free(std::byte* region);

  // Faults in the pages [from, to), as huge pages where the kernel has them. Any thread may call.
  void Prefault(size_t from, size_t to) const;

  size_t capacity() const { return capacity_; }
  size_t used() const;  // bytes from the oldest live region to the newest, with gaps
  size_t slice_bytes() const { return slice_bytes_; }
  std::byte* base() const { return base_; }

 private:
  struct Region {
    size_t offset;
    size_t size;
    bool live;
  };
  // The first place at or after `offset` where a region of `size` does not cross a slice.
  size_t SkipSliceEnd(size_t offset, size_t size) const;

  std::byte* base_ = nullptr;
  size_t mapped_ = 0;
  size_t slice_bytes_ = kSliceBytes;
  size_t capacity_ = 0;
  std::deque<Region> regions_;  // oldest first; the front is live
};

}  // namespace lazyckpt
