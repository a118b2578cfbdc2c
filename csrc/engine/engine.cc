// An engine from Create to the end, and what its callers do to a job.
#include "engine/engine.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

namespace lazyckpt {
namespace {

// The cores that this process may use.
unsigned Cores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) != 0)
    return std::thread::hardware_concurrency();  // EINVAL: over a thousand
  return static_cast<unsigned>(CPU_COUNT(&cores));
}

}  // namespace

std::unique_ptr<Engine> Engine::Create(const EngineOptions& options, Status* status) {
  std::unique_ptr<Engine> engine(new Engine);
  engine->options_ = options;
  engine->options_.copies_ahead = std::max(options.copies_ahead, options.copies_in_flight);
  const size_t chunk = options.chunk_bytes;
  if (chunk == 0 || chunk % kBlockBytes != 0 || chunk > Ring::kSliceBytes || options.max_ring_bytes < chunk ||
      options.io_depth == 0 || options.copies_in_flight == 0) {
    *status = Status(EINVAL, "engine options", "");
    return nullptr;
  }
  engine->io_ = MakeBackend(options.backend, options.io_depth, options.fault, &engine->fallback_);
  if (engine->io_ == nullptr) {
    *status = engine->fallback_;
    return nullptr;
  }
  if (options.watch_pages) {
    engine->witness_ = PageWitness::OfProcess(status);
    if (engine->witness_ == nullptr) return nullptr;
  }
  *status = engine->ring_.Map(options.max_ring_bytes);
  if (!status->ok()) return nullptr;
  engine->ring_.Grow(std::min(options.max_ring_bytes, 2 * chunk));
  engine->modest_ = std::max(1u, Cores() / 2);
  engine->results_.reserve(options.io_depth);
  Engine* e = engine.get();
  try {
    for (unsigned i = 0; i < options.copy_threads; ++i) {
      e->copiers_.emplace_back([e] { e->CopyLoop(); });
      pthread_setname_np(e->copiers_.back().native_handle(), "lazyckpt-copy");
    }
    e->writer_ = std::thread([e] { e->WriteLoop(); });
    pthread_setname_np(e->writer_.native_handle(), "lazyckpt-write");
    if (options.watch_pages && options.huge_pages) {
      e->collapser_ = std::thread([e] { e->CollapseLoop(); });
      pthread_setname_np(e->collapser_.native_handle(), "lazyckpt-huge");
    }
  } catch (const std::system_error& error) {  // thread limit reached; the destructor joins the others
    *status = Status(error.code().value(), "start of an engine thread", "");
    return nullptr;
  }
  return engine;
}

Engine::~Engine() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    for (size_t i = 0; i < jobs_.size();) {
      const auto job = jobs_[i];
      FailLocked(*job, Status(ECANCELED, "engine closed", ""));
      if (i < jobs_.size() && jobs_[i] == job) ++i;  // not settled yet
    }
  }
  changed_.notify_all();
  watch_ended_.notify_all();
  if (collapser_.joinable()) collapser_.join();
  for (auto& t : copiers_) t.join();
  for (const auto& gpu : gpus_)
    if (gpu != nullptr) StopLanes(*gpu);
  if (io_ != nullptr) io_->Wake();  // after the copies: the last one may have settled a job that the writer waits for
  if (writer_.joinable()) writer_.join();
  for (const auto& pin : pins_) pinner_->Unpin(pin);
  if (bounce_ != nullptr) pinner_->FreePinned(bounce_);
}

bool Engine::Reserve(size_t bytes) {
  bool enough = false, grown = false;
  {
    std::lock_guard lock(mutex_);
    const size_t before = ring_.capacity();
    enough = ring_.Grow(std::min(AlignUp(bytes, options_.chunk_bytes), options_.max_ring_bytes));
    grown = ring_.capacity() > before;
  }
  if (grown) io_->Wake();
  return enough;
}

std::span<std::byte> Engine::Borrow(size_t bytes) {
  std::lock_guard lock(mutex_);
  const size_t size = std::min(bytes, ring_.capacity());
  std::byte* region = ring_.Allocate(size, size);
  return region == nullptr ? std::span<std::byte>() : std::span(region, size);
}

void Engine::GiveBack(std::span<std::byte> region) {
  if (region.empty()) return;
  {
    std::lock_guard lock(mutex_);
    ring_.Free(region.data());
  }
  changed_.notify_all();
}

