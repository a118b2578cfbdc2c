#include "engine/ring.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "witness/uffd.h"

namespace lazyckpt {

Ring::~Ring() {
  if (base_ != nullptr) munmap(base_, mapped_);
}

Status Ring::Map(size_t max_bytes, size_t slice_bytes) {
  const size_t size = AlignUp(std::max(max_bytes, kBlockBytes), kHugePageBytes);
  // Map one more huge page so that the ring can begin on one, and unmap the rest at both ends.
  void* raw =
      mmap(nullptr, size + kHugePageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return Status(errno, "mmap of the staging ring", "");
  const auto start = reinterpret_cast<uintptr_t>(raw);
  const size_t before = AlignUp(start, kHugePageBytes) - start;
  if (before > 0) munmap(raw, before);
  base_ = static_cast<std::byte*>(raw) + before;
  mapped_ = size;
  if (const size_t after = kHugePageBytes - before; after > 0) munmap(base_ + size, after);
  madvise(base_, mapped_, MADV_HUGEPAGE);  // only for speed
  if (madvise(base_, mapped_, MADV_DONTFORK) != 0) return Status(errno, "madvise(MADV_DONTFORK)", "");
  slice_bytes_ = slice_bytes;
  return Status::Ok();
}

bool Ring::Grow(size_t capacity_bytes) {
  capacity_bytes = std::min(AlignUp(capacity_bytes, kBlockBytes), mapped_);
  if (capacity_bytes <= capacity_) return true;
  if (!regions_.empty()) return false;
  capacity_ = capacity_bytes;
  return true;
}

size_t Ring::SkipSliceEnd(size_t offset, size_t size) const {
  const size_t slice_end = AlignUp(offset + 1, slice_bytes_);
  return offset + size <= slice_end ? offset : slice_end;
}

std::byte* Ring::Allocate(size_t bytes, size_t within) {
  const size_t size = AlignUp(bytes, kBlockBytes);
  if (size == 0 || size > capacity_ || size > slice_bytes_) return nullptr;
  size_t offset = 0;
  if (!regions_.empty()) {
    const size_t oldest = regions_.front().offset;
    const Region& newest = regions_.back();
    offset = SkipSliceEnd(newest.offset + newest.size, size);
    const bool wrapped = newest.offset < oldest;
    if (!wrapped && offset + size > capacity_) {
      offset = 0;  // wrap: the free space before the oldest region
      if (size > oldest) return nullptr;
    } else if (wrapped && offset + size > oldest) {
      return nullptr;
    }
  }
  if (offset + size > within) return nullptr;
  regions_.push_back({offset, size, true});
  return base_ + offset;
}

void Ring::Free(std::byte* region) {
  const auto offset = static_cast<size_t>(region - base_);
  for (Region& r : regions_) {
    if (r.offset == offset && r.live) {
      r.live = false;
      break;
    }
  }
  while (!regions_.empty() && !regions_.front().live) regions_.pop_front();
}

void Ring::Prefault(size_t from, size_t to) const {
  // One huge page at a time: a fork or an mmap of training waits for each call.
  constexpr size_t kStep = kHugePageBytes;
  to = std::min(to, mapped_);
  for (size_t at = from; at < to; at += kStep) {
    const size_t n = std::min(kStep, to - at);
#ifdef MADV_POPULATE_WRITE
    if (madvise(base_ + at, n, MADV_POPULATE_WRITE) != 0) return;  // Linux < 5.14: copies fault the pages in
#else
    (void)n;
#endif
  }
}

size_t Ring::used() const {
  if (regions_.empty()) return 0;
  const size_t oldest = regions_.front().offset;
  const size_t end = regions_.back().offset + regions_.back().size;
  return regions_.back().offset < oldest ? capacity_ - oldest + end : end - oldest;
}

}  // namespace lazyckpt
