// From the staging ring to durable files. One thread submits requests and reaps their results; an error of the disk is
// a result.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <utility>

#include "engine/checksum.h"
#include "engine/engine.h"

namespace lazyckpt {
namespace {

bool IsTransient(int64_t result) { return result == -EAGAIN || result == -EINTR; }

uint32_t ChunkCrc32(const Chunk& chunk) {
  if (chunk.summed_whole()) return Crc32(0, chunk.memory, chunk.size);
  uint32_t crc = 0;
  for (const Piece& p : chunk.pieces) crc = Crc32Combine(crc, p.crc, p.size);
  return crc;
}

}  // namespace

void Engine::WriteLoop() {
  unsigned in_flight = 0;
  for (;;) {
    try {
      if (PrepareRing()) io_->Wake();  // writes come first, then the rest of the ring
    } catch (const std::bad_alloc&) {
      const bool pinning = Locked([this] { return pinner_ != nullptr && pinned_bytes_ < ring_.capacity(); });
      if (pinning) LeaveUnpinned(Status::NoMemory(), nullptr);  // copies and uploads wait for pinned memory
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

// Submits one write or sync, or fails its job; false if there is nothing to submit.
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
      const auto is_open = [](const File& f) { return f.fd >= 0 || f.drops; };
      chunk = ready_.take([&](const Chunk* c) { return is_open(c->job->files[c->file]); });
      if (chunk == nullptr) return false;
      file = &chunk->job->files[chunk->file];
      if (file->drops) {
        const auto keep = chunk->job->shared_from_this();  // settling may drop the engine's own reference
        chunk->write_begin = Clock::now();
        EndChunk(chunk);
        CloseIfSettled(*keep);
        changed_.notify_all();
        return true;
      }
      const size_t size = file->direct ? AlignUp(chunk->size, kBlockBytes) : chunk->size;
      request = {IoRequest::Op::kWrite,
                 file->fd,
                 chunk->memory + chunk->written,
                 size - chunk->written,
                 chunk->offset + static_cast<uint64_t>(file->shift) + chunk->written,
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
    if (!file->exists)
      status = io_->Truncate(file->fd, file->size, file->path);  // padding and preallocation made it too long
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
  CloseIfSettled(*keep);  // it may have failed before and waited for this request alone
  changed_.notify_all();
  return true;  // other jobs may have more to submit
}

void Engine::OnResult(const IoResult& result) {
  auto* tag = static_cast<IoTag*>(result.tag);
  const auto keep = tag->job->shared_from_this();  // settling may drop the engine's own reference
  Job& job = *keep;
  if (IsTransient(result.result)) usleep(1000);  // the kernel is short of memory: give it a moment before the retry
  std::lock_guard lock(mutex_);
  --job.writes_in_flight;
  if (!tag->is_sync) {
    OnChunkResult(static_cast<Chunk*>(tag), result.result);
  } else {
    auto* file = static_cast<File*>(tag);
    if (result.result < 0) {
      // Never retried: the kernel may report a failed fdatasync once and forget the lost pages.
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
    // Short: write the rest, with O_DIRECT from a block boundary.
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
  EndChunk(chunk);
}

void Engine::EndChunk(Chunk* chunk) {
  Job& job = *chunk->job;
  chunk->write_end = Clock::now();
  Release(chunk);
  if (--job.files[chunk->file].chunks_left == 0) {
    job.written = Clock::now();
    QueueSyncs(job);
  }
}

void Engine::QueueSyncs(Job& job) {
  if (!job.sealed || !job.error.ok()) return;
  for (File& file : job.files) {
    if (file.drops && file.chunks_left == 0 && !file.synced) {
      file.synced = true;
      if (job.durable()) job.synced = Clock::now();
    }
    if (file.chunks_left > 0 || file.fd < 0 || file.sync_begun) continue;
    file.sync_begun = true;
    syncs_.push_back(&file);
  }
}

}  // namespace lazyckpt
