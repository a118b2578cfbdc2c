#include "witness/page_witness.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <new>
#include <numeric>
#include <system_error>
#include <thread>
#include <utility>

// Older headers than the kernel are common.
#ifndef UFFD_USER_MODE_ONLY
#define UFFD_USER_MODE_ONLY 1
#endif
#ifndef UFFD_FEATURE_WP_UNPOPULATED
#define UFFD_FEATURE_WP_UNPOPULATED (1 << 13)
#endif
#ifndef USERFAULTFD_IOC_NEW
#define USERFAULTFD_IOC_NEW _IO(0xAA, 0x00)
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
constexpr uint64_t kPageIsFile = 1 << 2;
constexpr uint64_t kPageIsPresent = 1 << 3;
constexpr uint64_t kPageIsSwapped = 1 << 4;
constexpr uint64_t kScanProtectMatching = 1 << 0;
constexpr uint64_t kScanCheckAsync = 1 << 1;  // EPERM where the memory is not, or no longer, registered
#define LAZYCKPT_PAGEMAP_SCAN _IOWR('f', 16, ScanArguments)

PageRange Common(const PageRange& a, const PageRange& b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

constexpr size_t kSaveBytes = 64 << 10;  // copied aside at once: a fault costs as much as a few pages

// One for both modes, since a mapping belongs to one of them. Taken behind PageWitness::mutex_, never before it.
std::mutex& Registering() {
  static std::mutex mutex;
  return mutex;
}

struct OfMode {
  std::atomic<PageWitness*> made = nullptr;  // for good: threads may use it while the process ends
  pid_t maker = 0;
  Status refused;
};
OfMode witnesses[2];

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

bool PageWindow::IsDone(const Watched& watched, uintptr_t page) const {
  return std::any_of(watched.done.begin(), watched.done.end(),
                     [page](const PageRange& d) { return d.begin <= page && page < d.end; });
}

PageWitness* PageWitness::OfProcess(WitnessMode mode, Status* why) {
  static std::mutex making;
  const std::lock_guard lock(making);
  OfMode& of = witnesses[static_cast<size_t>(mode)];
  if (of.maker != getpid()) {  // in a forked child the old one speaks of the parent's memory
    of.maker = getpid();
    auto* const witness = new PageWitness(mode);
    of.refused = witness->Start();
    of.made = of.refused.ok() ? witness : nullptr;
  }
  *why = of.refused;
  return of.made;
}

Status PageWitness::OpenDescriptors() {
  if (mode_ == WitnessMode::kReport) {
    uffd_ = static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY));
  } else {
    uffd_ = static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK));
    const int device = uffd_ < 0 ? open("/dev/userfaultfd", O_RDWR | O_CLOEXEC) : -1;
    if (device >= 0) {
      uffd_ = ioctl(device, USERFAULTFD_IOC_NEW, O_CLOEXEC | O_NONBLOCK);
      close(device);
    }
  }
  if (uffd_ < 0) return Status(errno, "userfaultfd", "");
  pagemap_ = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (pagemap_ < 0) return Status(errno, "open", "/proc/self/pagemap");
  uffdio_api api{};
  api.api = UFFD_API;
  api.features = UFFD_FEATURE_WP_UNPOPULATED;
  api.features |= mode_ == WitnessMode::kReport ? UFFD_FEATURE_WP_ASYNC : UFFD_FEATURE_PAGEFAULT_FLAG_WP;
  if (ioctl(uffd_, UFFDIO_API, &api) != 0)
    return Status(errno, "userfaultfd without the write protection that Linux 6.7 has", "");
  return Status::Ok();
}

