// The staging ring: one host buffer that every checkpoint passes through (DataStates-LLM, V-A1: coalescing).
#pragma once

#include <cstddef>
#include <deque>
#include <span>

#include "status.h"

namespace lazyckpt {

inline constexpr size_t kBlockBytes = 4096;  // O_DIRECT: offsets, lengths and addresses are multiples of this

inline constexpr size_t AlignUp(size_t n, size_t to) { return (n + to - 1) / to * to; }

// A FIFO of byte regions in one anonymous mapping.
//
// Regions are contiguous, start and end on kBlockBytes, and never overlap while live: space is reused only
// behind the oldest live region, in the order of allocation. No region crosses a slice, because a slice is what
// io_uring and CUDA register at once.
//
// The bookkeeping is not thread-safe: one mutex of the owner guards it. The memory of a region belongs to
// whoever allocated it until Free. The mapping is not inherited by fork.
class Ring {
 public:
  static constexpr size_t kSliceBytes = size_t{1} << 30;

  Ring() = default;
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Reserves addresses for max_bytes; memory is used only up to the capacity, 0 at first.
  Status Map(size_t max_bytes, size_t slice_bytes = kSliceBytes);

  // Raises the capacity, up to what was mapped. Only an empty ring grows; otherwise false.
  bool Grow(size_t capacity_bytes);

  // A region of `bytes` rounded up to kBlockBytes in the first `within` bytes of the ring, or nullptr while there is no
  // room. Constant time.
  std::byte* Allocate(size_t bytes, size_t within);

  // Gives back a region that Allocate returned. Out of order is fine; its space is reused in order.
  void Free(std::byte* region);

  // Faults pages [from, to) in, in huge pages where the kernel has them. Any thread, any time.
  void Prefault(size_t from, size_t to) const;

  // Pages [from, to) will be on a NUMA node, if that has room. move: so will those that are there, unless somebody
  // pinned them; it takes milliseconds. Elsewhere is as right, only slower.
  void Prefer(int node, size_t from, size_t to, bool move) const;
  int NodeOf(size_t offset) const;  // where this page is; faults it in. -1: not known

  size_t capacity() const { return capacity_; }
  size_t used() const;  // bytes between the oldest live region and the newest, gaps included
  size_t slice_bytes() const { return slice_bytes_; }
  std::byte* base() const { return base_; }

 private:
  struct Region {
    size_t offset;
    size_t size;
    bool live;
  };
  // Where a region of `size` may start at or after `offset` without crossing a slice.
  size_t SkipSliceEnd(size_t offset, size_t size) const;

  std::byte* base_ = nullptr;
  size_t mapped_ = 0;
  size_t slice_bytes_ = kSliceBytes;
  size_t capacity_ = 0;
  std::deque<Region> regions_;  // oldest first; the front is always live
};

}  // namespace lazyckpt
