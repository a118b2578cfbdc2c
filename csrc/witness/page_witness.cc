// The windows of snapshots, and the evidence that windows over the same pages keep for each other.
#include "witness/page_witness.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <numeric>
#include <utility>

namespace lazyckpt {
namespace {

struct {
  PageWitness* made = nullptr;  // never deleted: threads may use it while the process ends
  pid_t maker = 0;
  Status refused;
} of_process;

}  // namespace

size_t PageWindow::Add(PageRange pages) {
  PageWindow::Watched& watched = watched_.emplace_back();
  watched.pages = pages;
  watched.to_copy = pages.bytes();
  return watched_.size() - 1;
}

bool PageWindow::IsDone(const Watched& watched, uintptr_t page) const {
  return std::any_of(watched.done.begin(), watched.done.end(),
                     [page](const PageRange& d) { return d.begin <= page && page < d.end; });
}

PageWitness* PageWitness::OfProcess(Status* why) {
  static std::mutex making;
  const std::lock_guard lock(making);
  if (of_process.maker != getpid()) {  // the parent's witness watches the parent's memory
    of_process.maker = getpid();
    auto* const witness = new PageWitness();
    of_process.refused = witness->Start();
    of_process.made = of_process.refused.ok() ? witness : nullptr;
  }
  *why = of_process.refused;
  return of_process.made;
}

Status PageWitness::Start() {
  if (sysconf(_SC_PAGESIZE) != static_cast<long>(kPageBytes)) return Status(ENOTSUP, "pages other than 4 KiB", "");
  const Status status = uffd_.Open();
  if (status.ok()) return TryOnOwnPages();
  uffd_.Close();
  return status;
}

// Checks on memory of its own that the kernel keeps what its calls promise.
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
  if (!Register(pages, ReadMappings()) || uffd_.WriteProtect(pages, true) != 0)
    status = Status(errno, "userfaultfd", "");
  (void)bytes[2 * kPageBytes];  // a read, even of a page that was never touched, is not a write
  if (const int error = status.ok() ? uffd_.Scan(pages, PageKind::kAnonymous, false, count) : 0; error != 0)
    status = Status(error, "PAGEMAP_SCAN (Linux 6.7 has it)", "");
  if (status.ok() && written != 0)
    status = Status(ENOTSUP, "write protection that reports a write that did not happen", "");
  bytes[kPageBytes] = 2;
  const int zeros = open("/dev/zero", O_RDONLY | O_CLOEXEC);  // a system call that writes
  const ssize_t got = read(zeros, static_cast<char*>(memory) + 3 * kPageBytes, 1);
  const int error = got < 0 ? errno : 0;
  if (zeros >= 0) close(zeros);
  if (status.ok() && got != 1) status = Status(error, "userfaultfd for system calls", "");
  if (status.ok() && (uffd_.Scan(pages, PageKind::kAnonymous, false, count) != 0 || written != 2 * kPageBytes))
    status = Status(ENOTSUP, "write protection that misses a write", "");
  munmap(memory, kBytes);
  ForgetAll();
  return status;
}

// By the scan, since UFFDIO_WRITEPROTECT takes ten times as long (14 ms for 512 MiB of small pages).
int PageWitness::ProtectAll(PageRange pages, PageKind kind) const {
  bool of_file = false;
  const auto look = [&of_file](PageRange, uint64_t categories) {
    const bool has_memory = (categories & (kPageIsPresent | kPageIsSwapped)) != 0;
    of_file = of_file || (categories & kPageIsFile) != 0 || !has_memory;
  };
  const int error = kind == PageKind::kFile ? uffd_.Scan(pages, kind, true, look) : uffd_.Protect(pages);
  if (error == 0 && !of_file) return 0;
  (void)uffd_.WriteProtect(pages, false);
  if (of_file) return EACCES;
  return error == EPERM ? ENOENT : error;  // ENOENT, as from UFFDIO_WRITEPROTECT
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
  uintptr_t end = 0;
  std::erase_if(order, [window, &end](uint32_t at) {
    PageWindow::Watched& here = window->watched_[at];
    here.refused = here.pages.begin < end;
    if (!here.refused) end = here.pages.end;
    return here.refused;
  });
  const std::unique_lock lock(mutex_);
  if (!windows_.empty())
    for (PageWindow::Watched& ours : window->watched_) ours.refused = ours.refused || !Share(&ours);
  windows_.push_back(window);
  window->open_ = true;
}

