// From the staging ring to durable files. One thread submits and reaps; errors live in completions only.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <new>

#include "engine/checksum.h"
#include "engine/engine.h"

namespace lazyckpt {
namespace {

constexpr unsigned kMaxRetries = 1000;      // of requests for one chunk that moved nothing
constexpr useconds_t kNoMemoryUs = 10'000;  // until it is asked for again

bool IsTransient(int64_t result) { return result == -EAGAIN || result == -EINTR; }

// A chunk's checksum from those of its pieces, or over its bytes where the pieces are so many that this is faster
// (combining takes about a microsecond, a microsecond of checksumming about 8 KiB).
uint32_t ChunkCrc32(const Chunk& chunk) {
  if (chunk.pieces.size() * (8 << 10) > chunk.size) return Crc32(0, chunk.memory, chunk.size);
  uint32_t crc = 0;
  for (const Piece& p : chunk.pieces) crc = Crc32Combine(crc, p.crc, p.size);
  return crc;
}

}  // namespace

void Engine::WriteLoop() {
  unsigned in_flight = 0;
  for (;;) {
    try {
      if (PrepareRing()) io_->Wake();  // there is more to prepare, after what is to be written
    } catch (const std::bad_alloc&) {  // anew, soon: copies of devices may wait for it
      io_->Wake();
      usleep(kNoMemoryUs);
    }
    while (in_flight < options_.io_depth && SubmitNext(&in_flight)) {
    }
    if (in_flight == 0) {
      std::lock_guard lock(mutex_);
      if (stop_ && jobs_.empty()) return;
    }
    results_.clear();
    io_->Wait(&results_);
    in_flight -= static_cast<unsigned>(results_.size());
    for (const IoResult& r : results_) OnResult(r);
  }
}

// Faults the next range of the ring in, and pins it for devices. Returns whether there may be more to do right now.
// One range at a time: writes wait meanwhile, and copies from devices wait for the first range that is pinned.
bool Engine::PrepareRing() {
  size_t capacity = 0, pinned = 0;
  Device* pinner = nullptr;
  int node = -1;
  bool quiet = false;
  Locked([&] {
    capacity = ring_.capacity();
    pinned = pinned_bytes_;
    pinner = pinner_;
    if (pinner != nullptr) node = NearestNode();
    quiet = std::all_of(jobs_.begin(), jobs_.end(), [](const auto& job) { return job->sealed && !job->held; });
  });
  const auto range_end = [&](size_t at) { return std::min(AlignUp(at + 1, kPrepareBytes), capacity); };
  if (pinner != nullptr && pinned < capacity) {
    PinRange(*pinner, pinned, range_end(pinned), node);
    return true;
  }
  // Not while a checkpoint is being laid out: faulting pages in would hold up whoever allocates memory.
  if (!quiet) return false;
  if (faulted_bytes_ < capacity) {
    const size_t end = range_end(faulted_bytes_);
    ring_.Prefault(faulted_bytes_, end);
    faulted_bytes_ = end;
    return true;
  }
  if (registered_bytes_ < capacity && options_.register_buffers) {
    std::vector<std::span<std::byte>> slices;
    for (size_t at = 0; at < capacity; at += ring_.slice_bytes())
      slices.emplace_back(ring_.base() + at, std::min(ring_.slice_bytes(), capacity - at));
    (void)io_->RegisterBuffers(slices);  // without, the kernel pins pages at every request
    registered_bytes_ = capacity;
  }
  return false;
}

// Even while a checkpoint is being laid out: its copies wait for it.
void Engine::PinRange(Device& device, size_t at, size_t end, int node) {
  Locked([&] {
    pins_.reserve(pins_.size() + 1);
    idle_bounces_.reserve(options_.copies_in_flight);
  });
  const std::span range(ring_.base() + at, end - at);
  const int now = node >= 0 && at < faulted_bytes_ ? ring_.NodeOf(at) : -1;
  const bool move = now >= 0 && now != node;
  if (move && registered_bytes_ > 0) {
    (void)io_->RegisterBuffers({});  // which keep pages where they are
    registered_bytes_ = 0;
  }
  ring_.Prefer(node, at, end, move);
  ring_.Prefault(at, end);
  faulted_bytes_ = std::max(faulted_bytes_, end);
  const Status status = options_.pin_ring ? device.Pin(range) : Status(EPERM, "not asked for", "");
  std::byte* bounce = nullptr;
  if (!status.ok()) (void)device.AllocatePinned(options_.copies_in_flight * options_.chunk_bytes, &bounce);
  Locked([&] {
    if (status.ok()) {
      pins_.push_back(range);
      pinned_bytes_ += range.size();
    } else {
      unpinned_ = status;
      bounce_ = bounce;
      for (size_t i = 0; i < options_.copies_in_flight && bounce != nullptr; ++i)
        idle_bounces_.push_back(bounce + i * options_.chunk_bytes);
      pinned_bytes_ = std::numeric_limits<size_t>::max();  // as far as it goes; the rest is copied all the same
    }
  });
  changed_.notify_all();
}

// The NUMA node next to the attached devices; negative if they differ.
int Engine::NearestNode() const {
  const int nearest = pinner_->numa_node();
  for (const auto& gpu : gpus_)
    if (gpu != nullptr && gpu->device->numa_node() != nearest) return -1;
  return nearest;
}

// Submits one write or sync, or fails its checkpoint; false if there is nothing to submit.
bool Engine::SubmitNext(unsigned* in_flight) {
  IoRequest request{};
  Chunk* chunk = nullptr;
  File* file = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (!syncs_.empty()) {
      file = syncs_.pop_front();
      request = {IoRequest::Op::kSync, file->fd, nullptr, 0, 0, static_cast<IoTag*>(file), file->pooled};
      ++file->job->writes_in_flight;
    } else {
      chunk = ready_.take([](const Chunk* c) { return c->job->files[c->file].fd >= 0; });
      if (chunk == nullptr) return false;
      file = &chunk->job->files[chunk->file];
      const size_t size = file->direct ? AlignUp(chunk->size, kBlockBytes) : chunk->size;
      request = {IoRequest::Op::kWrite,
                 file->fd,
                 chunk->memory + chunk->written,
                 size - chunk->written,
                 chunk->offset + chunk->written,
                 static_cast<IoTag*>(chunk),
                 file->pooled};
      chunk->state = Chunk::State::kWriting;
      if (chunk->written == 0) chunk->write_begin = Clock::now();
      ++chunk->job->writes_in_flight;
    }
  }
  const auto keep = file->job->shared_from_this();
  Status status;
  if (chunk == nullptr) {
    status = io_->Truncate(file->fd, file->size, file->path);  // what padding or preallocation made too long
  } else if (chunk->written == 0) {
    chunk->crc = ChunkCrc32(*chunk);
  }
  if (status.ok()) status = io_->Submit(request);
  if (status.ok()) {
    ++*in_flight;
    return true;
  }
  std::lock_guard lock(mutex_);
  --keep->writes_in_flight;
  if (chunk != nullptr) Release(chunk);
  FailLocked(*keep, Status(status.error(), status.operation(), file->path));
  CloseIfSettled(*keep);  // it may have failed before, and have waited for this request alone
  changed_.notify_all();
  return true;  // what other checkpoints have to write does not wait for this one
}

