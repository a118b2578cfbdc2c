// Which mappings of the process are registered with the kernel.
//
// Whole mappings are registered, not single storages: each registration may split a mapping, and a process may have
// only 65,530 of them.
#include <cstdio>
#include <cstring>
#include <iterator>
#include <utility>

#include "witness/page_witness.h"

namespace lazyckpt {

std::vector<PageWitness::Mapping> PageWitness::ReadMappings() {
  std::vector<Mapping> mappings;
  std::FILE* const maps = std::fopen("/proc/self/maps", "re");
  if (maps == nullptr) return mappings;
  char line[512];
  while (std::fgets(line, sizeof line, maps) != nullptr) {
    unsigned long begin = 0, end = 0, offset = 0, inode = 0;
    char flags[5] = "";
    unsigned major = 0, minor = 0;
    const int fields =
        std::sscanf(line, "%lx-%lx %4s %lx %x:%x %lu", &begin, &end, flags, &offset, &major, &minor, &inode);
    while (std::strchr(line, '\n') == nullptr && std::fgets(line, sizeof line, maps) != nullptr) {
    }
    // Not shared memory: the kernel does not report what another process writes.
    if (fields != 7 || flags[1] != 'w' || flags[3] != 'p') continue;
    mappings.push_back({{begin, end}, inode == 0 ? PageKind::kAnonymous : PageKind::kFile});
  }
  std::fclose(maps);
  return mappings;
}

// False if not all pages could be registered.
bool PageWitness::Register(PageRange pages, const std::vector<Mapping>& mappings) {
  const std::lock_guard lock(registering_);
  uintptr_t covered = pages.begin;
  const auto ends_before = [](const Mapping& m, uintptr_t address) { return m.pages.end <= address; };
  auto at = std::lower_bound(mappings.begin(), mappings.end(), covered, ends_before);
  for (; covered < pages.end && at != mappings.end() && at->pages.begin <= covered; ++at) {
    if (uffd_.Register(at->pages) != 0) break;
    // Known mappings there were unmapped since. This may forget more; registering memory twice does no harm.
    std::erase_if(registered_, [&](const auto& r) { return r.second.pages.Overlaps(at->pages); });
    tries_.erase(tries_.lower_bound(at->pages.begin), tries_.lower_bound(at->pages.end));
    registered_[at->pages.begin] = *at;
    covered = at->pages.end;
  }
  if (covered < pages.end) return false;
  // Join neighbours, since a storage may span several mappings.
  for (auto here = registered_.begin(); here != registered_.end();) {
    const auto next = std::next(here);
    if (next == registered_.end()) break;
    PageRange& joined = here->second.pages;
    if (next->first <= joined.end && next->second.kind == here->second.kind) {
      joined.end = std::max(joined.end, next->second.pages.end);
      registered_.erase(next);
    } else {
      here = next;
    }
  }
  return true;
}

std::optional<PageKind> PageWitness::Registered(PageRange pages) {
  const std::lock_guard lock(registering_);
  const auto after = registered_.upper_bound(pages.begin);
  if (after == registered_.begin() || std::prev(after)->second.pages.end < pages.end) return std::nullopt;
  return std::prev(after)->second.kind;
}

void PageWitness::ForgetAll() {
  const std::lock_guard lock(registering_);
  registered_.clear();
  tries_.clear();
  wanted_.clear();
}

}  // namespace lazyckpt