Status PageWitness::Start() {
  if (sysconf(_SC_PAGESIZE) != static_cast<long>(kPageBytes)) return Status(ENOTSUP, "pages other than 4 KiB", "");
  Status status = OpenDescriptors();
  if (status.ok() && mode_ == WitnessMode::kCopy) try {
      std::thread([this] { SaveLoop(); }).detach();
    } catch (const std::system_error& error) {
      status = Status(error.code().value(), "start of a thread", "");
    }
  if (status.ok()) return TryOnOwnPages();
  if (uffd_ >= 0) close(uffd_);
  if (pagemap_ >= 0) close(pagemap_);
  return status;
}

// For good. Takes no memory and touches none that may be protected but to copy it: it is what all who write wait for.
void PageWitness::SaveLoop() {
  pthread_setname_np(pthread_self(), "lazyckpt-aside");
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, nullptr);
  for (;;) {
    pollfd ready{.fd = uffd_, .events = POLLIN, .revents = 0};
    if (poll(&ready, 1, -1) < 0) continue;
    std::array<uffd_msg, 16> messages;
    const ssize_t bytes = read(uffd_, messages.data(), sizeof messages);
    for (ssize_t i = 0; i < bytes / static_cast<ssize_t>(sizeof(uffd_msg)); ++i)
      if (messages[i].event == UFFD_EVENT_PAGEFAULT) Save(messages[i].arg.pagefault.address / kPageBytes * kPageBytes);
  }
}

// Copies what somebody is about to write to, for each window that has not copied it yet; then lets them write.
void PageWitness::Save(uintptr_t page) {
  const std::unique_lock lock(mutex_);
  PageRange batch{page / kSaveBytes * kSaveBytes, (page / kSaveBytes + 1) * kSaveBytes};
  bool is_watched = false;
  for (int pass = 0; pass < 2; ++pass) {
    for (PageWindow* window : windows_) {
      const size_t at = window->FindAfter(page);
      if (at == window->by_address_.size()) continue;
      PageWindow::Watched& w = window->watched_[window->by_address_[at]];
      if (w.refused || w.pages.begin > page) continue;
      is_watched = true;
      if (pass == 0) {
        batch = Common(batch, w.pages);
        continue;
      }
      for (uintptr_t p = batch.begin; p < batch.end; p += kPageBytes) {
        const size_t number = (p - w.pages.begin) / kPageBytes;
        if (w.saved[number] || window->IsDone(w, p)) continue;
        std::memcpy(w.aside + number * kPageBytes, reinterpret_cast<const void*>(p), kPageBytes);
        w.saved[number] = true;
      }
    }
    if (!is_watched) batch = {page, page + kPageBytes};
  }
  (void)WriteProtect(batch, false);
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
  const auto count = [&written](PageRange run, uint64_t) { written += run.bytes(); };
  if (!Register(pages, ReadMappings()) || WriteProtect(pages, true) != 0) status = Status(errno, "userfaultfd", "");
  (void)bytes[2 * kPageBytes];  // to read is not to write, also where nothing was before
  if (const int error = status.ok() ? Scan(pages, false, count) : 0; error != 0)
    status = Status(error, "PAGEMAP_SCAN (Linux 6.7 has it)", "");
  if (status.ok() && written != 0) status = Status(ENOTSUP, "write protection that reports what nobody wrote", "");
  bytes[kPageBytes] = 2;
  const int zeros = open("/dev/zero", O_RDONLY | O_CLOEXEC);  // a system call that writes
  const ssize_t got = read(zeros, static_cast<char*>(memory) + 3 * kPageBytes, 1);
  const int error = got < 0 ? errno : 0;
  if (zeros >= 0) close(zeros);
  if (status.ok() && got != 1) status = Status(error, "userfaultfd for system calls", "");
  if (status.ok() && (Scan(pages, false, count) != 0 || written != 2 * kPageBytes))
    status = Status(ENOTSUP, "write protection that misses a write", "");
  munmap(memory, kBytes);
  const std::lock_guard registering(Registering());
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
  call.flags = (mode_ == WitnessMode::kReport ? kScanCheckAsync : 0) | (protect ? kScanProtectMatching : 0);
  call.end = pages.end;
  call.vec = reinterpret_cast<uint64_t>(runs.data());
  call.vec_len = runs.size();
  call.category_anyof_mask = kPageIsWritten | kPageIsFile;
  call.return_mask = kPageIsFile | kPageIsPresent | kPageIsSwapped;
  for (call.start = pages.begin; call.start < pages.end; call.start = call.walk_end) {
    const int count = ioctl(pagemap_, LAZYCKPT_PAGEMAP_SCAN, &call);
    if (count < 0 && errno == EINTR) {
      call.walk_end = call.start;
      continue;
    }
    if (count < 0) return errno;
    for (int i = 0; i < count; ++i) found(PageRange{runs[i].start, runs[i].end}, runs[i].categories);
    if (call.walk_end <= call.start) return ENOTSUP;  // a part of a page of hugetlbfs
  }
  return 0;
}

