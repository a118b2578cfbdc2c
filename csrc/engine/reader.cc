#include "engine/reader.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <system_error>
#include <thread>

#include "engine/checksum.h"
#include "engine/ring.h"
#include "io/backend.h"

namespace lazyckpt {
namespace {

struct Part {
  size_t range;
  uint64_t at;  // in the file
  uint64_t in_range;
  size_t size;
  uint32_t crc = 0;
};

// What is read at once: one or more parts of ranges that lie close together in the file.
struct Unit {
  uint64_t begin;  // block-aligned
  uint64_t end;    // block-aligned
  size_t first_part, last_part;
};

class Descriptor {
 public:
  Descriptor() = default;
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  void Open(const std::string& path, int flags) { fd_ = open(path.c_str(), flags | O_CLOEXEC); }
  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

}  // namespace

class Reader::Work {
 public:
  Work(const std::string& path, const ReadOptions& options, std::vector<ReadRange> ranges)
      : path_(path), options_(options), ranges_(std::move(ranges)) {}

  ~Work() {
    {
      std::lock_guard lock(mutex_);
      failed_ = true;
    }
    places_known_.notify_all();
    for (auto& t : workers_) t.join();
    if (map_ != nullptr) munmap(map_, file_size_);
  }

  Status Start() {
    buffered_.Open(path_, O_RDONLY);
    if (buffered_.get() < 0) return Status(errno, "open", path_);
    struct stat info{};
    if (fstat(buffered_.get(), &info) != 0) return Status(errno, "fstat", path_);
    if (S_ISDIR(info.st_mode)) return Status(EISDIR, "read", path_);
    file_size_ = static_cast<uint64_t>(info.st_size);
    for (const ReadRange& r : ranges_)
      if (r.offset > file_size_ || r.size > file_size_ - r.offset) return Status(ENODATA, "short read", path_);
    const bool fuse = IsOnFuse(path_);
    if (fuse && options_.backend == "auto") options_.backend = "posix";
    if (options_.direct.value_or(!fuse)) direct_.Open(path_, O_RDONLY | O_DIRECT);
    if (options_.past_cache)
      (void)posix_fadvise(buffered_.get(), 0, 0, POSIX_FADV_DONTNEED);  // for where there is no O_DIRECT
    else
      MapFile();
    LayOut();

    unsigned threads = options_.threads;
    if (threads == 0) threads = std::clamp(std::thread::hardware_concurrency(), 1u, 4u);
    staging_ = options_.staging;
    if (staging_.size() < kReadBytes && !units_.empty()) {
      if (Status mapped = own_staging_.Map(8 * kReadBytes); !mapped.ok()) return mapped;
      staging_ = {own_staging_.base(), 8 * kReadBytes};
    }
    const size_t depth = std::min({size_t{options_.io_depth}, staging_.size() / kReadBytes, units_.size()});
    threads = static_cast<unsigned>(std::min<size_t>(threads, depth));
    if (threads > 0) depth_ = depth / threads;
    try {
      for (unsigned i = 0; i < threads; ++i) workers_.emplace_back([this] { Run(); });
    } catch (const std::system_error&) {
      // Fewer threads than hoped for are enough.
    }
    return Status::Ok();
  }

