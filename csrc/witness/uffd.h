// The kernel's write protection of pages: userfaultfd, and PAGEMAP_SCAN of /proc/self/pagemap.
#pragma once

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>

#include "status.h"
#include "witness/page_range.h"

namespace lazyckpt {

enum class WitnessMode { kReport, kCopy };  // see PageWitness

// What Scan says of a run of pages, as bits (linux/fs.h has them from 6.7 on).
inline constexpr uint64_t kPageIsWritten = 1 << 1;
inline constexpr uint64_t kPageIsFile = 1 << 2;
inline constexpr uint64_t kPageIsPresent = 1 << 3;
inline constexpr uint64_t kPageIsSwapped = 1 << 4;

// The two descriptors. Any thread may call; the calls allocate nothing. An int is 0 or an errno value.
class Uffd {
 public:
  Status Open(WitnessMode mode);
  void Close();

  int Register(PageRange mapping) const;  // EBUSY: another userfaultfd has it
  int Unregister(PageRange mapping) const;
  int WriteProtect(PageRange pages, bool on) const;

  // Calls found(pages, categories) for each run of pages that were written or belong to a file. `protect` protects
  // these in the same step. EPERM: the memory is not, or no longer, registered with kReport.
  template <class F>
  int Scan(PageRange pages, bool protect, F found) const {
    std::array<Run, 64> runs;
    for (uintptr_t at = pages.begin; at < pages.end;) {
      size_t count = 0;
      const int error = ScanStep(&at, pages.end, protect, runs, &count);
      if (error != 0) return error;
      for (size_t i = 0; i < count; ++i) found(PageRange{runs[i].start, runs[i].end}, runs[i].categories);
    }
    return 0;
  }

  // kCopy: blocks until threads wait to write to protected pages; returns the number of pages stored in `pages`.
  size_t AwaitFaults(std::span<uintptr_t> pages) const;

 private:
  struct Run {
    uint64_t start, end, categories;
  };
  int ScanStep(uintptr_t* at, uintptr_t end, bool protect, std::span<Run> runs, size_t* count) const;

  WitnessMode mode_ = WitnessMode::kReport;
  int uffd_ = -1;
  int pagemap_ = -1;
};

}  // namespace lazyckpt