// kReport: by the scan, of all that is not protected yet; UFFDIO_WRITEPROTECT does the same and takes ten times as long
// (14 ms for 512 MiB of small pages). The scan refuses memory of kCopy.
int PageWitness::ProtectAll(PageRange pages, Kind kind) const {
  if (mode_ == WitnessMode::kCopy) return WriteProtect(pages, true);
  bool of_file = false;
  const int error = Scan(pages, true, [&](PageRange, uint64_t categories) {
    const bool has_memory = (categories & (kPageIsPresent | kPageIsSwapped)) != 0;
    of_file = of_file || (categories & kPageIsFile) != 0 || (kind == Kind::kFile && !has_memory);
  });
  if (error == 0 && !of_file) return 0;
  (void)WriteProtect(pages, false);
  if (of_file) return EACCES;
  return error == EPERM ? ENOENT : error;  // as UFFDIO_WRITEPROTECT calls it
}

std::optional<PageWitness::Kind> PageWitness::Registered(PageRange pages) {
  const std::lock_guard lock(Registering());
  const auto after = registered_.upper_bound(pages.begin);
  if (after == registered_.begin() || std::prev(after)->second.pages.end < pages.end) return std::nullopt;
  return std::prev(after)->second.kind;
}

std::vector<PageWitness::Mapping> PageWitness::ReadMappings() {
  std::vector<Mapping> mappings;
  std::FILE* const maps = std::fopen("/proc/self/maps", "re");
  if (maps == nullptr) return mappings;
  char line[512];
  while (std::fgets(line, sizeof line, maps) != nullptr) {
    unsigned long begin = 0, end = 0, offset = 0, inode = 0;
    char flags[5] = "";
    unsigned major = 0, minor = 0;
    const int fields =
        std::sscanf(line, "%lx-%lx %4s %lx %x:%x %lu", &begin, &end, flags, &offset, &major, &minor, &inode);
    while (std::strchr(line, '\n') == nullptr && std::fgets(line, sizeof line, maps) != nullptr) {
    }
    // Of shared memory the kernel would not tell what another process writes: none of its pages is this process's own.
    if (fields != 7 || flags[1] != 'w' || flags[3] != 'p') continue;
    mappings.push_back({{begin, end}, inode == 0 ? Kind::kAnonymous : Kind::kFile});
  }
  std::fclose(maps);
  return mappings;
}

