// Which reads fetch some ranges of a file.

#include <algorithm>
#include <numeric>

#include "engine/range_reader.h"

namespace lazyckpt {
namespace {

constexpr uint64_t kMaxGapBytes = 64 << 10;  // reading over a gap is cheaper than another read

}  // namespace

ReadPlan PlanReads(const std::vector<ReadRange>& ranges, size_t read_bytes) {
  ReadPlan plan;
  auto& [parts, units] = plan;
  std::vector<size_t> order(ranges.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return ranges[a].offset < ranges[b].offset; });
  for (const size_t i : order) {
    const ReadRange& r = ranges[i];
    for (uint64_t done = 0; done < r.size;) {
      const uint64_t at = r.offset + done;
      if (units.empty() || at >= units.back().begin + read_bytes || at > units.back().end + kMaxGapBytes ||
          at < units.back().begin) {
        const uint64_t begin = at / kBlockBytes * kBlockBytes;
        units.push_back({begin, begin, parts.size(), parts.size()});
      }
      ReadUnit& unit = units.back();
      const uint64_t n = std::min(r.size - done, unit.begin + read_bytes - at);
      parts.push_back({i, at, done, n});
      unit.end = std::max(unit.end, static_cast<uint64_t>(AlignUp(at + n, kBlockBytes)));
      unit.last_part = parts.size();
      done += n;
    }
  }
  // One that continues a range begins its unit, a few bytes behind the block.
  for (const ReadUnit& unit : units)
    std::sort(parts.begin() + static_cast<std::ptrdiff_t>(unit.first_part),
              parts.begin() + static_cast<std::ptrdiff_t>(unit.last_part),
              [](const ReadPart& a, const ReadPart& b) { return a.at < b.at; });
  return plan;
}

}  // namespace lazyckpt
