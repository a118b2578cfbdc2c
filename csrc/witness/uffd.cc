#include "witness/uffd.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

// The headers are often older than the kernel.
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

struct ScanArguments {
  uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
  uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
constexpr uint64_t kScanProtectMatching = 1 << 0;
constexpr uint64_t kScanCheckAsync = 1 << 1;
#define LAZYCKPT_PAGEMAP_SCAN _IOWR('f', 16, ScanArguments)

int Result(int returned) { return returned == 0 ? 0 : errno; }

}  // namespace

Status Uffd::Open() {
  uffd_ = static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY));
  if (uffd_ < 0) return Status(errno, "userfaultfd", "");
  pagemap_ = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (pagemap_ < 0) return Status(errno, "open", "/proc/self/pagemap");
  uffdio_api api{};
  api.api = UFFD_API;
  api.features = UFFD_FEATURE_WP_UNPOPULATED | UFFD_FEATURE_WP_ASYNC;
  if (ioctl(uffd_, UFFDIO_API, &api) != 0)
    return Status(errno, "userfaultfd without the write protection that Linux 6.7 has", "");
  return Status::Ok();
}

void Uffd::Close() {
  if (uffd_ >= 0) close(uffd_);
  if (pagemap_ >= 0) close(pagemap_);
}

int Uffd::Register(PageRange mapping) const {
  uffdio_register call{};
  call.range = {mapping.begin, mapping.bytes()};
  call.mode = UFFDIO_REGISTER_MODE_WP;
  return Result(ioctl(uffd_, UFFDIO_REGISTER, &call));
}

int Uffd::WriteProtect(PageRange pages, bool on) const {
  uffdio_writeprotect call{};
  call.range = {pages.begin, pages.bytes()};
  call.mode = on ? UFFDIO_WRITEPROTECT_MODE_WP : 0;
  while (ioctl(uffd_, UFFDIO_WRITEPROTECT, &call) != 0)
    if (errno != EAGAIN && errno != EINTR) return errno;  // EAGAIN: the address space is changing
  return 0;
}

// Without runs, the kernel does not look at the descriptor of each page, which is not in a cache.
int Uffd::Protect(PageRange pages) const {
  for (uintptr_t at = pages.begin; at < pages.end;) {
    size_t count = 0;
    if (const int error = ScanStep(&at, pages.end, kWritten, true, {}, &count); error != 0) return error;
  }
  return ProtectMigrating(pages);
}

// PAGEMAP_SCAN cannot protect a page that the kernel is moving at this moment, for memory compaction or to another NUMA
// node: it marks the entry that stands for the page (reported as swapped), but a writable entry loses the mark when the
// page arrives, and the page looks written to (make_uffd_wp_pte and remove_migration_pte, Linux 6.7 to 6.18 at least).
// UFFDIO_WRITEPROTECT makes such an entry read-only first. It takes ten times as long, so only these pages get it.
//
// A page that another thread has written to since the scan is protected anew, as if the scan had reached it later.
int Uffd::ProtectMigrating(PageRange pages) const {
  return ForEachRun(pages, kWrittenOrMigrating, false,
                    [this](const Run& run) { return WriteProtect({run.start, run.end}, true); });
}

int Uffd::ScanStep(uintptr_t* at, uintptr_t end, const Question& question, bool protect, std::span<Run> runs,
                   size_t* count) const {
  ScanArguments call{};
  call.size = sizeof call;
  call.flags = kScanCheckAsync | (protect ? kScanProtectMatching : 0);
  call.start = *at;
  call.end = end;
  call.vec = reinterpret_cast<uint64_t>(runs.data());
  call.vec_len = runs.size();
  call.category_mask = question.all_of;
  call.category_anyof_mask = question.any_of;
  call.return_mask = question.answer;
  int found = 0;
  while ((found = ioctl(pagemap_, LAZYCKPT_PAGEMAP_SCAN, &call)) < 0)
    if (errno != EINTR) return errno;
  *count = static_cast<size_t>(found);
  if (call.walk_end <= *at) return ENOTSUP;  // a part of a page of hugetlbfs
  *at = call.walk_end;
  return 0;
}

}  // namespace lazyckpt
