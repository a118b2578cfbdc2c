#include "engine/range_reader.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <new>
#include <system_error>

#include "engine/checksum.h"
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

std::unique_ptr<RangeReader> RangeReader::Start(const std::string& path, const ReadOptions& options,
                                                std::vector<ReadRange> ranges, Status* status) {
  std::unique_ptr<RangeReader> reader(new RangeReader(path, options, std::move(ranges)));
  *status = reader->Start();
  return status->ok() ? std::move(reader) : nullptr;
}

RangeReader::~RangeReader() {
  {
    std::lock_guard lock(mutex_);
    failed_ = true;
  }
  places_known_.notify_all();
  for (auto& t : workers_) t.join();
  if (map_ != nullptr) munmap(map_, file_size_);
  for (const int fd : {buffered_, direct_})
    if (fd >= 0) close(fd);
}

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

Status RangeReader::Start() {
  if (options_.fetch) {
    file_size_ = options_.size;
    read_bytes_ = kFetchBytes;
  } else if (Status opened = Open(); !opened.ok()) {
    return opened;
  }
  for (const ReadRange& r : ranges_)
    if (r.offset > file_size_ || r.size > file_size_ - r.offset) return Status(ENODATA, "short read", path_);
  if (options_.past_cache && buffered_ >= 0) {
    (void)posix_fadvise(buffered_, 0, 0, POSIX_FADV_DONTNEED);  // in case O_DIRECT does not work
  } else if (file_size_ > 0 && direct_ >= 0) {
    void* const map = mmap(nullptr, file_size_, PROT_READ, MAP_SHARED, buffered_, 0);
    if (map != MAP_FAILED) map_ = static_cast<std::byte*>(map);
  }
  plan_ = PlanReads(ranges_, read_bytes_);

  unsigned threads = options_.threads;
  if (options_.fetch)
    threads = options_.io_depth;  // a request occupies its thread
  else if (threads == 0)
    threads = std::clamp(std::thread::hardware_concurrency(), 1u, 4u);
  staging_ = options_.staging;
  if (staging_.size() < read_bytes_ && !plan_.units.empty()) {
    if (Status mapped = own_staging_.Map(8 * kReadBytes); !mapped.ok()) return mapped;
    staging_ = {own_staging_.base(), 8 * kReadBytes};
  }
  const size_t depth = std::min({size_t{options_.io_depth}, staging_.size() / read_bytes_, plan_.units.size()});
  threads = static_cast<unsigned>(std::min<size_t>(threads, depth));
  if (threads > 0) depth_ = depth / threads;
  try {
    for (unsigned i = 0; i < threads; ++i) workers_.emplace_back([this] { Run(); });
  } catch (const std::system_error&) {
    // Fewer threads do; without any, ReadInto reads.
  }
  return Status::Ok();
}

