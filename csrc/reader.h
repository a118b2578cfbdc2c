// From files into memory: parallel reads of byte ranges, each with its CRC-32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "status.h"

namespace lazyckpt {

struct ReadRange {
  uint64_t offset;
  uint64_t size;
  std::byte* to;     // nullptr: the bytes are checksummed and dropped
  uint32_t crc = 0;  // out
};

struct ReadOptions {
  unsigned threads = 0;   // 0: as many as there are cores, at most 4
  unsigned io_depth = 8;  // reads in flight, all threads together
  size_t unit_bytes = 4 << 20;
  std::string backend = "auto";
  bool direct = true;
  std::string fault;  // test build only
};

// Fills every range, or says why not; a file shorter than a range is EIO "short read". Ranges may stand in any
// order and must not overlap in memory. Pages that the page cache holds are read from it, the others past it
// (O_DIRECT), through a few staging buffers per thread: no second copy of the data in memory.
Status ReadRanges(const std::string& path, const ReadOptions& options, std::vector<ReadRange>* ranges);

}  // namespace lazyckpt
