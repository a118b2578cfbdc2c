// Preloaded before libc: chosen allocations of the process fail, on whatever thread they are. Not those of the dynamic
// linker, which makes a thread's variables at their first use, nor those of libc for the destructors of these: both end
// the process if they cannot.
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/prctl.h>

#include <atomic>
#include <cstring>

extern "C" {
void* __libc_malloc(size_t size);
void* __libc_calloc(size_t count, size_t size);
void* __libc_realloc(void* old, size_t size);
void* __libc_memalign(size_t alignment, size_t size);
}

namespace {

std::atomic<bool> armed{false};
std::atomic<long> seen{0};
long first = 0;
long end = 0;
bool all_threads = true;
uintptr_t linker[2] = {0, 0};  // where it is: from, to
[[gnu::tls_model("initial-exec")]] thread_local bool spared = false;

int FindLinker(dl_phdr_info* info, size_t, void*) {
  if (strstr(info->dlpi_name, "/ld-") == nullptr) return 0;
  linker[0] = info->dlpi_addr;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& part = info->dlpi_phdr[i];
    if (part.p_type == PT_LOAD) linker[1] = info->dlpi_addr + part.p_vaddr + part.p_memsz;
  }
  return 1;
}

bool OnEngineThread() {
  char name[16] = "";
  prctl(PR_GET_NAME, name);
  return strncmp(name, "lazyckpt-", 9) == 0;
}

bool Refused(void* caller) {
  const auto from = reinterpret_cast<uintptr_t>(caller);
  if (!armed || spared || (from >= linker[0] && from < linker[1]) || !(all_threads || OnEngineThread())) return false;
  const long number = ++seen;
  if (number < first || number >= end) return false;
  errno = ENOMEM;
  return true;
}

}  // namespace

extern "C" {

// From here on the allocations first, first + 1, … first + count - 1 fail, counted from 1; those of all threads count,
// or of the engine's.
void scarce_arm(long from, long count, bool all) {
  dl_iterate_phdr(FindLinker, nullptr);
  seen = 0;
  first = from;
  end = from + count;
  all_threads = all;
  armed = true;
}

// From here on all succeed.
void scarce_stop() { armed = false; }

// Those of this thread, until it is spared no longer.
void scarce_spare(bool is_spared) { spared = is_spared; }

// How many allocations there were until then.
long scarce_seen() { return seen; }

int __cxa_thread_atexit_impl(void (*destructor)(void*), void* object, void* library) {
  spared = true;
  static const auto note = reinterpret_cast<decltype(&__cxa_thread_atexit_impl)>(dlsym(RTLD_NEXT, __func__));
  const int result = note(destructor, object, library);
  spared = false;
  return result;
}

#define REFUSED Refused(__builtin_return_address(0))

void* malloc(size_t size) { return REFUSED ? nullptr : __libc_malloc(size); }

void* calloc(size_t count, size_t size) { return REFUSED ? nullptr : __libc_calloc(count, size); }

void* realloc(void* old, size_t size) { return REFUSED ? nullptr : __libc_realloc(old, size); }

void* memalign(size_t alignment, size_t size) { return REFUSED ? nullptr : __libc_memalign(alignment, size); }

void* aligned_alloc(size_t alignment, size_t size) { return REFUSED ? nullptr : __libc_memalign(alignment, size); }

int posix_memalign(void** found, size_t alignment, size_t size) {
  void* const made = REFUSED ? nullptr : __libc_memalign(alignment, size);
  if (made == nullptr) return ENOMEM;
  *found = made;
  return 0;
}
}