// By mapping: to register each storage by itself would split mappings, of which a process may have 65,530.
bool PageWitness::Register(PageRange pages, const std::vector<Mapping>& mappings) {
  const std::lock_guard lock(Registering());
  uintptr_t covered = pages.begin;
  const auto ends_before = [](const Mapping& m, uintptr_t address) { return m.pages.end <= address; };
  auto at = std::lower_bound(mappings.begin(), mappings.end(), covered, ends_before);
  for (; covered < pages.end && at != mappings.end() && at->pages.begin <= covered; ++at) {
    if (at->kind == Kind::kFile && mode_ == WitnessMode::kCopy) break;  // the kernel has that for kReport alone
    uffdio_register call{};
    call.range = {at->pages.begin, at->pages.bytes()};
    call.mode = UFFDIO_REGISTER_MODE_WP;
    // EBUSY: another user of userfaultfd has it, the other mode perhaps.
    PageWitness* const other = witnesses[mode_ == WitnessMode::kReport ? 1 : 0].made;
    if (ioctl(uffd_, UFFDIO_REGISTER, &call) != 0 &&
        (errno != EBUSY || other == nullptr || !other->Yield(at->pages) || ioctl(uffd_, UFFDIO_REGISTER, &call) != 0))
      break;
    // Memory was unmapped and mapped again: the kernel would protect it for either, and tell the wrong one.
    if (other != nullptr) other->ForgetRegistered(at->pages);
    ForgetRegistered(at->pages);
    registered_[at->pages.begin] = *at;
    covered = at->pages.end;
  }
  if (covered < pages.end) return false;
  // Neighbours as one: a storage may reach over several mappings.
  for (auto here = registered_.begin(); here != registered_.end();) {
    const auto next = std::next(here);
    if (next == registered_.end()) break;
    PageRange& joined = here->second.pages;
    if (next->first <= joined.end && next->second.kind == here->second.kind) {
      joined.end = std::max(joined.end, next->second.pages.end);
      registered_.erase(next);
    } else {
      here = next;
    }
  }
  return true;
}

size_t PageWindow::FindAfter(uintptr_t address) const {
  const auto reaches = [this](uint32_t at, uintptr_t a) { return watched_[at].pages.end <= a; };
  return std::lower_bound(by_address_.begin(), by_address_.end(), address, reaches) - by_address_.begin();
}

// Under Registering(). Lets go of a mapping, unless any window is open.
bool PageWitness::Yield(PageRange pages) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || !windows_.empty()) return false;
  uffdio_range call{pages.begin, pages.bytes()};
  if (ioctl(uffd_, UFFDIO_UNREGISTER, &call) != 0) return false;
  ForgetRegistered(pages);
  return true;
}

// Under Registering(). More than `pages`, perhaps: what is registered once more is registered all the same.
void PageWitness::ForgetRegistered(PageRange pages) {
  std::erase_if(registered_, [&](const auto& r) { return r.second.pages.Overlaps(pages); });
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
  if (mode_ == WitnessMode::kCopy) ReserveAside(window);
  const std::unique_lock lock(mutex_);
  if (!windows_.empty())
    for (PageWindow::Watched& ours : window->watched_) ours.refused = ours.refused || !Share(window, &ours);
  windows_.push_back(window);
  window->open_ = true;
}

// Memory for all pages of the window; it is used where somebody writes.
void PageWitness::ReserveAside(PageWindow* window) {
  size_t bytes = 0;
  for (const PageWindow::Watched& w : window->watched_) bytes += w.pages.bytes();
  if (bytes == 0) return;
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  auto* at = memory == MAP_FAILED ? nullptr : static_cast<std::byte*>(memory);
  if (at != nullptr) {
    window->aside_ = {at, bytes};
    madvise(at, bytes, MADV_DONTFORK);
  }
  for (PageWindow::Watched& w : window->watched_) {
    w.refused = w.refused || at == nullptr;
    if (at == nullptr) continue;
    w.aside = at;
    w.saved.resize(w.pages.bytes() / kPageBytes);
    at += w.pages.bytes();
  }
}

// Under the exclusive lock: whether no other window stands against watching these pages.
bool PageWitness::Share(PageWindow* window, PageWindow::Watched* ours) {
  for (PageWindow* other : windows_) {
    const size_t at = other == window ? other->by_address_.size() : other->FindAfter(ours->pages.begin);
    if (at == other->by_address_.size()) continue;
    PageWindow::Watched& theirs = other->watched_[other->by_address_[at]];
    if (theirs.refused || !theirs.pages.Overlaps(ours->pages)) continue;
    if (theirs.pages != ours->pages || !theirs.is_protected) return false;
    if (mode_ == WitnessMode::kCopy) continue;  // to protect them once more loses nothing
    // What was written so far is evidence for the other window alone; what is written from here on, for both.
    const int error = Scan(ours->pages, true, [&](PageRange run, uint64_t) {
      for (uintptr_t page = run.begin; page < run.end && !theirs.written; page += kPageBytes)
        theirs.written = !other->IsDone(theirs, page);
    });
    if (error != 0) return false;
    ours->is_protected = true;
  }
  return true;
}

