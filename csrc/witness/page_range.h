// Ranges of whole pages.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace lazyckpt {

inline constexpr size_t kPageBytes = 4096;  // of the kernel; with larger pages there is no witness

// Whole pages: [begin, end).
struct PageRange {
  uintptr_t begin = 0;
  uintptr_t end = 0;

  // The pages that lie inside some memory.
  static PageRange Inside(const void* data, size_t size) {
    const auto address = reinterpret_cast<uintptr_t>(data);
    return {(address + kPageBytes - 1) / kPageBytes * kPageBytes, (address + size) / kPageBytes * kPageBytes};
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

}  // namespace lazyckpt
