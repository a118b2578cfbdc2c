// From files into memory: parallel reads of byte ranges, each with its CRC-32.
#pragma once

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device/device.h"
#include "engine/ring.h"
#include "status.h"

namespace lazyckpt {

inline constexpr size_t kReadBytes = 2 << 20;   // the most that one read of a file fetches
inline constexpr size_t kFetchBytes = 8 << 20;  // and one request to another machine

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
  std::vector<ReadPart> parts;  // of a unit, and of a range: in the order of the file
  std::vector<ReadUnit> units;
};

// Ranges may stand in any order and overlap. `read_bytes`: the most that one read fetches.
ReadPlan PlanReads(const std::vector<ReadRange>& ranges, size_t read_bytes);

// Takes the next bytes of a request; false if no more are wanted.
using Landing = std::function<bool(const std::byte* bytes, size_t size)>;

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
  // Instead of a file: calls `land` with the bytes from `begin` on, in parts as they come, or returns why there are
  // none. Several threads call it at once, each with one request at a time. A request may take long, and no one waits
  // for it once the read has failed or was given up: it then ends later, and `land` drops its bytes.
  std::function<Status(uint64_t begin, size_t size, const Landing& land)> fetch;
  uint64_t size = 0;  // with fetch: of the whole
};

// Reads ranges of one file, or of bytes that `fetch` brings. Reading a file begins at once, into a few staging buffers,
// and the caller may say later where the bytes go: the disk works while it finds out. Pages in the page cache are read
// from there; the others with O_DIRECT, so memory holds no second copy of the data. `fetch` is called when the places
// are known, since a server drops an answer that is not read. Its bytes go to their place part by part; those for
// devices pass the staging buffers, which are pinned.
//
// If memory runs out on a reader thread, the read fails with ENOMEM.
//
// The threads that read a file end before the reader does: the kernel may write into their buffers. Those that fetch
// share it, and may outlive its other owners. They write to a place only while they count in `landing_`, and never
// after a failure.
class RangeReader : public std::enable_shared_from_this<RangeReader> {
 public:
  // ENODATA "short read" if the file is shorter than a range.
  static std::shared_ptr<RangeReader> Start(const std::string& path, const ReadOptions& options,
                                            std::vector<ReadRange> ranges, Status* status);
  ~RangeReader();
  RangeReader(const RangeReader&) = delete;
  RangeReader& operator=(const RangeReader&) = delete;

  // Fills every range, or returns why not. `to`: one place for each range, without overlap, on `devices` (-1: the
  // host). May be called once.
  Status ReadInto(const std::vector<std::byte*>& to, const std::vector<int>& devices);
  // The same in three calls. AwaitEnd returns false at `until`.
  void Land(const std::vector<std::byte*>& to, const std::vector<int>& devices);
  bool AwaitEnd(std::optional<std::chrono::steady_clock::time_point> until);
  Status End();
  // The read fails with ECANCELED, soon. Any thread calls it.
  void Cancel() { Fail(Status(ECANCELED, "read", path_)); }
  // Drops what has not been delivered. When it returns, nothing writes to a place any more. It waits for the reads of a
  // file that are in flight, but not for requests of `fetch`.
  void GiveUp();
  const std::vector<ReadRange>& ranges() const { return ranges_; }  // with their checksums, after End

 private:
  struct Flight;
  struct Flights;

  RangeReader(const std::string& path, const ReadOptions& options, std::vector<ReadRange> ranges)
      : path_(path), options_(options), ranges_(std::move(ranges)) {}
  Status Start();
  Status Open();
  void StartThreads(unsigned count);
  bool Resident(const ReadUnit& unit) const;
  void Fail(Status error);
  bool AwaitPlaces();
  void ReadBuffered(const ReadUnit& unit, std::byte* buffer);
  void ReadBufferedPart(const ReadUnit& unit, ReadPart& p, std::byte* buffer);
  void Upload(std::span<const ReadPart> parts, uint64_t begin, std::span<std::byte> bytes);
  void Deliver(std::span<ReadPart> parts, uint64_t begin, std::span<std::byte> bytes);
  bool LandFetched(std::span<ReadPart> parts, uint64_t begin, std::span<std::byte> bytes, std::byte* staging);
  std::span<ReadPart> PartsOf(const ReadUnit& unit);
  uint32_t Put(const ReadPart& p, size_t done, const std::byte* from, size_t size, uint32_t crc) const;
  void Run();
  void ReadUnits();
  void FetchUnits();
  bool Complete(Flights* flights, Flight* flight, int64_t result);
  bool Submit(Flights* flights, Flight* flight);

  const std::string path_;
  ReadOptions options_;
  std::vector<ReadRange> ranges_;
  int buffered_ = -1, direct_ = -1;  // descriptors
  uint64_t file_size_ = 0;
  size_t read_bytes_ = kReadBytes;
  std::byte* map_ = nullptr;  // only for mincore(), which says which pages are in memory
  // A ring, for its huge pages: a read into scattered small pages is split into many requests, at a third of the speed.
  Ring own_staging_;
  std::span<std::byte> staging_;
  size_t depth_ = 0;  // reads in flight, for each thread
  std::atomic<unsigned> next_worker_ = 0;
  ReadPlan plan_;
  std::vector<std::thread> workers_;  // that read a file
  std::atomic<size_t> next_unit_ = 0;
  std::mutex mutex_;
  std::atomic<bool> failed_ = false;  // or given up
  bool have_places_ = false;
  unsigned running_ = 0;  // threads
  unsigned landing_ = 0;  // those that deliver what they have fetched
  std::condition_variable changed_;
  Status error_;
};

}  // namespace lazyckpt
