// Preloaded: plays a kernel that moves pages of the process while it protects them.
//
// The kernel marks the entry of a migrating page as protected, and forgets the mark when the page arrives. So after a
// scan that protects, page MIGRATING_PAGE of what was scanned loses its protection: at once ("arrived"), or at the next
// scan ("moving"), which reports it as swapped if it asks for such pages.
#include <dlfcn.h>
#include <linux/userfaultfd.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>

namespace {

struct Region {
  uint64_t begin, end, categories;
};
struct Scan {
  uint64_t size, flags, begin, end, walk_end, regions, count, most, inverted, all_of, any_of, answer;
};
constexpr unsigned long kScan = _IOWR('f', 16, Scan);
constexpr uint64_t kPage = 4096, kSwapped = 1 << 4;

int uffd = -1;
uint64_t migrating = 0;  // the page that the next scan reports

using Ioctl = int (*)(int, unsigned long, ...);
const auto real = reinterpret_cast<Ioctl>(dlsym(RTLD_NEXT, "ioctl"));

void Arrive(uint64_t page) {
  uffdio_writeprotect call{};
  call.range = {page, kPage};
  real(uffd, UFFDIO_WRITEPROTECT, &call);
}

int OnScan(int fd, Scan* scan) {
  const char* const number = getenv("MIGRATING_PAGE");
  if (number == nullptr) return real(fd, kScan, scan);
  const uint64_t begin = scan->begin;
  const bool protects = (scan->flags & 1) != 0, asks = (scan->any_of & kSwapped) != 0;
  const uint64_t moves = protects || migrating < begin || migrating >= scan->end ? 0 : migrating;
  if (moves != 0) migrating = 0;
  if (moves != 0 && !asks) Arrive(moves);
  int found = real(fd, kScan, scan);
  if (moves != 0 && asks && found == 0) {
    *reinterpret_cast<Region*>(scan->regions) = {moves, moves + kPage, kSwapped};
    Arrive(moves);
    found = 1;
  }
  const uint64_t page = begin + strtoull(number, nullptr, 10) * kPage;
  if (!protects || found < 0 || page >= scan->end) return found;
  if (strcmp(getenv("MIGRATING_IS"), "arrived") == 0)
    Arrive(page);
  else
    migrating = page;
  return found;
}

}  // namespace

extern "C" int ioctl(int fd, unsigned long request, ...) {
  va_list arguments;
  va_start(arguments, request);
  void* const argument = va_arg(arguments, void*);
  va_end(arguments);
  if (request == kScan) return OnScan(fd, static_cast<Scan*>(argument));
  if (request == UFFDIO_WRITEPROTECT) uffd = fd;
  return real(fd, request, argument);
}