// Under the lock: whether what lies between two ranges may be protected and opened with them, in one step: a step costs
// as much as a hundred pages, since the other cores have to notice. Between them pages may stay protected: whoever
// writes there first pays a microsecond.
bool PageWitness::IsBridge(PageRange gap) const {
  constexpr size_t kMostBytes = 4 * kPageBytes;
  if (gap.bytes() > kMostBytes || mode_ == WitnessMode::kCopy) return false;  // kCopy: the books of malloc, say
  return std::none_of(windows_.begin(), windows_.end(), [&gap](const PageWindow* window) {
    const size_t at = window->FindAfter(gap.begin);
    return at < window->by_address_.size() && window->watched_[window->by_address_[at]].pages.begin < gap.end;
  });
}

void PageWitness::Protect(PageWindow* window) {
  const std::shared_lock lock(mutex_);
  std::vector<Mapping> mappings;  // once they are asked for
  const auto& order = window->by_address_;
  const auto range = [&](size_t at) -> PageWindow::Watched& { return window->watched_[order[at]]; };
  for (size_t first = 0, end = 0; first < order.size(); first = end) {
    end = first + 1;
    if (range(first).refused || range(first).is_protected) continue;  // with another window
    PageRange step = range(first).pages;
    std::optional<Kind> kind;
    for (; end < order.size() && !range(end).refused && !range(end).is_protected; ++end) {
      const PageRange next = range(end).pages;
      if (!IsBridge({step.end, next.begin})) break;
      const std::optional<Kind> with_next = Registered({step.begin, next.end});
      if (!with_next) break;
      kind = with_next;
      step.end = next.end;
    }
    const bool together = kind && ProtectAll(step, *kind) == 0;
    for (size_t at = first; at < end; ++at) {
      PageWindow::Watched& w = range(at);
      const bool done = together || ProtectOne(w.pages, &mappings);
      const std::lock_guard changing(window->mutex_);
      w.is_protected = done;
      w.refused = !done;
    }
  }
}

