#include "engine/range_reader.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>

#include "engine/checksum.h"
#include "io/backend.h"

namespace lazyckpt {
namespace {

// Which bytes of a part lie in `size` bytes from `begin` on, as the first and the last one's successor in the file; the
// same if none do.
std::pair<uint64_t, uint64_t> Overlap(const ReadPart& p, uint64_t begin, size_t size) {
  const uint64_t first = std::clamp(p.at, begin, begin + size);
  return {first, std::clamp(p.at + p.size, first, begin + size)};
}

}  // namespace

std::shared_ptr<RangeReader> RangeReader::Start(const std::string& path, const ReadOptions& options,
                                                std::vector<ReadRange> ranges, Status* status) {
  std::shared_ptr<RangeReader> reader(new RangeReader(path, options, std::move(ranges)));
  *status = reader->Start();
  return status->ok() ? reader : nullptr;
}

RangeReader::~RangeReader() {
  GiveUp();
  if (map_ != nullptr) munmap(map_, file_size_);
  for (const int fd : {buffered_, direct_})
    if (fd >= 0) close(fd);
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

  if (options_.fetch) {  // a request occupies its thread
    StartThreads(static_cast<unsigned>(std::min<size_t>(options_.io_depth, plan_.units.size())));
    return Status::Ok();
  }
  unsigned threads = options_.threads;
  if (threads == 0) threads = std::clamp(std::thread::hardware_concurrency(), 1u, 4u);
  staging_ = options_.staging;
  if (staging_.size() < read_bytes_ && !plan_.units.empty()) {
    if (Status mapped = own_staging_.Map(8 * kReadBytes); !mapped.ok()) return mapped;
    staging_ = {own_staging_.base(), 8 * kReadBytes};
  }
  const size_t depth = std::min({size_t{options_.io_depth}, staging_.size() / read_bytes_, plan_.units.size()});
  threads = static_cast<unsigned>(std::min<size_t>(threads, depth));
  if (threads > 0) depth_ = depth / threads;
  StartThreads(threads);
  return Status::Ok();
}

void RangeReader::StartThreads(unsigned count) {
  for (unsigned i = 0; i < count; ++i) {
    {
      std::lock_guard lock(mutex_);
      ++running_;
    }
    try {
      if (options_.fetch)
        std::thread([self = shared_from_this()] { self->Run(); }).detach();
      else
        workers_.emplace_back([this] { Run(); });
    } catch (const std::system_error&) {  // fewer threads do; without any, Land reads
      std::lock_guard lock(mutex_);
      --running_;
      return;
    }
  }
}

Status RangeReader::ReadInto(const std::vector<std::byte*>& to, const std::vector<int>& devices) {
  Land(to, devices);
  (void)AwaitEnd(std::nullopt);
  return End();
}

void RangeReader::Land(const std::vector<std::byte*>& to, const std::vector<int>& devices) {
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
  bool reads_here = false;
  {
    std::lock_guard lock(mutex_);
    have_places_ = true;
    reads_here = running_ == 0;
    running_ += reads_here ? 1 : 0;
  }
  changed_.notify_all();
  if (reads_here) Run();
}

bool RangeReader::AwaitEnd(std::optional<std::chrono::steady_clock::time_point> until) {
  std::unique_lock lock(mutex_);
  const auto ended = [this] { return running_ == 0 || (options_.fetch && failed_ && landing_ == 0); };
  if (until) return changed_.wait_until(lock, *until, ended);
  changed_.wait(lock, ended);
  return true;
}

void RangeReader::GiveUp() {
  {
    std::unique_lock lock(mutex_);
    failed_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return landing_ == 0; });
  }
  for (auto& t : workers_) t.join();
  workers_.clear();
}

Status RangeReader::End() {
  for (auto& t : workers_) t.join();
  workers_.clear();
  {
    std::lock_guard lock(mutex_);
    if (!error_.ok()) return error_;
  }
  for (const ReadPart& p : plan_.parts) {
    ReadRange& r = ranges_[p.range];
    r.crc = Crc32Combine(r.crc, p.crc, p.size);
  }
  return Status::Ok();
}

void RangeReader::Fail(Status error) {
  {
    std::lock_guard lock(mutex_);
    if (error_.ok()) error_ = std::move(error);
    failed_ = true;
  }
  changed_.notify_all();
}

// Waits for Land to say where bytes go. False if the read failed or was given up.
bool RangeReader::AwaitPlaces() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return have_places_ || failed_; });
  return !failed_;
}

