// The ring's memory: faults pages in and pins them.
//
// The writer thread does this between writes, one range at a time: a write waits for at most one range, and copies from
// devices wait only for the first range that is pinned.
#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>

#include "engine/engine.h"

namespace lazyckpt {
namespace {

constexpr size_t kRangeBytes = size_t{64} << 20;

}  // namespace

// Faults in and pins the next range of the ring. Returns whether there may be more to do right now. Throws
// std::bad_alloc before it changes anything.
bool Engine::PrepareRing() {
  size_t capacity = 0, pinned = 0;
  Device* pinner = nullptr;
  bool quiet = false;
  Locked([&] {
    capacity = ring_.capacity();
    pinned = pinned_bytes_;
    pinner = pinner_;
    quiet = std::all_of(jobs_.begin(), jobs_.end(), [](const auto& job) { return job->sealed && !job->held; });
  });
  const auto range_end = [&](size_t at) { return std::min(AlignUp(at + 1, kRangeBytes), capacity); };
  if (pinner != nullptr && pinned < capacity) {
    PinRange(*pinner, pinned, range_end(pinned));
    return true;
  }
  // Not while a job is laid out: faulting pages in would delay every thread that allocates memory.
  if (!quiet) return false;
  if (faulted_bytes_ < capacity) {
    const size_t end = range_end(faulted_bytes_);
    ring_.Prefault(faulted_bytes_, end);
    faulted_bytes_ = end;
    return true;
  }
  if (registered_bytes_ < capacity) {
    std::vector<std::span<std::byte>> slices;
    for (size_t at = 0; at < capacity; at += ring_.slice_bytes())
      slices.emplace_back(ring_.base() + at, std::min(ring_.slice_bytes(), capacity - at));
    (void)io_->RegisterBuffers(slices);  // on failure the kernel pins pages at every request
    registered_bytes_ = capacity;
  }
  return false;
}

// Runs even while a job is laid out, since its copies from devices wait for pinned memory.
void Engine::PinRange(Device& device, size_t at, size_t end) {
  Locked([&] {
    pins_.reserve(pins_.size() + 1);
    idle_bounces_.reserve(options_.copies_in_flight);
  });
  const std::span range(ring_.base() + at, end - at);
  ring_.Prefault(at, end);
  faulted_bytes_ = std::max(faulted_bytes_, end);
  const Status status = options_.pin_ring ? device.Pin(range) : Status(EPERM, "not asked for", "");
  std::byte* bounce = nullptr;
  if (!status.ok()) (void)device.AllocatePinned(options_.copies_in_flight * options_.chunk_bytes, &bounce);
  if (!status.ok()) return LeaveUnpinned(status, bounce);
  Locked([&] {
    pins_.push_back(range);
    pinned_bytes_ += range.size();
  });
  changed_.notify_all();
}

// Ends pinning: later copies from and to devices pass `bounce`, or are pageable without it.
void Engine::LeaveUnpinned(Status why, std::byte* bounce) {
  Locked([&] {
    unpinned_ = std::move(why);
    bounce_ = bounce;
    for (size_t i = 0; i < options_.copies_in_flight && bounce != nullptr; ++i)
      idle_bounces_.push_back(bounce + i * options_.chunk_bytes);
    pinned_bytes_ = std::numeric_limits<size_t>::max();
  });
  changed_.notify_all();
}

}  // namespace lazyckpt
