// From the training state into the staging ring: takes chunks from the queue, copies host memory, fills in checksums.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <utility>

#include "engine/checksum.h"
#include "engine/engine.h"
#include "engine/piece_sums.h"

namespace lazyckpt {
namespace {

// The calls of the driver under way in a lane. A driver's queue takes about a thousand operations; the thread that
// enqueues more waits inside the driver, and training's launches wait for it there.
constexpr size_t kCallsAhead = 512;

void WriteLe(char* to, uint32_t crc) {
  for (int i = 0; i < 4; ++i) to[i] = static_cast<char>(crc >> (8 * i) & 0xff);
}

// Writes the bytes [begin, + size) of the list of the checksums of all segments of a source.
void WriteSegments(std::byte* to, const Source& source, uint64_t begin, size_t size) {
  const uint64_t end = begin + size;
  uint64_t at = 0;     // in the source
  uint64_t entry = 0;  // in the list
  uint32_t crc = 0;    // of the segment up to `at`
  for (const Source::Part& cut : source.cuts) {
    crc = at % kSegmentBytes == 0 ? cut.crc : Crc32Combine(crc, cut.crc, cut.size);
    at += cut.size;
    if (at % kSegmentBytes != 0 && at < source.size) continue;
    char text[4];
    WriteLe(text, crc);
    const uint64_t from = std::max(entry, begin), until = std::min(entry + 4, end);
    if (from < until) std::memcpy(to + (from - begin), text + (from - entry), until - from);
    entry += 4;
  }
}

constexpr size_t kPiecesAhead = 16;  // of which four are storages, in an archive of small ones

// Loads the first bytes of a storage. Small storages lie anywhere, so the processor does not foresee the next one.
void Prefetch(const Job& job, const Piece& piece) {
  constexpr size_t kLineBytes = 64, kMostBytes = 256;
  if (piece.kind != RowKind::kSource) return;
  const Source& source = job.sources[piece.source];
  if (source.device >= 0) return;
  const std::byte* const data = source.data + piece.source_offset;
  for (size_t at = 0; at < std::min<size_t>(piece.size, kMostBytes); at += kLineBytes) __builtin_prefetch(data + at);
}

// Writes the bytes [piece.source_offset, + piece.size) of a checksum's written form.
void WriteCrc32(Chunk* chunk, Piece& piece, const Source& source) {
  std::byte* to = chunk->memory + piece.at;
  char text[9];
  if (piece.kind == RowKind::kCrc32Segments) {
    WriteSegments(to, source, piece.source_offset, piece.size);
  } else {
    if (piece.kind == RowKind::kCrc32Le)
      WriteLe(text, source.crc);
    else
      std::snprintf(text, sizeof text, "%08x", source.crc);
    std::memcpy(to, text + piece.source_offset, piece.size);
  }
  if (!chunk->summed_whole()) piece.crc = Crc32(0, to, piece.size);
}

}  // namespace

void Engine::CopyLoop() {
  // A batch thread does not preempt the training thread that wakes it, in the middle of save().
  const sched_param priority{};
  pthread_setschedparam(pthread_self(), SCHED_BATCH, &priority);
  Lock lock(mutex_);
  while (!stop_)
    if (!Work(false, lock)) changed_.wait(lock);
}

// Copies as long as there is room in the ring. Returns whether all eager bytes are copied, or the job has failed.
bool Engine::CopyEager(Job& job, Clock::time_point deadline) {
  Lock lock(mutex_);
  while (!job.eager_copied()) {
    if (Work(true, lock)) continue;
    if (job.ring_waiting || Clock::now() >= deadline) return false;
    changed_.wait_until(lock, deadline);
  }
  return true;
}

// Copies until done() holds: a thread that waits for a copy makes it.
bool Engine::HelpUntil(const std::function<bool()>& done, Clock::time_point deadline) {
  Lock lock(mutex_);
  while (!done()) {
    if (Clock::now() >= deadline) return false;
    if (!Work(true, lock)) changed_.wait_until(lock, deadline);
  }
  return true;
}

// Copies or checksums one chunk; false if there is none. Copies come first, so that devices work during checksums.
bool Engine::Work(bool helping, Lock& lock) {
  if (CopyNext(helping, lock)) return true;
  if (landed_.empty()) return false;
  SumChunk(landed_.pop_front(), lock);
  return true;
}

// Copies the next chunk; false if none can be taken. Unlocks while bytes move. `helping`: the thread waits for copies.
//
// The one place where copy and landing threads catch std::bad_alloc. All that follows MoveBytes allocates nothing, so
// a job that fails here still settles.
bool Engine::CopyNext(bool helping, Lock& lock) {
  if (queue_.empty()) return false;
  const auto job = queue_.front()->job->shared_from_this();  // settling may drop the engine's own reference
  Chunk* chunk = nullptr;
  Tickets tickets{};
  Status status;
  try {
    chunk = TakeChunk(helping);
    if (chunk == nullptr) return false;
    copying_ += helping ? 0 : 1;
    status = MoveBytes(chunk, &tickets, lock);
  } catch (const std::bad_alloc&) {
    status = Status::NoMemory();
  }
  if (!lock.owns_lock()) lock.lock();
  if (!status.ok()) FailLocked(*job, std::move(status));
  if (chunk == nullptr) return true;
  copying_ -= helping ? 0 : 1;
  OnMoved(chunk, tickets);
  return true;
}

// The next chunk, with its region of the ring; nullptr if there is no chunk, no room, or too much under way. Throws
// std::bad_alloc before it changes anything.
Chunk* Engine::TakeChunk(bool helping) {
  Chunk* chunk = queue_.front();
  Job& job = *chunk->job;
  if (capturing_ != nullptr && capturing_ != &job) return nullptr;
  if (!helping && (job.held || (job.eager_by_caller && chunk->eager && job.eager_left == 1))) return nullptr;
  // No thread waits for these copies, so half of the cores stay with training until the ring has been full.
  if (!helping && copying_ >= modest_ && !job.ring_was_full) return nullptr;
  for (const int device : Bits{chunk->devices}) {
    const CopyLane& l = LaneOf(*chunk, device);
    chunk->calls = std::max(chunk->calls, gpus_[device]->device->CallsFor(chunk->pieces_there));
    if (l.in_flight > 0 && l.calls + chunk->calls > kCallsAhead) return nullptr;
    if (l.in_flight >= (helping ? options_.copies_ahead : options_.copies_in_flight)) return nullptr;
    // A copy engine serves other streams only when it runs dry, so a loss that training reads would arrive after the
    // whole checkpoint. So copies that no thread waits for come in bursts.
    if (!helping && l.burst >= options_.copies_in_flight) return nullptr;
  }
  const bool bounces = chunk->devices != 0 && bounce_ != nullptr;
  if (bounces && idle_bounces_.empty()) return nullptr;
  chunk->memory = ring_.Allocate(chunk->size, chunk->devices != 0 ? pinned_bytes_ : ring_.capacity());
  const auto now = Clock::now();
  if (chunk->memory == nullptr) {
    if (!job.ring_waiting) job.ring_wait_begin = now;
    job.ring_waiting = job.ring_was_full = true;
    if (helping) io_->Wake();  // a held job has not woken the writer for its ready chunks
    return nullptr;
  }
  if (job.ring_waiting) chunk->ring_wait_s = std::chrono::duration<double>(now - job.ring_wait_begin).count();
  job.ring_wait_s += chunk->ring_wait_s;
  job.ring_waiting = false;
  if (bounces && !IsPinned({chunk->memory, chunk->size})) {
    chunk->bounce = idle_bounces_.back();
    idle_bounces_.pop_back();
  }
  queue_.pop_front();
  chunk->state = Chunk::State::kCopying;
  chunk->copy_begin = now;
  ++job.copying;
  for (const int device : Bits{chunk->devices}) {
    CopyLane& l = LaneOf(*chunk, device);
    ++l.in_flight;
    l.calls += chunk->calls;
    ++l.burst;
    ++chunk->copies_left;
  }
  return chunk;
}

// Enqueues the chunk's copies from devices and copies its host memory. Unlocks. `tickets` are valid even if it throws.
Status Engine::MoveBytes(Chunk* chunk, Tickets* tickets, Lock& lock) {
  Job& job = *chunk->job;
  std::vector<std::byte*> cuts;
  if (chunk->devices != 0) cuts = CutsIn({chunk->memory, chunk->size});
  const bool pinned = chunk->bounce != nullptr || IsPinned({chunk->memory, chunk->size});
  lock.unlock();
  Status status;
  for (const int device : Bits{chunk->devices})
    if (status.ok()) status = StartCopies(*chunk, device, cuts, pinned, &(*tickets)[device]);
  PieceSums sums(chunk);
  const bool sums_literals = !chunk->summed_whole();
  for (size_t i = 0; i < chunk->pieces.size(); ++i) {
    Piece& p = chunk->pieces[i];
    if (i + kPiecesAhead < chunk->pieces.size()) Prefetch(job, chunk->pieces[i + kPiecesAhead]);
    if (p.kind == RowKind::kLiteral) {
      if (sums_literals)
        p.crc = CopyCrc32(0, chunk->memory + p.at, p.literal, p.size);
      else
        std::memcpy(chunk->memory + p.at, p.literal, p.size);
    }
    if (p.kind != RowKind::kSource) continue;
    sums.Begin(p);
    const Source& source = job.sources[p.source];
    if (source.device >= 0 || source.watched >= 0) continue;
    sums.Copy(chunk->memory + p.at, source.data + p.source_offset, p.size);
    p.crc = sums.crc();
  }
  if (witness_ != nullptr && !CopyWatched(job, chunk)) {
    for (PageWindow& window : job.windows) witness_->CheckRest(&window);
    if (status.ok()) status = Status(ECANCELED, "memory was written to before it was copied", "");
  }
  std::memset(chunk->memory + chunk->size, 0, AlignUp(chunk->size, kBlockBytes) - chunk->size);
  return status;
}

// Releases the threads that wait for host memory to be copied and for device copies to be enqueued.
void Engine::OnMoved(Chunk* chunk, const Tickets& tickets) {
  Job& job = *chunk->job;
  if (chunk->eager) --job.eager_left;
  for (const int owner : Bits{chunk->owners}) --job.owner_waiting[owner];
  for (const int device : Bits{chunk->devices}) {
    CopyLane& lane = LaneOf(*chunk, device);
    if (tickets[device] != nullptr) {
      lane.flights.push_back({chunk, tickets[device]});
    } else {
      lane.EndFlight(*chunk);
      --chunk->copies_left;
    }
    lane.changed.notify_one();
  }
  if (chunk->copies_left == 0) EndCopy(chunk);
  changed_.notify_all();
}

// Checksums what devices delivered. Unlocks meanwhile.
void Engine::SumChunk(Chunk* chunk, Lock& lock) {
  const auto keep = chunk->job->shared_from_this();
  const std::byte* const bounce = chunk->bounce;
  lock.unlock();
  PieceSums sums(chunk);
  for (Piece& p : chunk->pieces) {
    if (p.kind != RowKind::kSource) continue;
    sums.Begin(p);
    if (keep->sources[p.source].device < 0) continue;
    std::byte* const at = chunk->memory + p.at;
    if (bounce == nullptr)
      sums.Add(at, p.size);
    else
      sums.Copy(at, bounce + p.at, p.size);
    p.crc = sums.crc();
  }
  lock.lock();
  EndCopy(chunk);
  changed_.notify_all();
}

void Engine::EndCopy(Chunk* chunk) {
  const auto keep = chunk->job->shared_from_this();
  Job& job = *keep;
  chunk->copy_end = Clock::now();
  --job.copying;
  if (chunk->bounce != nullptr) idle_bounces_.push_back(std::exchange(chunk->bounce, nullptr));
  job.copy_s += std::chrono::duration<double>(chunk->copy_end - chunk->copy_begin).count();
  if (job.error.ok())
    OnCopied(chunk);
  else
    Release(chunk);
  CloseIfSettled(job);
}

void Engine::OnCopied(Chunk* chunk) {
  Job& job = *chunk->job;
  bool any_ready = false;
  const auto unblock = [&](Chunk* c) {
    if (c->blockers > 0 || c->state != Chunk::State::kBlocked) return;
    c->state = Chunk::State::kReady;
    ready_.push_back(c);
    any_ready = true;
  };
  // Sources before checksums: those of this chunk and of blocked ones may wait for them.
  const uint32_t* cut_crc = chunk->cut_crcs.data();
  for (const Piece& p : chunk->pieces) {
    if (p.kind != RowKind::kSource) continue;
    Source& source = job.sources[p.source];
    source.parts[p.part].crc = p.crc;
    for (size_t i = 0, n = source.CutsIn(p.source_offset, p.size); i < n; ++i)
      source.cuts[source.parts[p.part].first_cut + i].crc = *cut_crc++;
    if (--source.parts_left > 0) continue;
    source.crc = source.parts[0].crc;
    for (size_t i = 1; i < source.parts.size(); ++i)
      source.crc = Crc32Combine(source.crc, source.parts[i].crc, source.parts[i].size);
    for (const Slot* slot = std::exchange(source.waiting, nullptr); slot != nullptr; slot = slot->next) {
      WriteCrc32(slot->chunk, slot->chunk->pieces[slot->piece], source);
      --slot->chunk->blockers;
      unblock(slot->chunk);
    }
  }
  for (size_t i = 0; i < chunk->pieces.size(); ++i) {
    Piece& p = chunk->pieces[i];
    if (!p.is_checksum()) continue;
    Source& source = job.sources[p.source];
    if (source.parts_left == 0) {
      WriteCrc32(chunk, p, source);
    } else {
      source.waiting = &chunk->slots.emplace_back(Slot{chunk, i, source.waiting});
      ++chunk->blockers;
    }
  }
  chunk->state = Chunk::State::kBlocked;
  unblock(chunk);
  for (const int owner : Bits{chunk->owners}) --job.owner_left[owner];
  if (chunk->eager && chunk->devices != 0) --job.eager_landing;
  if (--job.capture_left == 0) job.captured_at = Clock::now();
  if (any_ready && !job.held) io_->Wake();
}

void Engine::Release(Chunk* chunk) {
  if (chunk->memory != nullptr) ring_.Free(chunk->memory);
  chunk->memory = nullptr;
  chunk->pieces = {};
  chunk->cut_crcs = {};
  if (chunk->edges.capacity() > 0) {
    chunk->edges.clear();
    const auto larger = [](size_t capacity, const auto& idle) { return capacity < idle.capacity(); };
    const auto at = std::upper_bound(idle_edges_.begin(), idle_edges_.end(), chunk->edges.capacity(), larger);
    idle_edges_.insert(at, std::exchange(chunk->edges, {}));
    --used_edges_;
  }
  chunk->state = Chunk::State::kDone;
}

}  // namespace lazyckpt