void Engine::OnResult(const IoResult& result) {
  auto* tag = static_cast<IoTag*>(result.tag);
  const auto keep = tag->job->shared_from_this();  // settling may drop the engine's own reference
  Job& job = *keep;
  if (IsTransient(result.result)) usleep(1000);
  std::lock_guard lock(mutex_);
  --job.writes_in_flight;
  if (!tag->is_sync) {
    OnChunkResult(static_cast<Chunk*>(tag), result.result);
  } else {
    auto* file = static_cast<File*>(tag);
    if (result.result < 0) {
      // Never retried: the kernel may report an error of fdatasync once and forget the lost pages.
      FailLocked(job, Status(static_cast<int>(-result.result), "fdatasync", file->path));
    } else {
      file->synced = true;
      if (job.durable()) job.synced = Clock::now();
    }
  }
  CloseIfSettled(job);
  changed_.notify_all();
}

void Engine::OnChunkResult(Chunk* chunk, int64_t result) {
  Job& job = *chunk->job;
  File& file = job.files[chunk->file];
  if (!job.error.ok()) return Release(chunk);
  const size_t before = chunk->written;
  if (result > 0) chunk->written += static_cast<size_t>(result);
  if (chunk->written < chunk->size) {
    // Short: the rest again, from a block boundary where O_DIRECT asks for it.
    if (file.direct) chunk->written -= chunk->written % kBlockBytes;
    const bool again = result > 0 || IsTransient(result);
    if (!again || (chunk->written == before && ++chunk->retries > kMaxRetries)) {
      Release(chunk);
      return FailLocked(job, Status(result >= 0 ? EIO : static_cast<int>(-result), "write", file.path));
    }
    chunk->state = Chunk::State::kReady;
    ready_.push_front(chunk);
    return;
  }
  chunk->write_end = Clock::now();
  Release(chunk);
  if (--file.chunks_left == 0) {
    job.written = Clock::now();
    QueueSyncs(job);
  }
}

void Engine::QueueSyncs(Job& job) {
  if (!job.sealed || !job.error.ok()) return;
  for (File& file : job.files) {
    if (file.chunks_left > 0 || file.fd < 0 || file.sync_begun) continue;
    file.sync_begun = true;
    syncs_.push_back(&file);
  }
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
    if (file.fd >= 0) close(file.fd);  // after fdatasync, or of a file that will be discarded: nothing to learn
    file.fd = -1;
  }
  // Last: this may be the last reference.
  std::erase_if(jobs_, [&job](const std::shared_ptr<Job>& j) { return j.get() == &job; });
}

}  // namespace lazyckpt
