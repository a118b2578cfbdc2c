#include "page_witness.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <new>
#include <numeric>
#include <utility>

// Older headers than the kernel are common.
#ifndef UFFD_USER_MODE_ONLY
#define UFFD_USER_MODE_ONLY 1
#endif
#ifndef UFFD_FEATURE_WP_UNPOPULATED
#define UFFD_FEATURE_WP_UNPOPULATED (1 << 13)
#endif
#ifndef UFFD_FEATURE_WP_ASYNC
#define UFFD_FEATURE_WP_ASYNC (1 << 15)
#endif

namespace lazyckpt {
namespace {

// linux/fs.h has them from 6.7 on.
struct ScanRegion {
  uint64_t start, end, categories;
};
struct ScanArguments {
  uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
  uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
constexpr uint64_t kPageIsWritten = 1 << 1;
constexpr uint64_t kScanProtectMatching = 1 << 0;
constexpr uint64_t kScanCheckAsync = 1 << 1;  // EPERM where the memory is not, or no longer, registered
#define LAZYCKPT_PAGEMAP_SCAN _IOWR('f', 16, ScanArguments)

PageRange Common(const PageRange& a, const PageRange& b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

}  // namespace

PageRange PageRange::Inside(const void* data, size_t size) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  return {(address + kPageBytes - 1) / kPageBytes * kPageBytes, (address + size) / kPageBytes * kPageBytes};
}

PageRange PageRange::Around(const void* data, size_t size) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  return {address / kPageBytes * kPageBytes, (address + size + kPageBytes - 1) / kPageBytes * kPageBytes};
}

std::array<std::span<const std::byte>, 2> EdgesOf(std::span<const std::byte> memory) {
  const PageRange pages = PageRange::Inside(memory.data(), memory.size());
  if (pages.empty()) return {memory, {}};
  const auto begin = reinterpret_cast<uintptr_t>(memory.data());
  return {memory.first(pages.begin - begin), memory.subspan(pages.end - begin)};
}

size_t PageWindow::Add(PageRange pages) {
  watched_.emplace_back().pages = pages;
  return watched_.size() - 1;
}

PageWitness* PageWitness::OfProcess(Status* why) {
  static std::mutex making;
  static PageWitness* made = nullptr;  // for good: threads may use it while the process ends
  static pid_t maker = 0;
  static Status refused;
  const std::lock_guard lock(making);
  if (maker != getpid()) {  // in a forked child the old one speaks of the parent's memory
    maker = getpid();
    made = new PageWitness;
    refused = made->Start();
    if (!refused.ok()) delete std::exchange(made, nullptr);
  }
  *why = refused;
  return made;
}

Status PageWitness::Start() {
  if (sysconf(_SC_PAGESIZE) != static_cast<long>(kPageBytes)) return Status(ENOTSUP, "pages other than 4 KiB", "");
  uffd_ = static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY));
  if (uffd_ < 0) return Status(errno, "userfaultfd", "");
  pagemap_ = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  Status status = pagemap_ < 0 ? Status(errno, "open", "/proc/self/pagemap") : Status::Ok();
  uffdio_api api{};
  api.api = UFFD_API;
  api.features = UFFD_FEATURE_WP_ASYNC | UFFD_FEATURE_WP_UNPOPULATED;
  if (status.ok() && ioctl(uffd_, UFFDIO_API, &api) != 0)
    status = Status(errno, "userfaultfd without asynchronous write protection (Linux 6.7 has it)", "");
  if (status.ok()) status = TryOnOwnPages();
  if (status.ok()) return status;
  close(uffd_);
  if (pagemap_ >= 0) close(pagemap_);
  return status;
}

// What the calls promise, before anybody relies on it.
Status PageWitness::TryOnOwnPages() {
  constexpr size_t kBytes = 4 * kPageBytes;
  void* const memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return Status(errno, "mmap", "");
  auto* const bytes = static_cast<volatile char*>(memory);
  bytes[0] = 1;
  bytes[kPageBytes] = 1;
  const PageRange pages = PageRange::Inside(memory, kBytes);
  Status status;
  size_t written = 0;
  const auto count = [&written](PageRange run) { written += run.bytes(); };
  if (!Register(pages) || WriteProtect(pages, true) != 0) status = Status(errno, "userfaultfd", "");
  (void)bytes[2 * kPageBytes];  // to read is not to write, also where nothing was before
  if (const int error = status.ok() ? Scan(pages, false, count) : 0; error != 0)
    status = Status(error, "PAGEMAP_SCAN (Linux 6.7 has it)", "");
  if (status.ok() && written != 0) status = Status(ENOTSUP, "write protection that reports what nobody wrote", "");
  bytes[kPageBytes] = 2;
  bytes[3 * kPageBytes] = 2;
  if (status.ok() && (Scan(pages, true, count) != 0 || written != 2 * kPageBytes))
    status = Status(ENOTSUP, "write protection that misses a write", "");
  munmap(memory, kBytes);
  registered_.clear();
  return status;
}