std::shared_ptr<Job> Engine::MakeJob(std::vector<Source> sources, size_t files, bool eager_by_caller,
                                     std::vector<StreamRef> streams, std::span<const FilePart> parts, Status* status) {
  auto job = std::make_shared<Job>();
  job->held = job->eager_by_caller = eager_by_caller;
  job->sources = std::move(sources);
  job->streams = std::move(streams);
  for (size_t i = 0; i < files; ++i) job->files.emplace_back().job = job.get();
  for (const FilePart& p : parts) {
    if (p.file >= files || p.begin % kBlockBytes != 0 || p.begin > p.end) {
      *status = Status(EINVAL, "parts of a file", "");
      return nullptr;
    }
    job->files[p.file].parts.emplace_back(p.begin, p.end);
  }
  *status = CopyAfter(job->streams);
  if (!status->ok()) return nullptr;
  uint64_t ready = 0;  // devices with a stream
  for (const StreamRef& s : job->streams) ready |= uint64_t{1} << s.device;
  for (const Source& s : job->sources) {
    if (s.device < 0 || (static_cast<size_t>(s.device) < kMaxDevices && (ready >> s.device & 1) != 0)) continue;
    *status = Status(EINVAL, "a source on a device without a stream", "");
    return nullptr;
  }
  return job;
}

std::shared_ptr<Job> Engine::Begin(std::vector<Source> sources, size_t files, bool eager_by_caller,
                                   std::vector<StreamRef> streams, std::span<const FilePart> parts, Status* status) {
  auto job = MakeJob(std::move(sources), files, eager_by_caller, std::move(streams), parts, status);
  if (job == nullptr) return nullptr;
  if (witness_ != nullptr) Watch(*job, false);
  std::lock_guard lock(mutex_);
  jobs_.push_back(job);
  return job;
}

std::shared_ptr<Job> Engine::Capture(std::vector<Source> sources, size_t files, std::vector<StreamRef> streams,
                                     std::span<const Extent> extents, std::span<const FilePart> parts, Status* status) {
  // For work of another thread or a device. Shorter leaves eager bytes to threads that may get no core; longer keeps
  // Ctrl-C waiting when a device is stuck.
  constexpr auto kPatience = std::chrono::seconds(1);
  auto job = MakeJob(std::move(sources), files, true, std::move(streams), parts, status);
  if (job == nullptr) return nullptr;
  const bool fits = Locked([&] {
    capturing_ = job.get();
    jobs_.push_back(job);
    return HasRoomForEager(*job, extents);
  });
  if (witness_ != nullptr) Watch(*job, !fits);
  for (const Extent& e : extents)
    if (status->ok()) *status = Append(*job, e.file, e.offset, e.rows, e.blob, e.first_source);
  if (status->ok()) *status = Seal(*job);
  const auto laid_out = Clock::now();
  if (status->ok() && CopyEager(*job, Clock::now() + kPatience)) (void)FollowEager(*job, Clock::now() + kPatience);
  job->eager_copy_s = std::chrono::duration<double>(Clock::now() - laid_out).count();
  Locked([this] { capturing_ = nullptr; });
  changed_.notify_all();
  if (!status->ok()) Fail(*job, *status);
  return job;
}

void Engine::Go(Job& job) {
  bool opened = false;
  {
    std::lock_guard lock(mutex_);
    job.held = false;
    opened = std::any_of(job.files.begin(), job.files.end(), [](const File& f) { return f.fd >= 0 || f.drops; });
  }
  // Before Open(), leave the writer asleep: it may preempt this thread, and Open() wakes it from another one. After
  // Open(), wake it before the copy threads, so that it sleeps again before they compete for the core.
  if (opened) io_->Wake();
  changed_.notify_all();
}

Status Engine::Open(Job& job, size_t file, const std::string& path, uint64_t size) {
  return OpenFile(job, file, path, size);
}

Status Engine::OpenExisting(Job& job, size_t file, const std::string& path, int64_t shift) {
  if (file >= job.files.size()) return Status(EINVAL, "file index", path);
  {
    std::lock_guard lock(mutex_);
    File& f = job.files[file];
    bool aligned = shift % static_cast<int64_t>(kBlockBytes) == 0 && !f.parts.empty();
    for (const auto& [begin, end] : f.parts)
      aligned = aligned && end % kBlockBytes == 0 && static_cast<int64_t>(begin) + shift >= 0;
    if (!aligned) {
      Status status(EINVAL, "parts of a file that others write, too", path);
      FailLocked(job, status);
      return status;
    }
    f.exists = true;
    f.shift = shift;
  }
  return OpenFile(job, file, path, std::nullopt);
}

// Creates the file and reserves `size` bytes; opens one that exists if there is no size.
Status Engine::OpenFile(Job& job, size_t file, const std::string& path, std::optional<uint64_t> size) {
  if (file >= job.files.size()) return Status(EINVAL, "file index", path);
  File& f = job.files[file];
  {
    std::lock_guard lock(mutex_);
    if (!f.path.empty() || path.empty()) return Status(EINVAL, "a file can be opened once", path);
    f.path = path;
  }
  int fd = -1;
  bool direct = false;
  const bool fuse = IsOnFuse((std::filesystem::path(path).parent_path() / ".").string());
  const bool pooled = fuse && options_.backend == "auto";
  Status status = pooled ? io_->PreparePool() : Status::Ok();
  const bool want_direct = options_.direct.value_or(!fuse);
  if (status.ok())
    status = size ? io_->Create(path, want_direct, &fd, &direct) : io_->OpenToWrite(path, want_direct, &fd, &direct);
  if (status.ok() && size) status = io_->Allocate(fd, *size, path);
  std::lock_guard lock(mutex_);
  f.direct = direct;
  f.pooled = pooled;
  f.fd = fd;
  if (!status.ok()) FailLocked(job, status);
  QueueSyncs(job);
  CloseIfSettled(job);
  io_->Wake();
  return status;
}

