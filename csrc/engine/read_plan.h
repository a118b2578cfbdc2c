// Which reads fetch some ranges of a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lazyckpt {

inline constexpr size_t kReadBytes = 2 << 20;  // the most that one read fetches

struct ReadRange {
  uint64_t offset;
  uint64_t size;
  std::byte* to = nullptr;  // nullptr: the bytes are checksummed and dropped
  int device = -1;          // not negative: `to` is an address on this device
  uint32_t crc = 0;         // out
};

// The bytes of one range that one read fetches.
struct ReadPart {
  size_t range;
  uint64_t at;  // in the file
  uint64_t in_range;
  size_t size;
  uint32_t crc = 0;
};

// One read: parts that lie close together in the file. Both ends are block-aligned.
struct ReadUnit {
  uint64_t begin;
  uint64_t end;
  size_t first_part, last_part;
};

struct ReadPlan {
  std::vector<ReadPart> parts;  // in the order of the file, and so of each range
  std::vector<ReadUnit> units;
};

// Ranges may stand in any order and overlap.
ReadPlan PlanReads(const std::vector<ReadRange>& ranges);

}  // namespace lazyckpt