int PageWitness::WriteProtect(PageRange pages, bool on) const {
  uffdio_writeprotect call{};
  call.range = {pages.begin, pages.bytes()};
  call.mode = on ? UFFDIO_WRITEPROTECT_MODE_WP : 0;
  while (ioctl(uffd_, UFFDIO_WRITEPROTECT, &call) != 0)
    if (errno != EAGAIN && errno != EINTR) return errno;  // EAGAIN: the address space is changing just now
  return 0;
}

template <class F>
int PageWitness::Scan(PageRange pages, bool protect, F found) const {
  std::array<ScanRegion, 64> runs;
  ScanArguments call{};
  call.size = sizeof call;
  call.flags = kScanCheckAsync | (protect ? kScanProtectMatching : 0);
  call.end = pages.end;
  call.vec = reinterpret_cast<uint64_t>(runs.data());
  call.vec_len = runs.size();
  call.category_mask = call.return_mask = kPageIsWritten;
  for (call.start = pages.begin; call.start < pages.end; call.start = call.walk_end) {
    const int count = ioctl(pagemap_, LAZYCKPT_PAGEMAP_SCAN, &call);
    if (count < 0 && errno == EINTR) {
      call.walk_end = call.start;
      continue;
    }
    if (count < 0) return errno;
    for (int i = 0; i < count; ++i) found(PageRange{runs[i].start, runs[i].end});
    if (call.walk_end <= call.start) break;
  }
  return 0;
}

// All pages but those that are protected. UFFDIO_WRITEPROTECT does the same and takes ten times as long: 14 ms for
// 512 MiB of small pages.
bool PageWitness::ProtectWritten(PageRange pages) const {
  return Scan(pages, true, [](PageRange) {}) == 0;
}

bool PageWitness::IsRegistered(PageRange pages) {
  const std::lock_guard lock(registering_);
  const auto after = registered_.upper_bound(pages.begin);
  return after != registered_.begin() && std::prev(after)->second >= pages.end;
}

// By mapping: to register each storage by itself would split mappings, of which a process may have 65,530.
bool PageWitness::Register(PageRange pages) {
  const std::lock_guard lock(registering_);
  std::FILE* const maps = std::fopen("/proc/self/maps", "re");
  if (maps == nullptr) return false;
  char line[512];
  uintptr_t covered = pages.begin;
  while (covered < pages.end && std::fgets(line, sizeof line, maps) != nullptr) {
    unsigned long begin = 0, end = 0, offset = 0, inode = 0;
    char flags[5] = "";
    unsigned major = 0, minor = 0;
    const int fields =
        std::sscanf(line, "%lx-%lx %4s %lx %x:%x %lu", &begin, &end, flags, &offset, &major, &minor, &inode);
    while (std::strchr(line, '\n') == nullptr && std::fgets(line, sizeof line, maps) != nullptr) {
    }
    if (fields != 7 || end <= covered) continue;
    // Of shared memory the kernel would not tell what another process writes; a file may change below a private one.
    if (begin > covered || flags[1] != 'w' || flags[3] != 'p' || inode != 0) break;
    uffdio_register call{};
    call.range = {begin, end - begin};
    call.mode = UFFDIO_REGISTER_MODE_WP;
    if (ioctl(uffd_, UFFDIO_REGISTER, &call) != 0) break;  // EBUSY: another user of userfaultfd has it
    for (auto old = registered_.lower_bound(begin); old != registered_.end() && old->first < end;)
      old = registered_.erase(old);
    registered_[begin] = end;
    covered = end;
  }
  std::fclose(maps);
  if (covered < pages.end) return false;
  // Neighbours as one: a storage may reach over several mappings.
  for (auto at = registered_.begin(); at != registered_.end();) {
    const auto next = std::next(at);
    if (next == registered_.end()) break;
    if (next->first <= at->second) {
      at->second = std::max(at->second, next->second);
      registered_.erase(next);
    } else {
      at = next;
    }
  }
  return true;
}

size_t PageWindow::FindAfter(uintptr_t address) const {
  const auto reaches = [this](uint32_t at, uintptr_t a) { return watched_[at].pages.end <= a; };
  return std::lower_bound(by_address_.begin(), by_address_.end(), address, reaches) - by_address_.begin();
}

void PageWitness::Open(PageWindow* window) {
  auto& order = window->by_address_;
  order.resize(window->watched_.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [window](uint32_t a, uint32_t b) {
    return window->watched_[a].pages.begin < window->watched_[b].pages.begin;
  });
  for (size_t i = 1; i < order.size(); ++i) {
    const auto& before = window->watched_[order[i - 1]];
    auto& here = window->watched_[order[i]];
    here.refused = here.pages.Overlaps(before.pages);
  }
  const std::unique_lock lock(mutex_);
  if (!windows_.empty())
    for (PageWindow::Watched& ours : window->watched_) ours.refused = ours.refused || !Share(window, &ours);
  windows_.push_back(window);
  window->open_ = true;
}

