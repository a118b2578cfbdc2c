// WitnessMode::kCopy: copies a page aside before a thread writes to it.
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

#include <array>
#include <cstring>

#include "witness/page_witness.h"

namespace lazyckpt {
namespace {

constexpr size_t kSaveBytes = 64 << 10;  // copied aside at once, since a fault costs as much as a few pages

}  // namespace

// Runs until the process ends. Every writer waits for this thread, so it allocates nothing and touches memory that may
// be protected only to copy it.
void PageWitness::SaveLoop() {
  pthread_setname_np(pthread_self(), "lazyckpt-aside");
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, nullptr);
  for (;;) {
    std::array<uintptr_t, 16> pages;
    const size_t count = uffd_.AwaitFaults(pages);
    for (size_t i = 0; i < count; ++i) Save(pages[i]);
  }
}

// Copies the pages around a fault for each window that has not copied them yet, then lets the writer go on.
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
        batch = PageRange::Common(batch, w.pages);
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
  (void)uffd_.WriteProtect(batch, false);
}

// Reserves addresses for copies of all pages of the window; memory is used only for pages that are written.
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

}  // namespace lazyckpt