// Under the exclusive lock: whether no other window prevents watching these pages.
bool PageWitness::Share(PageWindow::Watched* ours) {
  const PageWindow::Watched* twin = nullptr;
  const auto for_each_other = [&](const auto& visit) {
    for (PageWindow* other : windows_)
      for (size_t at = other->FindAfter(ours->pages.begin); at < other->by_address_.size(); ++at) {
        PageWindow::Watched& theirs = other->watched_[other->by_address_[at]];
        if (theirs.pages.begin >= ours->pages.end) break;
        if (!theirs.refused && !visit(*other, theirs)) return false;
      }
    return true;
  };
  const bool fits = for_each_other([&](const PageWindow&, const PageWindow::Watched& theirs) {
    twin = &theirs;
    return theirs.pages == ours->pages && theirs.is_protected;
  });
  if (!fits) return false;
  if (twin == nullptr) return true;
  // Writes until now are evidence for the other windows alone; later writes, for all.
  const int error = uffd_.Scan(ours->pages, twin->kind, true, [&](PageRange run, uint64_t) {
    for_each_other([&run](const PageWindow& other, PageWindow::Watched& theirs) {
      for (uintptr_t page = run.begin; page < run.end && !theirs.written; page += kPageBytes)
        theirs.written = !other.IsDone(theirs, page);
      return true;
    });
  });
  if (error != 0) return false;
  ours->kind = twin->kind;
  ours->is_protected = true;
  return true;
}

// Under the lock: whether the gap between two ranges may be protected and opened with them. One step costs as much as a
// hundred pages, since it interrupts the other cores. Pages of the gap may stay protected; the first write there costs
// a microsecond.
bool PageWitness::IsBridge(PageRange gap) const {
  constexpr size_t kMostBytes = 4 * kPageBytes;
  if (gap.bytes() > kMostBytes) return false;
  return std::none_of(windows_.begin(), windows_.end(), [&gap](const PageWindow* window) {
    const size_t at = window->FindAfter(gap.begin);
    return at < window->by_address_.size() && window->watched_[window->by_address_[at]].pages.begin < gap.end;
  });
}

void PageWitness::Protect(PageWindow* window) {
  const std::shared_lock lock(mutex_);
  std::vector<Mapping> mappings;  // read when needed
  const auto& order = window->by_address_;
  const auto range = [&](size_t at) -> PageWindow::Watched& { return window->watched_[order[at]]; };
  for (size_t first = 0, end = 0; first < order.size(); first = end) {
    end = first + 1;
    if (range(first).refused || range(first).is_protected) continue;  // protected for another window
    PageRange step = range(first).pages;
    std::optional<PageKind> kind;
    for (; end < order.size() && !range(end).refused && !range(end).is_protected; ++end) {
      const PageRange next = range(end).pages;
      if (!IsBridge({step.end, next.begin})) break;
      const std::optional<PageKind> with_next = Registered({step.begin, next.end});
      if (!with_next) break;
      kind = with_next;
      step.end = next.end;
    }
    const bool together = kind && ProtectAll(step, *kind) == 0;
    for (size_t at = first; at < end; ++at) {
      PageWindow::Watched& w = range(at);
      PageKind of = kind.value_or(PageKind::kFile);
      const bool done = together || ProtectOne(w.pages, &mappings, &of);
      const std::lock_guard changing(window->mutex_);
      w.kind = of;
      w.is_protected = done;
      w.refused = !done;
    }
  }
  for (size_t at = 0; at < order.size(); ++at)
    if (range(at).is_protected && range(at).kind == PageKind::kAnonymous) window->AddRooms(range(at).pages);
}

// Also tells their kind.
bool PageWitness::ProtectOne(PageRange pages, std::vector<Mapping>* mappings, PageKind* kind) {
  const auto protect = [&](std::optional<PageKind> known) {
    *kind = known.value_or(PageKind::kFile);
    return known ? ProtectAll(pages, *known) : ENOENT;
  };
  const int error = protect(Registered(pages));
  if (error != ENOENT) return error == 0;
  if (mappings->empty()) *mappings = ReadMappings();  // new memory, perhaps at an old address
  if (!Register(pages, *mappings)) return false;
  return protect(Registered(pages)) == 0;  // unknown if it spans mappings of different kinds
}

// Whether another window has yet to copy some of these pages. The ranges of a window do not overlap, so all that reach
// into the pages follow the first one that does.
bool PageWitness::IsAwaited(const PageWindow* by_others_than, PageRange pages) const {
  for (PageWindow* window : windows_) {
    if (window == by_others_than) continue;
    for (size_t at = window->FindAfter(pages.begin); at < window->by_address_.size(); ++at) {
      const PageWindow::Watched& w = window->watched_[window->by_address_[at]];
      if (w.pages.begin >= pages.end) break;
      if (w.refused) continue;
      const std::lock_guard changing(window->mutex_);
      if (w.to_copy == 0) continue;
      const PageRange common = PageRange::Common(w.pages, pages);
      const auto covers = [&common](const PageRange& d) { return d.begin <= common.begin && common.end <= d.end; };
      if (std::none_of(w.done.begin(), w.done.end(), covers)) return true;
    }
  }
  return false;
}