Status Engine::Drop(Job& job, size_t file) {
  {
    std::lock_guard lock(mutex_);
    if (file >= job.files.size() || !job.files[file].path.empty()) return Status(EINVAL, "file index", "");
    job.files[file].drops = true;
    QueueSyncs(job);
    CloseIfSettled(job);
  }
  changed_.notify_all();
  io_->Wake();
  return Status::Ok();
}

bool Engine::WaitEager(Job& job, Clock::time_point deadline) {
  return HelpUntil([&job] { return job.eager_copied(); }, deadline) && FollowEager(job, deadline);
}

// The end of WaitEager: work that follows on the streams waits for eager copies from devices.
bool Engine::FollowEager(Job& job, Clock::time_point deadline) {
  if (job.streams.empty()) return true;
  uint64_t devices = 0;
  Locked([&] {
    if (job.error.ok()) devices = std::exchange(job.eager_devices, 0);
  });
  for (const StreamRef& s : job.streams)
    if ((devices >> s.device & 1) != 0) RunAfterCopies(job, Lane::kEager, s);
  return HelpUntil([&job] { return job.enqueued(0); }, deadline);
}

bool Engine::WaitCaptured(Job& job, uint64_t owners, Clock::time_point deadline) {
  return HelpUntil([&job, owners] { return job.captured(owners); }, deadline);
}

bool Engine::WaitEnqueued(Job& job, uint64_t owners, std::span<const StreamRef> streams, Clock::time_point deadline) {
  const auto captured = [&job, owners] { return job.captured(owners); };
  if (Locked(captured)) return true;
  bool capturing = false;
  for (const StreamRef& s : streams) {
    Status status = gpus_[s.device]->device->IsCapturing(s.handle, &capturing);
    if (!status.ok()) Fail(job, std::move(status));
    if (capturing) return WaitUntil(captured, deadline);
  }
  if (!HelpUntil([&job, owners] { return job.enqueued(owners); }, deadline)) return false;
  if (Locked(captured)) return true;
  for (const StreamRef& s : streams)
    for (const Lane lane : {Lane::kEager, Lane::kLazy}) RunAfterCopies(job, lane, s);
  return HelpUntil([&job] { return job.enqueued(0); }, deadline);
}

bool Engine::WaitReleased(Job& job, Clock::time_point deadline) {
  return WaitForEnd(job, [&job] { return job.sources_released(); }, deadline);
}

bool Engine::WaitSettled(Job& job, Clock::time_point deadline) {
  // Without copy threads this wait copies, as WaitReleased does: after a failure the caller may have skipped that one.
  return WaitForEnd(job, [&job] { return job.settled(); }, deadline);
}

bool Engine::WaitForEnd(Job& job, const std::function<bool()>& ended, Clock::time_point deadline) {
  const bool done = copiers_.empty() ? HelpUntil(ended, deadline) : WaitUntil(ended, deadline);
  if (done) EndWatch(job);
  return done;
}

bool Engine::WaitUntil(const std::function<bool()>& done, Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline, done);
}

void Engine::Fail(Job& job, Status error) {
  {
    std::lock_guard lock(mutex_);
    FailLocked(job, std::move(error));
  }
  io_->Wake();
}

void Engine::FailLocked(Job& job, Status error) {
  if (!job.error.ok() || job.durable()) return;
  job.error = std::move(error);
  const auto of_job = [&job](const IoTag* t) { return t->job == &job; };
  queue_.erase_if(of_job);
  ready_.erase_if(of_job);
  while (Chunk* chunk = landed_.take(of_job)) EndCopy(chunk);
  syncs_.erase_if(of_job);
  for (const auto& chunk : job.chunks)
    if (chunk->state == Chunk::State::kBlocked || chunk->state == Chunk::State::kReady) Release(chunk.get());
  CloseIfSettled(job);
  changed_.notify_all();
}

void Engine::CloseIfSettled(Job& job) {
  if (!job.settled()) return;
  for (File& file : job.files) {
    if (file.fd >= 0) close(file.fd);  // synced, or to be discarded: its result says nothing
    file.fd = -1;
  }
  // Last, since it may drop the last reference.
  std::erase_if(jobs_, [&job](const std::shared_ptr<Job>& j) { return j.get() == &job; });
}

}  // namespace lazyckpt
