// Reads ranges of a file: resident pages through the page cache, the others with O_DIRECT.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "engine/range_reader.h"
#include "io/backend.h"

namespace lazyckpt {
namespace {

constexpr size_t kBufferedBytes = 256 << 10;  // of the page cache: within a core's own L2 cache

}  // namespace

struct RangeReader::Flight {
  std::byte* buffer;
  const ReadUnit* unit;
  size_t done;
  unsigned retries;
};

// The reads of one thread. Its end waits for those in flight: no read outlives its buffer.
struct RangeReader::Flights {
  Flights(size_t depth, std::byte* staging) : all(depth) {
    results.reserve(depth);
    idle.reserve(depth);
    for (size_t i = 0; i < depth; ++i) {
      all[i].buffer = staging + i * kReadBytes;
      idle.push_back(&all[i]);
    }
  }
  ~Flights() {
    while (pending > 0) Reap();
  }
  void Reap() {
    results.clear();
    io->Wait(&results);
    pending -= results.size();
  }

  std::unique_ptr<IoBackend> io;  // made for the first read
  std::vector<Flight> all;
  std::vector<Flight*> idle;
  std::vector<IoResult> results;
  size_t pending = 0;  // submitted and not reaped
};

Status RangeReader::Open() {
  buffered_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (buffered_ < 0) return Status(errno, "open", path_);
  struct stat info{};
  if (fstat(buffered_, &info) != 0) return Status(errno, "fstat", path_);
  if (S_ISDIR(info.st_mode)) return Status(EISDIR, "read", path_);
  file_size_ = static_cast<uint64_t>(info.st_size);
  const bool fuse = IsOnFuse(path_);
  if (fuse && options_.backend == "auto") options_.backend = "posix";
  if (options_.direct.value_or(!fuse)) direct_ = open(path_.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
  return Status::Ok();
}

bool RangeReader::Resident(const ReadUnit& unit) const {
  if (direct_ < 0) return true;
  if (map_ == nullptr) return false;
  const uint64_t end = std::min(unit.end, file_size_);
  std::array<unsigned char, kReadBytes / kBlockBytes> pages;
  if (mincore(map_ + unit.begin, end - unit.begin, pages.data()) != 0) return false;
  const size_t n = (end - unit.begin + kBlockBytes - 1) / kBlockBytes;
  return std::all_of(pages.begin(), pages.begin() + n, [](unsigned char p) { return (p & 1) != 0; });
}

// Reads from the page cache. Host bytes pass the beginning of the buffer, which stays in the CPU's cache: a read
// straight into `to` would first load the lines of `to` into it. Parts for devices come first, each at its place in
// the unit.
void RangeReader::ReadBuffered(const ReadUnit& unit, std::byte* buffer) {
  if (!AwaitPlaces()) return;
  for (const bool on_device : {true, false}) {
    for (size_t i = unit.first_part; i < unit.last_part && !failed_; ++i)
      if ((ranges_[plan_.parts[i].range].device >= 0) == on_device) ReadBufferedPart(unit, plan_.parts[i], buffer);
    if (on_device && !failed_) Upload(PartsOf(unit), unit.begin, {buffer, unit.end - unit.begin});
  }
}

void RangeReader::ReadBufferedPart(const ReadUnit& unit, ReadPart& p, std::byte* buffer) {
  const bool on_device = ranges_[p.range].device >= 0;
  for (size_t done = 0; done < p.size;) {
    const size_t want = std::min(p.size - done, kBufferedBytes);
    std::byte* into = buffer + (on_device ? p.at - unit.begin + done : 0);
    const ssize_t n = pread(buffered_, into, want, static_cast<off_t>(p.at + done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return Fail(Status(n < 0 ? errno : EIO, n < 0 ? "read" : "short read", path_));
    p.crc = Put(p, done, into, static_cast<size_t>(n), p.crc);
    done += static_cast<size_t>(n);
  }
}

void RangeReader::ReadUnits() {
  Flights flights(depth_, staging_.data() + next_worker_++ * depth_ * kReadBytes);
  Status status;
  for (;;) {
    while (!flights.idle.empty() && !failed_) {
      const size_t next = next_unit_++;
      if (next >= plan_.units.size()) break;
      const ReadUnit& unit = plan_.units[next];
      if (Resident(unit)) {
        ReadBuffered(unit, flights.idle.back()->buffer);
        continue;
      }
      if (flights.io == nullptr)
        flights.io = MakeBackend(options_.backend, static_cast<unsigned>(depth_), options_.fault, &status);
      if (flights.io == nullptr) return Fail(status);
      Flight* flight = flights.idle.back();
      flights.idle.pop_back();
      *flight = {flight->buffer, &unit, 0, 0};
      if (!Submit(&flights, flight)) flights.idle.push_back(flight);
    }
    if (flights.idle.size() == depth_) return;
    // One result at a time: its buffer reads again before the next one is delivered.
    if (flights.results.empty()) {
      flights.Reap();
      continue;
    }
    const IoResult result = flights.results.back();
    flights.results.pop_back();
    auto* flight = static_cast<Flight*>(result.tag);
    if (Complete(&flights, flight, result.result)) flights.idle.push_back(flight);
  }
}

// False if the flight goes on, since the read was short or interrupted.
bool RangeReader::Complete(Flights* flights, Flight* flight, int64_t result) {
  const ReadUnit& unit = *flight->unit;
  if (result == -EINVAL) {  // the file system opens with O_DIRECT but does not read so
    ReadBuffered(unit, flight->buffer);
    return true;
  }
  if (result < 0 && result != -EINTR && result != -EAGAIN) Fail(Status(static_cast<int>(-result), "read", path_));
  const size_t before = flight->done;
  if (result > 0) flight->done += static_cast<size_t>(result);
  if (!failed_ && flight->done < std::min(unit.end, file_size_) - unit.begin) {
    flight->done -= flight->done % kBlockBytes;
    // The file was cut after Start, or the disk moves nothing.
    if (result == 0 || (flight->done == before && ++flight->retries > kMaxRetries))
      Fail(Status(ENODATA, "short read", path_));
    else if (Submit(flights, flight))
      return false;
  }
  if (AwaitPlaces()) Deliver(PartsOf(unit), unit.begin, {flight->buffer, unit.end - unit.begin});
  return true;
}

bool RangeReader::Submit(Flights* flights, Flight* flight) {
  const ReadUnit& unit = *flight->unit;
  const size_t size = unit.end - unit.begin - flight->done;
  Status status = flights->io->Submit(
      {IoRequest::Op::kRead, direct_, flight->buffer + flight->done, size, unit.begin + flight->done, flight});
  flights->pending += status.ok() ? 1 : 0;
  if (!status.ok()) Fail(status);
  return status.ok();
}

}  // namespace lazyckpt
