// Detects writes to pages of this process, by any thread or system call, with the kernel's help (userfaultfd).
//
// The kernel lifts the write protection at the first write (WP_ASYNC), and a scan says where it did. Linux 6.7 or
// newer; needs no privilege.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <span>
#include <vector>

#include "status.h"
#include "witness/uffd.h"

namespace lazyckpt {

// The pages of one snapshot, from its moment until they are copied. PageWitness guards it.
class PageWindow {
 public:
  // Adds pages and returns their number. Only before PageWitness::Open.
  size_t Add(PageRange pages);

  bool is_protected(size_t watched) const { return watched_[watched].is_protected; }

 private:
  friend class PageWitness;
  struct Watched {
    PageRange pages;
    PageKind kind = PageKind::kFile;
    bool is_protected = false;
    bool refused = false;         // these pages cannot be watched
    bool written = false;         // before they were copied
    bool left = false;            // some pages stay protected for another window
    std::vector<PageRange> done;  // copied pages, in any order
    size_t to_copy = 0;           // bytes of the pages
  };
  // The room of a huge page inside one range. It is opened in one step, after all of it was copied: to open a part
  // would make it small pages for good. So would a write to it: hence none reaches beyond a storage, where malloc has
  // small objects. Whether a huge page is in the room, only the kernel knows.
  struct Room {
    uintptr_t begin;
    size_t to_copy = kHugePageBytes;

    PageRange pages() const { return {begin, begin + kHugePageBytes}; }
  };

  // huge_pages.cc
  void AddRooms(PageRange pages);
  std::vector<PageRange> Openable(PageRange pages, bool all) const;
  bool IsDone(const Watched& watched, uintptr_t page) const;
  void CountCopied(size_t watched, std::span<const std::byte> from);
  // The index in by_address_ of the first range that ends after `address`.
  size_t FindAfter(uintptr_t address) const;

  std::vector<Watched> watched_;
  std::vector<uint32_t> by_address_;  // without overlaps: those that Open refused are missing
  std::vector<Room> rooms_;           // by address
  std::mutex mutex_;                  // guards what CheckAndOpen changes
  bool open_ = false;
};

// One in a process, since a page has one protection; windows that share pages keep each other's evidence. Any thread
// may call, but not in a forked child, whose memory it does not watch.
class PageWitness {
 public:
  // Returns nullptr, with the reason, if the kernel or the container refuses. Tries once, on memory of its own.
  static PageWitness* OfProcess(Status* why);

  // Opens the window. Overlapping ranges of one window are refused.
  void Open(PageWindow* window);

  // Protects the pages of the window, except those that cannot be watched, such as shared memory or pages that overlap
  // with another window in part.
  void Protect(PageWindow* window);

  // A copy of some watched memory.
  struct Copied {
    size_t watched;
    std::span<const std::byte> from;
    bool written = false;  // after the window was opened

    PageRange pages() const { return PageRange::Inside(from.data(), from.size()); }
  };
  // Checks whether copied pages were written since the window was opened, and lifts their protection. Skips pages
  // shared with other memory, which the caller copied at once. May throw std::bad_alloc; the window can still be
  // closed.
  void CheckAndOpen(PageWindow* window, std::span<Copied> pieces);

  // Records writes to all pages that are not copied yet. Called when a job fails, before training may write again, so
  // that every torn source is known.
  void CheckRest(PageWindow* window);

  // Has CollapseNext make huge pages of what a closed window protected.
  void WantHugePages(const PageWindow& window);

  // Makes one huge page of small ones. Returns false if none is wanted, or while a window is open: the kernel makes
  // none of protected pages. Training that touches these pages meanwhile, and an mmap, wait for it.
  bool CollapseNext();

  // Tries on memory of its own whether the kernel makes huge pages of small ones.
  static Status TryCollapse();

  // Ends the window and lifts the protection of pages that were not copied. May be called again.
  void Close(PageWindow* window);

  // The numbers of pages written before they were copied, in ascending order, as far as known.
  std::vector<size_t> Written(PageWindow* window);

 private:
  struct Mapping {
    PageRange pages;
    PageKind kind;
  };

  PageWitness() = default;
  Status Start();
  Status TryOnOwnPages();

  // mappings.cc
  static std::vector<Mapping> ReadMappings();  // all that may be watched, by address
  bool Register(PageRange pages, const std::vector<Mapping>& mappings);
  std::optional<PageKind> Registered(PageRange pages);
  void ForgetAll();

  // 0 or an errno value: ENOENT if it is not registered, EACCES if some of it belongs to a file.
  int ProtectAll(PageRange pages, PageKind kind) const;
  bool ProtectOne(PageRange pages, std::vector<Mapping>* mappings, PageKind* kind);
  bool IsBridge(PageRange gap) const;
  static PageRange Touched(const PageWindow& window, const Copied& piece);
  bool CheckAndOpenRun(PageWindow* window, std::span<Copied> pieces, PageRange inside, PageRange around);
  bool Share(PageWindow::Watched* ours);
  bool IsAwaited(const PageWindow* by_others_than, PageRange pages) const;

  Uffd uffd_;
  std::shared_mutex mutex_;  // guards windows_; exclusive to open and to close a window
  std::vector<PageWindow*> windows_;
  std::mutex registering_;                   // guards registered_; locked after mutex_, never before it
  std::map<uintptr_t, Mapping> registered_;  // by begin; may have been unmapped since
  std::map<uintptr_t, unsigned> tries_;      // to make a huge page, by begin; guarded by registering_
  std::set<uintptr_t> wanted_;               // huge pages to make; guarded by registering_
};

}  // namespace lazyckpt
