// Keeps huge pages whole while they are protected and opened, and makes them of small ones.
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>

#include "witness/page_witness.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1; headers are often older than the kernel
#endif

namespace lazyckpt {
namespace {

// To make one huge page: the kernel may have none left, or another thread may hold a page for a moment.
constexpr unsigned kMostTries = 3;

uintptr_t RoomAfter(uintptr_t address) { return (address + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes; }

int MakeHuge(uintptr_t begin) {
  return madvise(reinterpret_cast<void*>(begin), kHugePageBytes, MADV_COLLAPSE) == 0 ? 0 : errno;
}

}  // namespace

void PageWindow::AddRooms(PageRange pages) {
  for (Room room{RoomAfter(pages.begin)}; room.pages().end <= pages.end; room.begin += kHugePageBytes)
    rooms_.push_back(room);
}

void PageWindow::CountCopied(size_t watched, std::span<const std::byte> from) {
  Watched& w = watched_[watched];
  const PageRange bytes = PageRange::Common(PageRange::Exactly(from), w.pages);
  w.to_copy -= std::min(w.to_copy, bytes.bytes());
  const auto before = [](const Room& room, uintptr_t address) { return room.pages().end <= address; };
  for (auto room = std::lower_bound(rooms_.begin(), rooms_.end(), bytes.begin, before);
       room != rooms_.end() && room->begin < bytes.end; ++room)
    room->to_copy -= std::min(room->to_copy, PageRange::Common(bytes, room->pages()).bytes());
}

// What to open, by address, once `pages` were checked. A room that they touch is opened as a whole, once all of it was
// checked; with `all`, in any case.
std::vector<PageRange> PageWindow::Openable(PageRange pages, bool all) const {
  std::vector<PageRange> open;
  const auto add = [&open](PageRange range) {
    if (range.empty()) return;
    if (!open.empty() && open.back().end == range.begin)
      open.back().end = range.end;
    else
      open.push_back(range);
  };
  const auto before = [](const Room& room, uintptr_t address) { return room.pages().end <= address; };
  uintptr_t at = pages.begin;
  for (auto room = std::lower_bound(rooms_.begin(), rooms_.end(), at, before);
       room != rooms_.end() && room->begin < pages.end; ++room) {
    add({at, room->begin});
    if (all || room->to_copy == 0) add(room->pages());
    at = room->pages().end;
  }
  add({at, pages.end});
  return open;
}

void PageWitness::WantHugePages(const PageWindow& window) {
  const std::lock_guard lock(registering_);
  for (const PageWindow::Room& room : window.rooms_)
    if (unsigned& tries = tries_[room.begin]; tries < kMostTries && wanted_.insert(room.begin).second) ++tries;
}

bool PageWitness::CollapseNext() {
  uintptr_t begin = 0;
  {
    const std::shared_lock open(mutex_);
    const std::lock_guard lock(registering_);
    if (!windows_.empty() || wanted_.empty()) return false;
    begin = wanted_.extract(wanted_.begin()).value();
  }
  if (MakeHuge(begin) != 0) return true;
  const std::lock_guard lock(registering_);
  if (const auto tries = tries_.find(begin); tries != tries_.end()) tries->second = kMostTries;
  return true;
}

Status PageWitness::TryCollapse() {
  constexpr size_t kBytes = 2 * kHugePageBytes;
  void* const memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return Status(errno, "mmap", "");
  const uintptr_t begin = RoomAfter(reinterpret_cast<uintptr_t>(memory));
  *reinterpret_cast<volatile char*>(begin) = 1;
  const int error = MakeHuge(begin);
  munmap(memory, kBytes);
  return error == 0 ? Status::Ok() : Status(error, "MADV_COLLAPSE", "");
}

}  // namespace lazyckpt