Status RangeReader::ReadInto(const std::vector<std::byte*>& to, const std::vector<int>& devices) {
  for (size_t i = 0; i < ranges_.size(); ++i) {
    ReadRange& r = ranges_[i];
    r.to = to[i];
    r.device = devices[i];
    // Ask for huge pages, since new memory comes in small ones; only whole huge pages inside the range.
    constexpr size_t kHuge = 2 << 20;
    const auto begin = AlignUp(reinterpret_cast<uintptr_t>(r.to), kHuge);
    const auto end = (reinterpret_cast<uintptr_t>(r.to) + r.size) / kHuge * kHuge;
    if (r.to != nullptr && r.device < 0 && end > begin)
      madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
  {
    std::lock_guard lock(mutex_);
    have_places_ = true;
  }
  places_known_.notify_all();
  if (workers_.empty()) Run();
  for (auto& t : workers_) t.join();
  workers_.clear();
  if (!error_.ok()) return error_;
  for (const ReadPart& p : plan_.parts) {
    ReadRange& r = ranges_[p.range];
    r.crc = Crc32Combine(r.crc, p.crc, p.size);
  }
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

void RangeReader::Fail(Status error) {
  {
    std::lock_guard lock(mutex_);
    if (error_.ok()) error_ = std::move(error);
    failed_ = true;
  }
  places_known_.notify_all();
}

// Waits for ReadInto to say where bytes go. False if the read failed or was given up.
bool RangeReader::AwaitPlaces() {
  std::unique_lock lock(mutex_);
  places_known_.wait(lock, [this] { return have_places_ || failed_; });
  return !failed_;
}

// Reads from the page cache. Host bytes pass the beginning of the buffer, which stays in the CPU's cache: a read
// straight into `to` would first load the lines of `to` into it. Parts for devices come first, each at its place in
// the unit.
void RangeReader::ReadBuffered(const ReadUnit& unit, std::byte* buffer) {
  if (!AwaitPlaces()) return;
  for (const bool on_device : {true, false}) {
    for (size_t i = unit.first_part; i < unit.last_part && !failed_; ++i)
      if ((ranges_[plan_.parts[i].range].device >= 0) == on_device) ReadBufferedPart(unit, plan_.parts[i], buffer);
    if (on_device && !failed_) Upload(unit, buffer);
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
    p.crc = Land(p, done, into, static_cast<size_t>(n), p.crc);
    done += static_cast<size_t>(n);
  }
}

// Copies the parts of a unit for devices, neighbours on one device in one call, since each call waits for its copies.
void RangeReader::Upload(const ReadUnit& unit, std::byte* buffer) {
  std::vector<DeviceCopy> copies;
  int device = -1;
  const auto send = [&] {
    if (copies.empty()) return;
    if (Status status = options_.upload(device, copies); !status.ok()) Fail(std::move(status));
    copies.clear();
  };
  for (size_t i = unit.first_part; i < unit.last_part; ++i) {
    const ReadPart& p = plan_.parts[i];
    const ReadRange& range = ranges_[p.range];
    if (range.device < 0) continue;
    if (range.device != device) send();
    device = range.device;
    const auto to = reinterpret_cast<uint64_t>(range.to + p.in_range);
    copies.push_back({buffer + (p.at - unit.begin), to, p.size});
  }
  send();
}

void RangeReader::Deliver(const Flight& flight) {
  if (!AwaitPlaces()) return;
  for (size_t i = flight.unit->first_part; i < flight.unit->last_part; ++i) {
    ReadPart& p = plan_.parts[i];
    p.crc = Land(p, 0, flight.buffer + (p.at - flight.unit->begin), p.size, 0);
  }
  Upload(*flight.unit, flight.buffer);
}

// Adds bytes of a part, from `done` on, to its checksum, and copies them to their place if that is on the host.
uint32_t RangeReader::Land(const ReadPart& p, size_t done, const std::byte* from, size_t size, uint32_t crc) const {
  const ReadRange& range = ranges_[p.range];
  if (range.to == nullptr || range.device >= 0) return Crc32(crc, from, size);
  return CopyCrc32(crc, range.to + p.in_range + done, from, size);
}

// The one place of a reader thread that catches std::bad_alloc; Flights ends the reads in flight before.
void RangeReader::Run() {
  try {
    options_.fetch ? FetchUnits() : ReadUnits();
  } catch (const std::bad_alloc&) {
    Fail(Status::NoMemory());
  }
}

void RangeReader::FetchUnits() {
  std::byte* const buffer = staging_.data() + next_worker_++ * depth_ * read_bytes_;
  while (!failed_) {
    const size_t next = next_unit_++;
    if (next >= plan_.units.size()) return;
    const ReadUnit& unit = plan_.units[next];
    const std::span<std::byte> to(buffer, std::min(unit.end, file_size_) - unit.begin);
    if (Status fetched = options_.fetch(unit.begin, to); !fetched.ok()) return Fail(std::move(fetched));
    Deliver({buffer, &unit, 0, 0});
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
  Deliver(*flight);
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
