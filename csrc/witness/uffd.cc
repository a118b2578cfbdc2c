#include "witness/uffd.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
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
#ifndef USERFAULTFD_IOC_NEW
#define USERFAULTFD_IOC_NEW _IO(0xAA, 0x00)
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

Status Uffd::Open(WitnessMode mode) {
  mode_ = mode;
  if (mode == WitnessMode::kReport) {
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
  api.features |= mode == WitnessMode::kReport ? UFFD_FEATURE_WP_ASYNC : UFFD_FEATURE_PAGEFAULT_FLAG_WP;
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

int Uffd::Unregister(PageRange mapping) const {
  uffdio_range call{mapping.begin, mapping.bytes()};
  return Result(ioctl(uffd_, UFFDIO_UNREGISTER, &call));
}

int Uffd::WriteProtect(PageRange pages, bool on) const {
  uffdio_writeprotect call{};
  call.range = {pages.begin, pages.bytes()};
  call.mode = on ? UFFDIO_WRITEPROTECT_MODE_WP : 0;
  while (ioctl(uffd_, UFFDIO_WRITEPROTECT, &call) != 0)
    if (errno != EAGAIN && errno != EINTR) return errno;  // EAGAIN: the address space is changing
  return 0;
}

int Uffd::Protect(PageRange pages) const {
  for (uintptr_t at = pages.begin; at < pages.end;) {
    size_t count = 0;
    if (const int error = ScanStep(&at, pages.end, PageKind::kAnonymous, true, {}, &count); error != 0) return error;
  }
  return 0;
}

// For anonymous memory it asks no more than whether a page was written, and without `runs` not even that: the kernel
// then does not look at the descriptor of each page, which is not in a cache.
int Uffd::ScanStep(uintptr_t* at, uintptr_t end, PageKind kind, bool protect, std::span<Run> runs,
                   size_t* count) const {
  ScanArguments call{};
  call.size = sizeof call;
  call.flags = (mode_ == WitnessMode::kReport ? kScanCheckAsync : 0) | (protect ? kScanProtectMatching : 0);
  call.start = *at;
  call.end = end;
  call.vec = reinterpret_cast<uint64_t>(runs.data());
  call.vec_len = runs.size();
  if (kind == PageKind::kAnonymous) {
    call.category_mask = call.return_mask = kPageIsWritten;
  } else {
    call.category_anyof_mask = kPageIsWritten | kPageIsFile;
    call.return_mask = kPageIsFile | kPageIsPresent | kPageIsSwapped;
  }
  int found = 0;
  while ((found = ioctl(pagemap_, LAZYCKPT_PAGEMAP_SCAN, &call)) < 0)
    if (errno != EINTR) return errno;
  *count = static_cast<size_t>(found);
  if (call.walk_end <= *at) return ENOTSUP;  // a part of a page of hugetlbfs
  *at = call.walk_end;
  return 0;
}

size_t Uffd::AwaitFaults(std::span<uintptr_t> pages) const {
  pollfd ready{.fd = uffd_, .events = POLLIN, .revents = 0};
  if (poll(&ready, 1, -1) < 0) return 0;
  std::array<uffd_msg, 16> messages;
  const size_t room = std::min(messages.size(), pages.size()) * sizeof(uffd_msg);
  const ssize_t bytes = read(uffd_, messages.data(), room);
  size_t count = 0;
  for (ssize_t i = 0; i < bytes / static_cast<ssize_t>(sizeof(uffd_msg)); ++i)
    if (messages[i].event == UFFD_EVENT_PAGEFAULT)
      pages[count++] = messages[i].arg.pagefault.address / kPageBytes * kPageBytes;
  return count;
}

}  // namespace lazyckpt
