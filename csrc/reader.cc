#include "reader.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <mutex>
#include <numeric>
#include <system_error>
#include <thread>

#include "checksum.h"
#include "io_backend.h"
#include "ring.h"

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
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

class Read {
 public:
  Read(const std::string& path, const ReadOptions& options, std::vector<ReadRange>* ranges)
      : path_(path), options_(options), ranges_(*ranges) {}

  Status Run() {
    buffered_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    const Descriptor close_buffered(buffered_);
    if (buffered_ < 0) return Status(errno, "open", path_);
    struct stat info{};
    if (fstat(buffered_, &info) != 0) return Status(errno, "fstat", path_);
    file_size_ = static_cast<uint64_t>(info.st_size);
    for (const ReadRange& r : ranges_)
      if (r.offset > file_size_ || r.size > file_size_ - r.offset) return Status(EIO, "short read", path_);
    direct_ = options_.direct ? open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT) : -1;
    const Descriptor close_direct(direct_);
    MapFile();
    LayOut();

    unsigned threads = options_.threads;
    if (threads == 0) threads = std::clamp(std::thread::hardware_concurrency(), 1u, 4u);
    threads = static_cast<unsigned>(std::min<size_t>(threads, std::max<size_t>(units_.size(), 1)));
    depth_ = std::max(1u, options_.io_depth / threads);
    std::vector<std::thread> workers;
    try {
      for (unsigned i = 1; i < threads; ++i) workers.emplace_back([this] { Work(); });
    } catch (const std::system_error&) {
      // Fewer threads than hoped for are enough.
    }
    Work();
    for (auto& t : workers) t.join();
    if (map_ != nullptr) munmap(map_, file_size_);
    if (!error_.ok()) return error_;
    for (const Part& p : parts_) {
      ReadRange& r = ranges_[p.range];
      r.crc = Crc32Combine(r.crc, p.crc, p.size);
    }
    return Status::Ok();
  }

 private:
  struct Flight {
    std::byte* buffer;
    const Unit* unit;
    size_t done;
    unsigned retries;
  };

  // Only to ask which pages are in memory; never dereferenced.
  void MapFile() {
    if (file_size_ == 0 || direct_ < 0) return;
    void* map = mmap(nullptr, file_size_, PROT_READ, MAP_SHARED, buffered_, 0);
    if (map != MAP_FAILED) map_ = static_cast<std::byte*>(map);
  }

  bool Resident(const Unit& unit) const {
    if (direct_ < 0) return true;
    if (map_ == nullptr) return false;
    const uint64_t end = std::min(unit.end, file_size_);
    std::vector<unsigned char> pages((end - unit.begin + kBlockBytes - 1) / kBlockBytes);
    if (mincore(map_ + unit.begin, end - unit.begin, pages.data()) != 0) return false;
    return std::all_of(pages.begin(), pages.end(), [](unsigned char p) { return (p & 1) != 0; });
  }

  void LayOut() {
    std::vector<size_t> order(ranges_.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [this](size_t a, size_t b) { return ranges_[a].offset < ranges_[b].offset; });
    for (const size_t i : order) {
      const ReadRange& r = ranges_[i];
      // New memory comes in small pages unless somebody asks; only whole huge pages inside the range are touched.
      constexpr size_t kHuge = 2 << 20;
      const auto from = AlignUp(reinterpret_cast<uintptr_t>(r.to), kHuge);
      const auto to = (reinterpret_cast<uintptr_t>(r.to) + r.size) / kHuge * kHuge;
      if (r.to != nullptr && to > from) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
      for (uint64_t done = 0; done < r.size;) {
        const uint64_t at = r.offset + done;
        if (units_.empty() || at >= units_.back().begin + options_.unit_bytes ||
            at > units_.back().end + kMaxGapBytes || at < units_.back().begin) {
          const uint64_t begin = at / kBlockBytes * kBlockBytes;
          units_.push_back({begin, begin, parts_.size(), parts_.size()});
        }
        Unit& unit = units_.back();
        const uint64_t n = std::min(r.size - done, unit.begin + options_.unit_bytes - at);
        parts_.push_back({i, at, done, n});
        unit.end = std::max(unit.end, static_cast<uint64_t>(AlignUp(at + n, kBlockBytes)));
        unit.last_part = parts_.size();
        done += n;
      }
    }
  }

  void Fail(Status error) {
    std::lock_guard lock(mutex_);
    if (error_.ok()) error_ = std::move(error);
    failed_ = true;
  }

  // Pieces small enough for the cache, so that the checksum does not fetch them from memory again.
  void ReadBuffered(const Unit& unit, std::byte* scratch) {
    for (size_t i = unit.first_part; i < unit.last_part; ++i) {
      Part& p = parts_[i];
      for (size_t done = 0; done < p.size;) {
        const size_t want = std::min(p.size - done, kFusedBlockBytes);
        std::byte* base = ranges_[p.range].to;
        std::byte* to = base == nullptr ? scratch : base + p.in_range + done;
        const ssize_t n = pread(buffered_, to, want, static_cast<off_t>(p.at + done));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return Fail(Status(n < 0 ? errno : EIO, n < 0 ? "read" : "short read", path_));
        p.crc = Crc32(p.crc, to, static_cast<size_t>(n));
        done += static_cast<size_t>(n);
      }
    }
  }

  void Deliver(const Flight& flight) {
    for (size_t i = flight.unit->first_part; i < flight.unit->last_part; ++i) {
      Part& p = parts_[i];
      const std::byte* from = flight.buffer + (p.at - flight.unit->begin);
      std::byte* to = ranges_[p.range].to;
      p.crc = to == nullptr ? Crc32(0, from, p.size) : CopyCrc32(0, to + p.in_range, from, p.size);
    }
  }

  void Work() {
    // Huge pages: a read into scattered small ones is cut into many requests, at a third of the speed.
    const size_t buffer_bytes = options_.unit_bytes + kBlockBytes;
    Ring staging;
    if (Status mapped = staging.Map(depth_ * buffer_bytes); !mapped.ok()) return Fail(std::move(mapped));
    Status status;
    std::unique_ptr<IoBackend> io;
    std::vector<Flight> flights(depth_);
    std::vector<Flight*> idle;
    for (unsigned i = 0; i < depth_; ++i) {
      flights[i].buffer = staging.base() + i * buffer_bytes;
      idle.push_back(&flights[i]);
    }
    std::vector<IoResult> results;
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
          io = MakeBackend(options_.backend, depth_, &status);
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
      results.clear();
      io->Wait(&results);
      for (const IoResult& r : results) {
        auto* flight = static_cast<Flight*>(r.tag);
        const Unit& unit = *flight->unit;
        const uint64_t needed = std::min(unit.end, file_size_) - unit.begin;
        if (r.result == -EINVAL) {  // a file system that takes O_DIRECT and then will not read so
          ReadBuffered(unit, flight->buffer);
          idle.push_back(flight);
          continue;
        }
        if (r.result < 0 && r.result != -EINTR && r.result != -EAGAIN)
          Fail(Status(static_cast<int>(-r.result), "read", path_));
        const size_t before = flight->done;
        if (r.result > 0) flight->done += static_cast<size_t>(r.result);
        if (!failed_ && flight->done < needed) {
          flight->done -= flight->done % kBlockBytes;
          // The file ends earlier than it did when the read began, or the disk moves nothing.
          if (r.result == 0 || (flight->done == before && ++flight->retries > kMaxRetries))
            Fail(Status(EIO, "short read", path_));
          else if (Submit(io.get(), flight))
            continue;
        }
        if (!failed_) Deliver(*flight);
        idle.push_back(flight);
      }
    }
  }

  bool Submit(IoBackend* io, Flight* flight) {
    const Unit& unit = *flight->unit;
    const size_t size = unit.end - unit.begin - flight->done;
    Status status = io->Submit(
        {IoRequest::Op::kRead, direct_, flight->buffer + flight->done, size, unit.begin + flight->done, flight});
    if (!status.ok()) Fail(status);
    return status.ok();
  }

  static constexpr unsigned kMaxRetries = 1000;       // of requests for one unit that moved nothing
  static constexpr uint64_t kMaxGapBytes = 64 << 10;  // reading over a gap is cheaper than another request

  const std::string& path_;
  const ReadOptions& options_;
  std::vector<ReadRange>& ranges_;
  int buffered_ = -1;
  int direct_ = -1;
  uint64_t file_size_ = 0;
  std::byte* map_ = nullptr;
  unsigned depth_ = 1;
  std::vector<Part> parts_;  // in file order, and so in the order of each range
  std::vector<Unit> units_;
  std::atomic<size_t> next_unit_ = 0;
  std::atomic<bool> failed_ = false;
  std::mutex mutex_;
  Status error_;
};

}  // namespace

Status ReadRanges(const std::string& path, const ReadOptions& options, std::vector<ReadRange>* ranges) {
  return Read(path, options, ranges).Run();
}

}  // namespace lazyckpt
