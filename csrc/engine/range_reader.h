// From files into memory: parallel reads of byte ranges, each with its CRC-32.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "device/device.h"
#include "engine/read_plan.h"
#include "status.h"

namespace lazyckpt {

struct ReadOptions {
  unsigned threads = 0;     // 0: one for each core, at most 4
  unsigned io_depth = 128;  // reads in flight, all threads together: how far the disk may be ahead of the caller
  std::string backend = "auto";
  std::optional<bool> direct;    // O_DIRECT; nullopt: except on FUSE
  bool past_cache = false;       // read from the disk what the page cache holds, too; the file is synced
  std::string fault;             // test build only
  std::span<std::byte> staging;  // page-aligned memory to read into; if it is too small, the reader maps 16 MiB
  // Copies to a device and returns when the host bytes may be overwritten. Several threads call it at once. It may
  // throw std::bad_alloc.
  std::function<Status(int device, std::span<const DeviceCopy> copies)> upload;
};

// Reads ranges of one file. Reading begins at once, into a few staging buffers, and the caller may say later where the
// bytes go: the disk works while it finds out. Pages in the page cache are read from there; the others with O_DIRECT,
// so memory holds no second copy of the data.
//
// If memory runs out on a reader thread, the read fails with ENOMEM.
class RangeReader {
 public:
  // ENODATA "short read" if the file is shorter than a range.
  static std::unique_ptr<RangeReader> Start(const std::string& path, const ReadOptions& options,
                                            std::vector<ReadRange> ranges, Status* status);
  ~RangeReader();  // gives up what is not read yet
  RangeReader(const RangeReader&) = delete;
  RangeReader& operator=(const RangeReader&) = delete;

  // Fills every range, or returns why not. `to`: one place for each range, without overlap, on `devices` (-1: the
  // host). May be called once.
  Status ReadInto(const std::vector<std::byte*>& to, const std::vector<int>& devices);
  const std::vector<ReadRange>& ranges() const;  // with their checksums, after ReadInto

 private:
  class Work;
  explicit RangeReader(std::unique_ptr<Work> work);
  std::unique_ptr<Work> work_;
};

}  // namespace lazyckpt
