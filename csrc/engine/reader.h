// From files into memory: parallel reads of byte ranges, each with its CRC-32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "device/device.h"
#include "status.h"

namespace lazyckpt {

constexpr size_t kReadBytes = 2 << 20;  // what is read at once

struct ReadRange {
  uint64_t offset;
  uint64_t size;
  std::byte* to = nullptr;  // nullptr: the bytes are checksummed and dropped
  int device = -1;          // if not negative, `to` is an address on this device
  uint32_t crc = 0;         // out
};

struct ReadOptions {
  unsigned threads = 0;     // 0: as many as there are cores, at most 4
  unsigned io_depth = 128;  // reads in flight, all threads together: how far the disk may be ahead of the caller
  std::string backend = "auto";
  std::optional<bool> direct;    // without: except on FUSE
  bool past_cache = false;       // from the disk, also what the page cache holds; the file is synced
  std::string fault;             // test build only
  std::span<std::byte> staging;  // page-aligned memory to read into; without, 16 MiB are mapped
  // Copies to a device, and waits: the bytes may be overwritten when it returns. Several threads call it at once.
  std::function<Status(int device, std::span<const DeviceCopy> copies)> upload;
};

// Ranges of one file. Reading begins at once, into a few staging buffers; where the bytes go may be said later, so
// that the disk works while the caller finds out. Ranges may stand in any order. Pages that the page cache holds are
// read from it, the others past it (O_DIRECT): no second copy of the data in memory.
class Reader {
 public:
  // A file shorter than a range is EIO "short read".
  static std::unique_ptr<Reader> Start(const std::string& path, const ReadOptions& options,
                                       std::vector<ReadRange> ranges, Status* status);
  ~Reader();  // gives up what is not read yet
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  // Fills every range, or says why not. `to`: one place for each range, without overlap, on `devices` (-1: the host).
  // To be called once.
  Status ReadInto(const std::vector<std::byte*>& to, const std::vector<int>& devices);
  const std::vector<ReadRange>& ranges() const;  // with their checksums, after ReadInto

 private:
  class Work;
  explicit Reader(std::unique_ptr<Work> work);
  std::unique_ptr<Work> work_;
};

}  // namespace lazyckpt