bool PageWitness::ProtectOne(PageRange pages, std::vector<Mapping>* mappings) {
  const std::optional<Kind> known = Registered(pages);
  const int error = known ? ProtectAll(pages, *known) : ENOENT;
  if (error != ENOENT) return error == 0;
  if (mappings->empty()) *mappings = ReadMappings();  // new memory, or other at the old place
  if (!Register(pages, *mappings)) return false;
  const std::optional<Kind> kind = Registered(pages);  // none if it lies in two mappings of different kinds
  return kind && ProtectAll(pages, *kind) == 0;
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

// Neighbours in one step: see IsBridge.
void PageWitness::CheckAndOpen(PageWindow* window, std::span<Copied> pieces) {
  const std::shared_lock lock(mutex_);
  for (size_t first = 0, end = 0; first < pieces.size(); first = end) {
    PageRange inside, around;
    for (end = first; end < pieces.size(); ++end) {
      const Copied& piece = pieces[end];
      const PageRange in = PageRange::Inside(piece.from.data(), piece.from.size());
      const PageRange touched = Touched(*window, piece);
      if (end == first) {
        inside = in;
        around = touched;
      } else if (!in.empty() && !inside.empty() && around.end <= touched.begin &&
                 IsBridge({around.end, touched.begin})) {
        inside.end = in.end;
        around.end = touched.end;
      } else {
        break;
      }
    }
    if (CheckAndOpenRun(window, pieces.subspan(first, end - first), inside, around)) continue;
    end = first + 1;  // without what lies between them, which somebody has unmapped
    const Copied& piece = pieces[first];
    (void)CheckAndOpenRun(window, pieces.subspan(first, 1), PageRange::Inside(piece.from.data(), piece.from.size()),
                          Touched(*window, piece));
  }
}

// The pages that a piece lies in, of those that are watched.
PageRange PageWitness::Touched(const PageWindow& window, const Copied& piece) {
  return Common(PageRange::Around(piece.from.data(), piece.from.size()), window.watched_[piece.watched].pages);
}

// False, and nothing is done, if several pieces cannot be looked at together.
bool PageWitness::CheckAndOpenRun(PageWindow* window, std::span<Copied> pieces, PageRange inside, PageRange around) {
  const auto check = [&](PageRange run, uint64_t) {
    for (Copied& piece : pieces) {
      const PageWindow::Watched& w = window->watched_[piece.watched];
      const PageRange written = Common(run, PageRange::Inside(piece.from.data(), piece.from.size()));
      for (uintptr_t page = written.begin; page < written.end && !piece.written; page += kPageBytes)
        piece.written = w.saved.empty() || !w.saved[(page - w.pages.begin) / kPageBytes];
    }
  };
  const int error = inside.empty() ? 0 : Scan(inside, false, check);
  if (error != 0 && pieces.size() > 1) return false;
  for (Copied& piece : pieces) {
    const PageWindow::Watched& w = window->watched_[piece.watched];
    if (w.saved.empty()) continue;
    const PageRange pages = PageRange::Inside(piece.from.data(), piece.from.size());
    for (uintptr_t page = pages.begin; page < pages.end; page += kPageBytes) {
      const size_t number = (page - w.pages.begin) / kPageBytes;
      if (!w.saved[number]) continue;
      std::memcpy(piece.to + (page - reinterpret_cast<uintptr_t>(piece.from.data())), w.aside + number * kPageBytes,
                  kPageBytes);
      piece.patched = true;
    }
  }
  const bool awaited = IsAwaited(window, around);
  if (!awaited && WriteProtect(around, false) != 0 && pieces.size() > 1)
    for (const Copied& piece : pieces) (void)WriteProtect(Touched(*window, piece), false);
  const std::lock_guard changing(window->mutex_);
  for (Copied& piece : pieces) {
    PageWindow::Watched& w = window->watched_[piece.watched];
    w.written = w.written || piece.written || error != 0;  // an error: not the memory any more that was protected
    w.left = w.left || awaited;
    try {
      w.done.push_back(Touched(*window, piece));
    } catch (const std::bad_alloc&) {
      w.written = true;  // nobody could tell later that it is done
    }
    piece.written = w.written;
  }
  return true;
}

void PageWitness::CheckRest(PageWindow* window) {
  const std::shared_lock lock(mutex_);
  for (PageWindow::Watched& w : window->watched_) {
    const std::lock_guard changing(window->mutex_);
    if (w.is_protected && w.done.empty() && w.saved.empty())
      (void)Scan(w.pages, false, [&w](PageRange, uint64_t) { w.written = true; });
  }
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
    // Chunks may share the page where they are cut: it is not to be counted twice.
    std::sort(w.done.begin(), w.done.end(), [](const PageRange& x, const PageRange& y) { return x.begin < y.begin; });
    uintptr_t end = w.pages.begin;
    for (const PageRange& d : w.done)
      if (d.begin <= end) end = std::max(end, d.end);
    const bool unfinished = end < w.pages.end;
    if (!w.is_protected || (!unfinished && !w.left)) continue;
    if (!IsAwaited(window, w.pages)) (void)WriteProtect(w.pages, false);
  }
  if (!window->aside_.empty()) munmap(window->aside_.data(), window->aside_.size());
  window->aside_ = {};
}

}  // namespace lazyckpt