// Under the exclusive lock: whether no other window stands against watching these pages.
bool PageWitness::Share(PageWindow* window, PageWindow::Watched* ours) {
  for (PageWindow* other : windows_) {
    const size_t at = other == window ? other->by_address_.size() : other->FindAfter(ours->pages.begin);
    if (at == other->by_address_.size()) continue;
    PageWindow::Watched& theirs = other->watched_[other->by_address_[at]];
    if (theirs.refused || !theirs.pages.Overlaps(ours->pages)) continue;
    if (theirs.pages != ours->pages || !theirs.is_protected) return false;
    // What was written so far is evidence for the other window alone; what is written from here on, for both.
    const int error = Scan(ours->pages, true, [&theirs](PageRange run) {
      for (uintptr_t page = run.begin; page < run.end && !theirs.written; page += kPageBytes)
        theirs.written = std::none_of(theirs.done.begin(), theirs.done.end(),
                                      [page](const PageRange& d) { return d.begin <= page && page < d.end; });
    });
    if (error != 0) return false;
    ours->is_protected = true;
  }
  return true;
}

bool PageWitness::Protect(PageWindow* window, size_t watched, bool again) {
  PageWindow::Watched& w = window->watched_[watched];
  if (w.refused || w.is_protected) return !w.refused;
  bool done = (again || IsRegistered(w.pages)) && ProtectWritten(w.pages);
  done = done || (Register(w.pages) && ProtectWritten(w.pages));  // new memory, or other at the old place
  const std::shared_lock lock(mutex_);
  const std::lock_guard changing(window->mutex_);
  w.is_protected = done;
  w.refused = !done;
  return done;
}

bool PageWitness::ProtectAhead(PageRange pages) {
  const std::shared_lock lock(mutex_);
  return windows_.empty() && IsRegistered(pages) && ProtectWritten(pages);
}

void PageWitness::GiveUp(std::span<const PageRange> pages) {
  const std::shared_lock lock(mutex_);
  for (const PageRange& range : pages)
    if (!IsAwaited(nullptr, range)) (void)WriteProtect(range, false);
}

// Whether some other window has pages of these to be copied yet. The ranges of a window do not overlap, so that the
// first that reaches into them, and those behind it, are all there are.
bool PageWitness::IsAwaited(const PageWindow* by_others_than, PageRange pages) const {
  for (PageWindow* window : windows_) {
    if (window == by_others_than) continue;
    for (size_t at = window->FindAfter(pages.begin); at < window->by_address_.size(); ++at) {
      const PageWindow::Watched& w = window->watched_[window->by_address_[at]];
      if (w.pages.begin >= pages.end) break;
      if (w.refused) continue;
      const std::lock_guard changing(window->mutex_);
      const auto covers = [&pages](const PageRange& d) { return d.begin <= pages.begin && pages.end <= d.end; };
      if (std::none_of(w.done.begin(), w.done.end(), covers)) return true;
    }
  }
  return false;
}

bool PageWitness::CheckAndOpen(PageWindow* window, size_t watched, const void* data, size_t size) {
  PageWindow::Watched& w = window->watched_[watched];
  const PageRange inside = PageRange::Inside(data, size);
  const PageRange around = Common(PageRange::Around(data, size), w.pages);
  const std::shared_lock lock(mutex_);
  bool written = false;
  const int error = inside.empty() ? 0 : Scan(inside, false, [&written](PageRange) { written = true; });
  const bool awaited = IsAwaited(window, around);
  if (!awaited) (void)WriteProtect(around, false);
  const std::lock_guard changing(window->mutex_);
  w.written = w.written || written || error != 0;  // an error: it is not the memory any more that was protected
  w.left = w.left || awaited;
  try {
    w.done.push_back(around);
  } catch (const std::bad_alloc&) {
    w.written = true;  // nobody could tell later that it is done
  }
  return !w.written;
}

std::vector<size_t> PageWitness::Written(PageWindow* window) {
  const std::shared_lock lock(mutex_);
  const std::lock_guard changing(window->mutex_);
  std::vector<size_t> written;
  for (size_t i = 0; i < window->watched_.size(); ++i)
    if (window->watched_[i].written) written.push_back(i);
  return written;
}

void PageWitness::Close(PageWindow* window) {
  const std::unique_lock lock(mutex_);
  if (!window->open_) return;
  window->open_ = false;
  std::erase(windows_, window);
  for (PageWindow::Watched& w : window->watched_) {
    size_t copied = 0;
    for (const PageRange& d : w.done) copied += d.bytes();
    const bool unfinished = copied < w.pages.bytes();
    if (!w.is_protected || (!unfinished && !w.left)) continue;
    // The checkpoint has failed. Whoever wrote to these as well is to be known.
    if (w.done.empty()) (void)Scan(w.pages, false, [&w](PageRange) { w.written = true; });
    if (!IsAwaited(window, w.pages)) (void)WriteProtect(w.pages, false);
  }
}

}  // namespace lazyckpt
