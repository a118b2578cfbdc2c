#include "engine.h"

#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace lazyckpt {

std::unique_ptr<Engine> Engine::Create(const EngineOptions& options, Status* status) {
  std::unique_ptr<Engine> engine(new Engine);
  engine->options_ = options;
  const size_t chunk = options.chunk_bytes;
  if (chunk == 0 || chunk % kBlockBytes != 0 || chunk > Ring::kSliceBytes || options.max_ring_bytes < chunk ||
      options.io_depth == 0) {
    *status = Status(EINVAL, "engine options", "");
    return nullptr;
  }
  engine->io_ = MakeBackend(options.backend, options.io_depth, &engine->fallback_);
  if (engine->io_ == nullptr) {
    *status = engine->fallback_;
    return nullptr;
  }
#ifdef LAZYCKPT_FAULTS
  if (!options.fault.empty()) engine->io_ = MakeFaultBackend(std::move(engine->io_), options.fault);
#else
  if (!options.fault.empty()) engine->io_ = nullptr;
#endif
  if (engine->io_ == nullptr) {
    *status = Status(EINVAL, "fault specification", "");
    return nullptr;
  }
  *status = engine->ring_.Map(options.max_ring_bytes);
  if (!status->ok()) return nullptr;
  engine->ring_.Grow(std::min(options.max_ring_bytes, 2 * chunk));
  Engine* e = engine.get();
  try {
    for (unsigned i = 0; i < options.copy_threads; ++i) {
      e->copiers_.emplace_back([e] { e->CopyLoop(); });
      pthread_setname_np(e->copiers_.back().native_handle(), "lazyckpt-copy");
    }
    e->writer_ = std::thread([e] { e->WriteLoop(); });
    pthread_setname_np(e->writer_.native_handle(), "lazyckpt-write");
  } catch (const std::system_error& error) {  // the machine refuses threads; the destructor joins those there are
    *status = Status(error.code().value(), "start of an engine thread", "");
    return nullptr;
  }
  return engine;
}

Engine::~Engine() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    const auto jobs = jobs_;
    for (const auto& job : jobs) FailLocked(*job, Status(ECANCELED, "engine closed", ""));
  }
  changed_.notify_all();
  for (auto& t : copiers_) t.join();
  if (io_ != nullptr) io_->Wake();  // after the copies: the last one may have settled what the writer waits for
  if (writer_.joinable()) writer_.join();
}

bool Engine::Reserve(size_t bytes) {
  bool grown;
  {
    std::lock_guard lock(mutex_);
    grown = ring_.Grow(std::min(AlignUp(bytes, options_.chunk_bytes), options_.max_ring_bytes));
  }
  io_->Wake();  // the writer thread faults the new pages in
  return grown;
}

std::span<std::byte> Engine::Borrow(size_t bytes) {
  std::lock_guard lock(mutex_);
  const size_t size = std::min(bytes, ring_.capacity());
  std::byte* region = ring_.Allocate(size);
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

std::shared_ptr<Job> Engine::Begin(std::vector<Source> sources, size_t files, bool eager_by_caller) {
  auto job = std::make_shared<Job>();
  job->held = job->eager_by_caller = eager_by_caller;
  job->sources = std::move(sources);
  for (size_t i = 0; i < files; ++i) job->files.emplace_back().job = job.get();
  std::lock_guard lock(mutex_);
  jobs_.push_back(job);
  return job;
}

void Engine::Go(Job& job) {
  {
    std::lock_guard lock(mutex_);
    job.held = false;
  }
  // In this order: when the writer thread, which may preempt this one, sleeps again, no copy thread stands in line yet.
  io_->Wake();
  changed_.notify_all();
}

Status Engine::Open(Job& job, size_t file, const std::string& path, uint64_t size) {
  if (file >= job.files.size()) return Status(EINVAL, "file index", path);
  File& f = job.files[file];
  {
    std::lock_guard lock(mutex_);
    if (!f.path.empty() || path.empty()) return Status(EINVAL, "a file can be opened once", path);
    f.path = path;
  }
  int fd = -1;
  bool direct = false;
  Status status = io_->Create(path, options_.direct, &fd, &direct);
  if (status.ok()) status = io_->Allocate(fd, size, path);
  std::lock_guard lock(mutex_);
  f.direct = direct;
  f.fd = fd;
  if (!status.ok()) FailLocked(job, status);
  QueueSyncs(job);
  CloseIfSettled(job);
  io_->Wake();
  return status;
}

bool Engine::WaitEager(Job& job, Clock::time_point deadline) {
  return HelpUntil([&job] { return job.error.ok() ? job.eager_left == 0 : job.copying == 0; }, deadline);
}

bool Engine::WaitCaptured(Job& job, uint64_t owners, Clock::time_point deadline) {
  return HelpUntil(
      [&job, owners] {
        if (!job.error.ok()) return job.copying == 0;
        for (size_t bit = 0; bit < 64; ++bit)
          if ((owners >> bit & 1) != 0 && job.owner_left[bit] > 0) return false;
        return true;
      },
      deadline);
}

bool Engine::WaitReleased(Job& job, Clock::time_point deadline) {
  const auto released = [&job] { return job.sources_released(); };
  return copiers_.empty() ? HelpUntil(released, deadline) : WaitUntil(released, deadline);
}

bool Engine::WaitSettled(Job& job, Clock::time_point deadline) {
  const auto settled = [&job] { return job.settled(); };
  return copiers_.empty() ? HelpUntil(settled, deadline) : WaitUntil(settled, deadline);
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

}  // namespace lazyckpt