std::span<ReadPart> RangeReader::PartsOf(const ReadUnit& unit) {
  return std::span(plan_.parts).subspan(unit.first_part, unit.last_part - unit.first_part);
}

// Copies the bytes for devices, neighbours on one device in one call, since each call waits for its copies.
void RangeReader::Upload(std::span<const ReadPart> parts, uint64_t begin, std::span<std::byte> bytes) {
  std::vector<DeviceCopy> copies;
  int device = -1;
  const auto send = [&] {
    if (copies.empty()) return;
    if (Status status = options_.upload(device, copies); !status.ok()) Fail(std::move(status));
    copies.clear();
  };
  for (const ReadPart& p : parts) {
    if (p.at >= begin + bytes.size()) break;
    const ReadRange& range = ranges_[p.range];
    const auto [first, end] = Overlap(p, begin, bytes.size());
    if (range.device < 0 || first == end) continue;
    if (range.device != device) send();
    device = range.device;
    const auto to = reinterpret_cast<uint64_t>(range.to + p.in_range + (first - p.at));
    copies.push_back({bytes.data() + (first - begin), to, end - first});
  }
  send();
}

// Delivers what some parts have of the bytes from `begin` on.
void RangeReader::Deliver(std::span<ReadPart> parts, uint64_t begin, std::span<std::byte> bytes) {
  for (ReadPart& p : parts) {
    if (p.at >= begin + bytes.size()) break;
    const auto [first, end] = Overlap(p, begin, bytes.size());
    if (first < end) p.crc = Put(p, first - p.at, bytes.data() + (first - begin), end - first, p.crc);
  }
  Upload(parts, begin, bytes);
}

// False if the read failed or was given up. `staging`: of kReadBytes; nullptr if there is none.
bool RangeReader::LandFetched(std::span<ReadPart> parts, uint64_t begin, std::span<std::byte> bytes,
                              std::byte* staging) {
  struct Count {  // also when memory runs out
    explicit Count(RangeReader* reader) : reader(reader) {}
    ~Count() {
      {
        std::lock_guard lock(reader->mutex_);
        --reader->landing_;
      }
      reader->changed_.notify_all();
    }
    Count(const Count&) = delete;
    RangeReader* const reader;
  };
  {
    std::lock_guard lock(mutex_);
    if (failed_) return false;
    ++landing_;
  }
  const Count count(this);
  const auto on_device = [this](const ReadPart& p) { return ranges_[p.range].device >= 0; };
  if (staging == nullptr || std::none_of(parts.begin(), parts.end(), on_device)) {
    Deliver(parts, begin, bytes);
    return true;
  }
  for (size_t done = 0; done < bytes.size(); done += kReadBytes) {
    const auto some = bytes.subspan(done, std::min(kReadBytes, bytes.size() - done));
    std::memcpy(staging, some.data(), some.size());
    Deliver(parts, begin + done, {staging, some.size()});
  }
  return true;
}

// Adds bytes of a part, from `done` on, to its checksum, and copies them to their place if that is on the host.
uint32_t RangeReader::Put(const ReadPart& p, size_t done, const std::byte* from, size_t size, uint32_t crc) const {
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
  {
    std::lock_guard lock(mutex_);
    --running_;
    changed_.notify_all();  // with the lock: then the reader may end
  }
}

void RangeReader::FetchUnits() {
  const size_t last = ++next_worker_ * kReadBytes;
  std::byte* const staging = last <= options_.staging.size() ? options_.staging.data() + last - kReadBytes : nullptr;
  if (!AwaitPlaces()) return;
  while (!failed_) {
    const size_t next = next_unit_++;
    if (next >= plan_.units.size()) return;
    const ReadUnit& unit = plan_.units[next];
    const uint64_t end = std::min(unit.end, file_size_);
    uint64_t at = unit.begin;
    std::span<ReadPart> parts = PartsOf(unit);
    bool goes_on = true;
    const auto land = [&](const std::byte* bytes, size_t size) {
      const uint64_t begin = std::exchange(at, at + size);
      if (at > end) return false;
      while (!parts.empty() && parts[0].at + parts[0].size <= begin) parts = parts.subspan(1);  // they are complete
      goes_on = LandFetched(parts, begin, {const_cast<std::byte*>(bytes), size}, staging);  // an upload only reads them
      return goes_on;
    };
    if (Status fetched = options_.fetch(at, end - at, land); !fetched.ok()) return Fail(std::move(fetched));
    if (!goes_on) return;
    if (at < end) return Fail(Status(ENODATA, "short read", path_));
    if (at > end) return Fail(Status(EIO, "more bytes than were asked for", path_));
  }
}

}  // namespace lazyckpt