  Status ReadInto(const std::vector<std::byte*>& to, const std::vector<int>& devices) {
    for (size_t i = 0; i < ranges_.size(); ++i) {
      ReadRange& r = ranges_[i];
      r.to = to[i];
      r.device = devices[i];
      // New memory comes in small pages unless somebody asks; only whole huge pages inside the range are touched.
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
    for (const Part& p : parts_) {
      ReadRange& r = ranges_[p.range];
      r.crc = Crc32Combine(r.crc, p.crc, p.size);
    }
    return Status::Ok();
  }

  const std::vector<ReadRange>& ranges() const { return ranges_; }

 private:
  struct Flight {
    std::byte* buffer;
    const Unit* unit;
    size_t done;
    unsigned retries;
  };

  // Only to ask which pages are in memory; never dereferenced.
  void MapFile() {
    if (file_size_ == 0 || direct_.get() < 0) return;
    void* map = mmap(nullptr, file_size_, PROT_READ, MAP_SHARED, buffered_.get(), 0);
    if (map != MAP_FAILED) map_ = static_cast<std::byte*>(map);
  }

  bool Resident(const Unit& unit) const {
    if (direct_.get() < 0) return true;
    if (options_.past_cache) return false;
    if (map_ == nullptr) return false;
    const uint64_t end = std::min(unit.end, file_size_);
    std::array<unsigned char, kReadBytes / kBlockBytes> pages;
    if (mincore(map_ + unit.begin, end - unit.begin, pages.data()) != 0) return false;
    const size_t n = (end - unit.begin + kBlockBytes - 1) / kBlockBytes;
    return std::all_of(pages.begin(), pages.begin() + n, [](unsigned char p) { return (p & 1) != 0; });
  }

  void LayOut() {
    std::vector<size_t> order(ranges_.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [this](size_t a, size_t b) { return ranges_[a].offset < ranges_[b].offset; });
    for (const size_t i : order) {
      const ReadRange& r = ranges_[i];
      for (uint64_t done = 0; done < r.size;) {
        const uint64_t at = r.offset + done;
        if (units_.empty() || at >= units_.back().begin + kReadBytes || at > units_.back().end + kMaxGapBytes ||
            at < units_.back().begin) {
          const uint64_t begin = at / kBlockBytes * kBlockBytes;
          units_.push_back({begin, begin, parts_.size(), parts_.size()});
        }
        Unit& unit = units_.back();
        const uint64_t n = std::min(r.size - done, unit.begin + kReadBytes - at);
        parts_.push_back({i, at, done, n});
        unit.end = std::max(unit.end, static_cast<uint64_t>(AlignUp(at + n, kBlockBytes)));
        unit.last_part = parts_.size();
        done += n;
      }
    }
  }

  void Fail(Status error) {
    {
      std::lock_guard lock(mutex_);
      if (error_.ok()) error_ = std::move(error);
      failed_ = true;
    }
    places_known_.notify_all();
  }

  // False if there will be no places, because the read failed or was given up.
  bool AwaitPlaces() {
    std::unique_lock lock(mutex_);
    places_known_.wait(lock, [this] { return have_places_ || failed_; });
    return !failed_;
  }

  // Reads from the page cache. What belongs on the host passes the beginning of the buffer, which stays in the CPU's
  // cache: a read straight into `to` would first bring the lines of `to` into it. Parts for devices come before that,
  // each at its place in the unit.
  void ReadBuffered(const Unit& unit, std::byte* buffer) {
    if (!AwaitPlaces()) return;
    for (const bool on_device : {true, false}) {
      for (size_t i = unit.first_part; i < unit.last_part && !failed_; ++i)
        if ((ranges_[parts_[i].range].device >= 0) == on_device) ReadPart(unit, parts_[i], buffer);
      if (on_device && !failed_) Upload(unit, buffer);
    }
  }

  void ReadPart(const Unit& unit, Part& p, std::byte* buffer) {
    const bool on_device = ranges_[p.range].device >= 0;
    for (size_t done = 0; done < p.size;) {
      const size_t want = std::min(p.size - done, kBufferedBytes);
      std::byte* into = buffer + (on_device ? p.at - unit.begin + done : 0);
      const ssize_t n = pread(buffered_.get(), into, want, static_cast<off_t>(p.at + done));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return Fail(Status(n < 0 ? errno : EIO, n < 0 ? "read" : "short read", path_));
      p.crc = Land(p, done, into, static_cast<size_t>(n), p.crc);
      done += static_cast<size_t>(n);
    }
  }

  // Copies the parts of a unit that belong on devices: in one call for neighbours on the same device, since each call
  // waits for its copies. Meanwhile the other threads read, and the disk reads for this one.
  void Upload(const Unit& unit, std::byte* buffer) try {
    std::vector<DeviceCopy> copies;
    int device = -1;
    const auto send = [&] {
      if (copies.empty()) return;
      if (Status status = options_.upload(device, copies); !status.ok()) Fail(std::move(status));
      copies.clear();
    };
    for (size_t i = unit.first_part; i < unit.last_part; ++i) {
      const Part& p = parts_[i];
      const ReadRange& range = ranges_[p.range];
      if (range.device < 0) continue;
      if (range.device != device) send();
      device = range.device;
      const auto to = reinterpret_cast<uint64_t>(range.to + p.in_range);
      copies.push_back({buffer + (p.at - unit.begin), to, p.size});
    }
    send();
  } catch (const std::bad_alloc&) {
    Fail(Status::NoMemory());
  }

  void Deliver(const Flight& flight) {
    if (!AwaitPlaces()) return;
    for (size_t i = flight.unit->first_part; i < flight.unit->last_part; ++i) {
      Part& p = parts_[i];
      p.crc = Land(p, 0, flight.buffer + (p.at - flight.unit->begin), p.size, 0);
    }
    Upload(*flight.unit, flight.buffer);
  }

  // Bytes of a part from `done` on: to where they belong, if that is on the host, and into its checksum.
  uint32_t Land(const Part& p, size_t done, const std::byte* from, size_t size, uint32_t crc) const {
    const ReadRange& range = ranges_[p.range];
    if (range.to == nullptr || range.device >= 0) return Crc32(crc, from, size);
    return CopyCrc32(crc, range.to + p.in_range + done, from, size);
  }

  void Run() {
    try {
      ReadUnits();
    } catch (const std::bad_alloc&) {  // before anything was submitted: afterwards nothing needs memory
      Fail(Status::NoMemory());
    }
  }

  void ReadUnits() {
    std::byte* const staging = staging_.data() + next_worker_++ * depth_ * kReadBytes;
    Status status;
    std::unique_ptr<IoBackend> io;
    std::vector<Flight> flights(depth_);
    std::vector<Flight*> idle;
    for (size_t i = 0; i < depth_; ++i) {
      flights[i].buffer = staging + i * kReadBytes;
      idle.push_back(&flights[i]);
    }
    std::vector<IoResult> results;
    results.reserve(depth_);
    for (;;) {
      while (!idle.empty() && !failed_) {
        const size_t next = next_unit_++;
        if (next >= units_.size()) break;
        const Unit& unit = units_[next];
        if (Resident(unit)) {
          ReadBuffered(unit, idle.back()->buffer);
          continue;
        }
        if (io == nullptr) {
          io = MakeBackend(options_.backend, static_cast<unsigned>(depth_), &status);
          if (io == nullptr) return Fail(status);
          if (!options_.fault.empty()) {
#ifdef LAZYCKPT_FAULTS
            io = MakeFaultBackend(std::move(io), options_.fault);
#else
            io = nullptr;
#endif
            if (io == nullptr) return Fail(Status(EINVAL, "fault specification", path_));
          }
        }
        Flight* flight = idle.back();
        idle.pop_back();
        flight->unit = &unit;
        flight->done = 0;
        flight->retries = 0;
        if (!Submit(io.get(), flight)) idle.push_back(flight);
      }
      if (idle.size() == depth_) return;
      // One at a time: its buffer is reading again before the next one is delivered.
      if (results.empty()) {
        io->Wait(&results);
        continue;
      }
      const IoResult result = results.back();
      results.pop_back();
      auto* flight = static_cast<Flight*>(result.tag);
      if (Complete(io.get(), flight, result.result)) idle.push_back(flight);
    }
  }

  // False if the flight goes on: a short read, or one that was interrupted.
  bool Complete(IoBackend* io, Flight* flight, int64_t result) {
    const Unit& unit = *flight->unit;
    if (result == -EINVAL) {  // a file system that takes O_DIRECT and then will not read so
      ReadBuffered(unit, flight->buffer);
      return true;
    }
    if (result < 0 && result != -EINTR && result != -EAGAIN) Fail(Status(static_cast<int>(-result), "read", path_));
    const size_t before = flight->done;
    if (result > 0) flight->done += static_cast<size_t>(result);
    if (!failed_ && flight->done < std::min(unit.end, file_size_) - unit.begin) {
      flight->done -= flight->done % kBlockBytes;
      // The file ends earlier than it did when the read began, or the disk moves nothing.
      if (result == 0 || (flight->done == before && ++flight->retries > kMaxRetries))
        Fail(Status(ENODATA, "short read", path_));
      else if (Submit(io, flight))
        return false;
    }
    Deliver(*flight);
    return true;
  }

  bool Submit(IoBackend* io, Flight* flight) {
    const Unit& unit = *flight->unit;
    const size_t size = unit.end - unit.begin - flight->done;
    Status status = io->Submit(
        {IoRequest::Op::kRead, direct_.get(), flight->buffer + flight->done, size, unit.begin + flight->done, flight});
    if (!status.ok()) Fail(status);
    return status.ok();
  }

  static constexpr size_t kBufferedBytes = 256 << 10;  // of the page cache: within a core's own L2 cache
  static constexpr unsigned kMaxRetries = 1000;        // of requests for one unit that moved nothing
  static constexpr uint64_t kMaxGapBytes = 64 << 10;   // reading over a gap is cheaper than another request

  const std::string path_;
  ReadOptions options_;
  std::vector<ReadRange> ranges_;
  Descriptor buffered_, direct_;
  uint64_t file_size_ = 0;
  std::byte* map_ = nullptr;
  // In huge pages: a read into scattered small ones is cut into many requests, at a third of the speed.
  Ring own_staging_;
  std::span<std::byte> staging_;
  size_t depth_ = 0;  // reads in flight, for each thread
  std::atomic<unsigned> next_worker_ = 0;
  std::vector<Part> parts_;  // in file order, and so in the order of each range
  std::vector<Unit> units_;
  std::vector<std::thread> workers_;
  std::atomic<size_t> next_unit_ = 0;
  std::mutex mutex_;
  std::atomic<bool> failed_ = false;
  bool have_places_ = false;
  std::condition_variable places_known_;
  Status error_;
};

Reader::Reader(std::unique_ptr<Work> work) : work_(std::move(work)) {}

Reader::~Reader() = default;

std::unique_ptr<Reader> Reader::Start(const std::string& path, const ReadOptions& options,
                                      std::vector<ReadRange> ranges, Status* status) {
  auto work = std::make_unique<Work>(path, options, std::move(ranges));
  *status = work->Start();
  if (!status->ok()) return nullptr;
  return std::unique_ptr<Reader>(new Reader(std::move(work)));
}

Status Reader::ReadInto(const std::vector<std::byte*>& to, const std::vector<int>& devices) {
  return work_->ReadInto(to, devices);
}

const std::vector<ReadRange>& Reader::ranges() const { return work_->ranges(); }

}  // namespace lazyckpt