// Checks neighbours in one step: see IsBridge.
void PageWitness::CheckAndOpen(PageWindow* window, std::span<Copied> pieces) {
  const std::shared_lock lock(mutex_);
  for (size_t first = 0, end = 0; first < pieces.size(); first = end) {
    PageRange inside = pieces[first].pages(), around = Touched(*window, pieces[first]);
    for (end = first + 1; end < pieces.size(); ++end) {
      const PageRange in = pieces[end].pages(), touched = Touched(*window, pieces[end]);
      const bool joins = !in.empty() && !inside.empty() && around.end <= touched.begin;
      if (!joins || !IsBridge({around.end, touched.begin})) break;
      inside.end = in.end;
      around.end = touched.end;
    }
    if (CheckAndOpenRun(window, pieces.subspan(first, end - first), inside, around)) continue;
    end = first + 1;  // the gap was unmapped: check the first piece alone
    (void)CheckAndOpenRun(window, pieces.subspan(first, 1), pieces[first].pages(), Touched(*window, pieces[first]));
  }
}

// The watched pages that a piece touches.
PageRange PageWitness::Touched(const PageWindow& window, const Copied& piece) {
  return PageRange::Common(PageRange::Around(piece.from.data(), piece.from.size()),
                           window.watched_[piece.watched].pages);
}

// False, with nothing done, if several pieces cannot be checked together.
bool PageWitness::CheckAndOpenRun(PageWindow* window, std::span<Copied> pieces, PageRange inside, PageRange around) {
  const auto check = [&](PageRange run, uint64_t) {
    for (Copied& piece : pieces) piece.written = piece.written || !PageRange::Common(run, piece.pages()).empty();
  };
  const bool anonymous = std::all_of(pieces.begin(), pieces.end(), [window](const Copied& piece) {
    return window->watched_[piece.watched].kind == PageKind::kAnonymous;
  });
  const PageKind kind = anonymous ? PageKind::kAnonymous : PageKind::kFile;
  const int error = inside.empty() ? 0 : uffd_.Scan(inside, kind, false, check);
  if (error != 0 && pieces.size() > 1) return false;
  std::vector<PageRange> openable;
  {
    const std::lock_guard changing(window->mutex_);
    for (const Copied& piece : pieces) window->CountCopied(piece.watched, piece.from);
    openable = window->Openable(around, false);
  }
  bool awaited = false, opened = true;
  for (const PageRange& range : openable) {
    if (IsAwaited(window, range))
      awaited = true;
    else
      opened = uffd_.WriteProtect(range, false) == 0 && opened;
  }
  if (!opened && pieces.size() > 1)
    for (const Copied& piece : pieces) (void)uffd_.WriteProtect(Touched(*window, piece), false);
  const std::lock_guard changing(window->mutex_);
  for (Copied& piece : pieces) {
    PageWindow::Watched& w = window->watched_[piece.watched];
    w.written = w.written || piece.written || error != 0;  // an error: the protected memory is gone
    w.left = w.left || awaited;
    w.done.push_back(Touched(*window, piece));
    piece.written = w.written;
  }
  return true;
}

void PageWitness::CheckRest(PageWindow* window) {
  const std::shared_lock lock(mutex_);
  for (PageWindow::Watched& w : window->watched_) {
    const std::lock_guard changing(window->mutex_);
    if (w.is_protected && w.done.empty())
      (void)uffd_.Scan(w.pages, w.kind, false, [&w](PageRange, uint64_t) { w.written = true; });
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
    // Sorted, since neighbouring chunks may share the page where they meet.
    std::sort(w.done.begin(), w.done.end(), [](const PageRange& x, const PageRange& y) { return x.begin < y.begin; });
    uintptr_t end = w.pages.begin;
    for (const PageRange& d : w.done)
      if (d.begin <= end) end = std::max(end, d.end);
    const bool unfinished = end < w.pages.end;
    if (!w.is_protected || (!unfinished && !w.left)) continue;
    for (const PageRange& range : window->Openable(w.pages, true))
      if (!IsAwaited(window, range)) (void)uffd_.WriteProtect(range, false);
  }
}

}  // namespace lazyckpt
