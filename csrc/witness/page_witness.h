// Asks the kernel which pages of this process were written, by whomever (userfaultfd).
//
// kReport: the kernel lifts the write protection by itself (WP_ASYNC), and PAGEMAP_SCAN tells where it did. Linux 6.7
// or newer; needs no privilege. kCopy: whoever writes is held until a thread has copied the page aside. Needs a
// userfaultfd that handles faults of system calls, too, or these would fail with EFAULT: see
// Documentation/admin-guide/mm/userfaultfd.rst, "Permissions".
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <span>
#include <vector>

#include "status.h"

namespace lazyckpt {

inline constexpr size_t kPageBytes = 4096;  // of the kernel; with larger ones there is no witness

// Whole pages: [begin, end).
struct PageRange {
  uintptr_t begin = 0;
  uintptr_t end = 0;

  // The pages that lie inside of some memory, and those that touch it.
  static PageRange Inside(const void* data, size_t size);
  static PageRange Around(const void* data, size_t size);

  bool empty() const { return begin >= end; }
  size_t bytes() const { return empty() ? 0 : end - begin; }
  bool Overlaps(const PageRange& other) const { return begin < other.end && other.begin < end; }
  bool operator==(const PageRange&) const = default;
};

// What lies before and behind the whole pages of some memory; all of it, if it has none.
std::array<std::span<const std::byte>, 2> EdgesOf(std::span<const std::byte> memory);

enum class WitnessMode { kReport, kCopy };

// The pages of one snapshot, from the moment of the snapshot until they are copied. PageWitness guards it.
class PageWindow {
 public:
  // Returns the number by which these pages are known. Before PageWitness::Open.
  size_t Add(PageRange pages);

  bool is_protected(size_t watched) const { return watched_[watched].is_protected; }

 private:
  friend class PageWitness;
  struct Watched {
    PageRange pages;
    bool is_protected = false;
    bool refused = false;         // these pages cannot be watched
    bool written = false;         // before they were copied
    bool left = false;            // some are protected still, for another window
    std::vector<PageRange> done;  // copied, in any order
    // kCopy: where its pages are copied to when somebody writes to them, and which have been.
    std::byte* aside = nullptr;
    std::vector<bool> saved;
  };
  bool IsDone(const Watched& watched, uintptr_t page) const;
  // The first of those that reach behind `address`, in the order of by_address_.
  size_t FindAfter(uintptr_t address) const;

  std::vector<Watched> watched_;
  std::vector<uint32_t> by_address_;
  std::mutex mutex_;  // of what CheckAndOpen changes
  bool open_ = false;
  std::span<std::byte> aside_;  // for all of them
};

// One for the process, since a page has one protection: windows that share pages keep each other's evidence.
// Any thread may call. In a forked child nobody may: it would ask about the parent's memory.
class PageWitness {
 public:
  // nullptr, with the reason, where the kernel or the container has no such thing. Tried once, on memory of its own.
  static PageWitness* OfProcess(WitnessMode mode, Status* why);

  // The window watches from here on what Protect protects. No page may be in a window twice.
  void Open(PageWindow* window);

  // Protects the pages of the window, but for those that cannot be watched: shared memory, say, or overlapping pages of
  // another window.
  void Protect(PageWindow* window);

  // Memory of one number that was copied.
  struct Copied {
    size_t watched;
    std::span<const std::byte> from;
    std::byte* to;
    bool written = false;  // after the window was opened
    bool patched = false;  // pages that were copied aside were put in place in `to`
  };
  // Lifts the protection of its pages and says whether they are as they were when the window was opened. Pages that it
  // shares with others are not looked at: the caller copied those at once.
  void CheckAndOpen(PageWindow* window, std::span<Copied> pieces);

  // Looks at all that is not copied yet, while nobody may write to it: what is written as well is to be known when the
  // checkpoint fails, and from then on training may write.
  void CheckRest(PageWindow* window);

  // Ends the window: the protection of what was not copied is lifted. Once or more often.
  void Close(PageWindow* window);

  // The numbers of what was written before it was copied, as far as it is known.
  std::vector<size_t> Written(PageWindow* window);

 private:
  // A file may change below a private mapping of it, as safetensors makes one of weights; pages of it that this process
  // has written are its own.
  enum class Kind { kAnonymous, kFile };
  struct Mapping {
    PageRange pages;
    Kind kind;
  };

  explicit PageWitness(WitnessMode mode) : mode_(mode) {}
  Status Start();
  Status OpenDescriptors();
  void SaveLoop();
  void Save(uintptr_t page);
  bool Yield(PageRange pages);
  void ForgetRegistered(PageRange pages);
  Status TryOnOwnPages();
  // All that may be watched, by address.
  static std::vector<Mapping> ReadMappings();
  bool Register(PageRange pages, const std::vector<Mapping>& mappings);
  std::optional<Kind> Registered(PageRange pages);
  int WriteProtect(PageRange pages, bool on) const;
  // Calls found(pages, categories) for each run of pages that were written, or that are a file's; `protect` protects
  // these in the same step. 0 or an errno value.
  template <class F>
  int Scan(PageRange pages, bool protect, F found) const;
  // 0 or an errno value: ENOENT where it is not registered, EACCES where some of it is a file's.
  int ProtectAll(PageRange pages, Kind kind) const;
  bool ProtectOne(PageRange pages, std::vector<Mapping>* mappings);
  bool IsBridge(PageRange gap) const;
  static PageRange Touched(const PageWindow& window, const Copied& piece);
  bool CheckAndOpenRun(PageWindow* window, std::span<Copied> pieces, PageRange inside, PageRange around);
  static void ReserveAside(PageWindow* window);
  bool Share(PageWindow* window, PageWindow::Watched* ours);
  bool IsAwaited(const PageWindow* by_others_than, PageRange pages) const;

  const WitnessMode mode_;
  int uffd_ = -1;
  int pagemap_ = -1;
  std::shared_mutex mutex_;  // of windows_; exclusive to open and to close a window
  std::vector<PageWindow*> windows_;
  std::map<uintptr_t, Mapping> registered_;  // by where they begin; may have been unmapped since
};

}  // namespace lazyckpt
