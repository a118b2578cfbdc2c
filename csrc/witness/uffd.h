// Ranges of whole pages, and the kernel's write protection of them: userfaultfd, and PAGEMAP_SCAN of
// /proc/self/pagemap.
#pragma once

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>

#include "status.h"

namespace lazyckpt {

inline constexpr size_t kPageBytes = 4096;  // of the kernel; with larger pages there is no witness
inline constexpr size_t kHugePageBytes = 2 << 20;

// Whole pages: [begin, end).
struct PageRange {
  uintptr_t begin = 0;
  uintptr_t end = 0;

  // The pages that lie inside some memory.
  static PageRange Inside(const void* data, size_t size) {
    const auto address = reinterpret_cast<uintptr_t>(data);
    return {(address + kPageBytes - 1) / kPageBytes * kPageBytes, (address + size) / kPageBytes * kPageBytes};
  }
  // The bytes of some memory, which need not be whole pages.
  static PageRange Exactly(std::span<const std::byte> memory) {
    const auto address = reinterpret_cast<uintptr_t>(memory.data());
    return {address, address + memory.size()};
  }
  // The pages that touch it.
  static PageRange Around(const void* data, size_t size) {
    const auto address = reinterpret_cast<uintptr_t>(data);
    return {address / kPageBytes * kPageBytes, (address + size + kPageBytes - 1) / kPageBytes * kPageBytes};
  }
  static PageRange Common(const PageRange& a, const PageRange& b) {
    return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
  }

  bool empty() const { return begin >= end; }
  size_t bytes() const { return empty() ? 0 : end - begin; }
  bool Overlaps(const PageRange& other) const { return begin < other.end && other.begin < end; }
  bool operator==(const PageRange&) const = default;
};

// The memory before and after the whole pages inside some memory; if there are none, all of it first.
inline std::array<std::span<const std::byte>, 2> EdgesOf(std::span<const std::byte> memory) {
  const PageRange pages = PageRange::Inside(memory.data(), memory.size());
  if (pages.empty()) return {memory, {}};
  const auto begin = reinterpret_cast<uintptr_t>(memory.data());
  return {memory.first(pages.begin - begin), memory.subspan(pages.end - begin)};
}

// What lies behind a private mapping. One of a file, such as safetensors makes of weights, may change with the file,
// except pages that this process has written.
enum class PageKind { kAnonymous, kFile };

// What Scan says of a run of pages, as bits (linux/fs.h has them from 6.7 on).
inline constexpr uint64_t kPageIsWritten = 1 << 1;
inline constexpr uint64_t kPageIsFile = 1 << 2;
inline constexpr uint64_t kPageIsPresent = 1 << 3;
inline constexpr uint64_t kPageIsSwapped = 1 << 4;

// The two descriptors. Any thread may call; the calls allocate nothing. An int is 0 or an errno value.
class Uffd {
 public:
  Status Open();
  void Close();

  int Register(PageRange mapping) const;  // EBUSY: another userfaultfd has it
  int WriteProtect(PageRange pages, bool on) const;

  // Calls found(pages, categories) for each run of pages that were written and, of kFile, that belong to the file.
  // `protect` protects these in the same step. EPERM: the memory is not, or no longer, registered.
  template <class F>
  int Scan(PageRange pages, PageKind kind, bool protect, F found) const {
    return ForEachRun(pages, kind == PageKind::kAnonymous ? kWritten : kWrittenOrFile, protect, [&](const Run& run) {
      found(PageRange{run.start, run.end}, run.categories);
      return protect ? ProtectMigrating({run.start, run.end}) : 0;
    });
  }

  // Protects anonymous pages, as Scan does, but asks nothing of them: that takes a third of the time.
  int Protect(PageRange pages) const;

 private:
  struct Run {
    uint64_t start, end, categories;
  };
  // Which pages a scan finds, all of these or any of these, and what it says of them.
  struct Question {
    uint64_t all_of, any_of, answer;
  };
  static constexpr Question kWritten{kPageIsWritten, 0, kPageIsWritten};
  static constexpr Question kWrittenOrFile{0, kPageIsWritten | kPageIsFile,
                                           kPageIsFile | kPageIsPresent | kPageIsSwapped};
  static constexpr Question kWrittenOrMigrating{0, kPageIsWritten | kPageIsSwapped, kPageIsWritten | kPageIsSwapped};

  // Calls found(run) for each run of pages until it returns an errno value.
  template <class F>
  int ForEachRun(PageRange pages, const Question& question, bool protect, F found) const {
    std::array<Run, 64> runs;
    for (uintptr_t at = pages.begin; at < pages.end;) {
      size_t count = 0;
      int error = ScanStep(&at, pages.end, question, protect, runs, &count);
      for (size_t i = 0; i < count && error == 0; ++i) error = found(runs[i]);
      if (error != 0) return error;
    }
    return 0;
  }
  int ScanStep(uintptr_t* at, uintptr_t end, const Question& question, bool protect, std::span<Run> runs,
               size_t* count) const;
  int ProtectMigrating(PageRange pages) const;

  int uffd_ = -1;
  int pagemap_ = -1;
};

}  // namespace lazyckpt
