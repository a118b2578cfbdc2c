// From the training state into the staging ring.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <utility>

#include "engine/checksum.h"
#include "engine/engine.h"

namespace lazyckpt {
namespace {

// Writes the bytes [piece.source_offset, + piece.size) of a checksum's written form.
void WriteCrc32(Chunk* chunk, Piece& piece, uint32_t crc) {
  char text[9];
  if (piece.kind == RowKind::kCrc32Le)
    for (int i = 0; i < 4; ++i) text[i] = static_cast<char>(crc >> (8 * i) & 0xff);
  else
    std::snprintf(text, sizeof text, "%08x", crc);
  std::byte* to = chunk->memory + piece.at;
  std::memcpy(to, text + piece.source_offset, piece.size);
  piece.crc = Crc32(0, to, piece.size);
}

// One copy of host memory from or to `device`, or more where it has to be cut.
void AddCopies(std::span<std::byte> host, uint64_t device, const std::vector<std::byte*>& cuts,
               std::vector<DeviceCopy>* copies) {
  std::byte* at = host.data();
  std::byte* const end = at + host.size();
  while (at < end) {
    const auto cut = std::upper_bound(cuts.begin(), cuts.end(), at);
    const auto n = static_cast<size_t>((cut == cuts.end() ? end : std::min(end, *cut)) - at);
    copies->push_back({at, device, n});
    at += n;
    device += n;
  }
}

}  // namespace

// The next chunk to copy, with its region of the ring; nullptr if there is none, no room, or too much under way.
// Helping: by a thread that waits for copies.
Chunk* Engine::TakeChunk(bool helping) {
  if (queue_.empty()) return nullptr;
  Chunk* chunk = queue_.front();
  Job& job = *chunk->job;
  if (!helping && (job.held || (job.eager_by_caller && chunk->eager && job.eager_left == 1))) return nullptr;
  // More threads than half of the cores would take what training computes with, for copies that nobody waits for.
  if (!helping && copying_ >= modest_ && !job.ring_was_full) return nullptr;
  const auto lane = static_cast<size_t>(chunk->lane());
  for (uint64_t bits = chunk->devices; bits != 0; bits &= bits - 1) {
    const CopyLane& l = gpus_[std::countr_zero(bits)]->lanes[lane];
    if (l.in_flight >= (helping ? options_.copies_ahead : options_.copies_in_flight)) return nullptr;
    // A copy engine serves other streams only when it has run dry: a loss that training reads would come after all of
    // the checkpoint. So copies that nobody waits for come in bursts.
    if (!helping && l.burst >= options_.copies_in_flight) return nullptr;
  }
  const bool bounces = chunk->devices != 0 && bounce_ != nullptr;
  if (bounces && idle_bounces_.empty()) return nullptr;
  chunk->memory = ring_.Allocate(chunk->size, chunk->devices != 0 ? pinned_bytes_ : ring_.capacity());
  const auto now = Clock::now();
  if (chunk->memory == nullptr) {
    if (!job.ring_waiting) job.ring_wait_begin = now;
    job.ring_waiting = job.ring_was_full = true;
    if (helping) io_->Wake();  // nobody did for what a held checkpoint has ready
    return nullptr;
  }
  if (job.ring_waiting) chunk->ring_wait_s = std::chrono::duration<double>(now - job.ring_wait_begin).count();
  job.ring_wait_s += chunk->ring_wait_s;
  job.ring_waiting = false;
  if (bounces && !IsPinned({chunk->memory, chunk->size})) {
    chunk->bounce = idle_bounces_.back();
    idle_bounces_.pop_back();
  }
  queue_.pop_front();  // from here on it needs no memory
  chunk->state = Chunk::State::kCopying;
  chunk->copy_begin = now;
  ++job.copying;
  for (uint64_t bits = chunk->devices; bits != 0; bits &= bits - 1) {
    CopyLane& l = gpus_[std::countr_zero(bits)]->lanes[lane];
    ++l.in_flight;
    ++l.burst;
    ++chunk->copies_left;
  }
  return chunk;
}

// TakeChunk had no memory for the next chunk: its checkpoint fails.
void Engine::FailNext() {
  const auto keep = queue_.front()->job->shared_from_this();
  FailLocked(*keep, Status::NoMemory());
}

// Called with the lock held; lets go of it while bytes move. Does not throw.
void Engine::CopyChunk(Chunk* chunk, std::unique_lock<std::mutex>& lock) {
  const auto keep = chunk->job->shared_from_this();  // settling may drop the engine's own reference
  Job& job = *keep;
  Status status;
  std::vector<std::byte*> cuts;
  try {
    if (chunk->devices != 0) cuts = CutsIn({chunk->memory, chunk->size});
  } catch (const std::bad_alloc&) {
    status = Status::NoMemory();
  }
  const bool pinned = chunk->bounce != nullptr || IsPinned({chunk->memory, chunk->size});
  lock.unlock();
  std::array<Device::Ticket, kMaxDevices> tickets{};  // by ordinal; of the copies that are under way
  for (uint64_t bits = chunk->devices; bits != 0; bits &= bits - 1) {
    const int device = std::countr_zero(bits);
    Device::Ticket ticket = nullptr;
    if (status.ok()) status = StartCopies(*chunk, device, cuts, pinned, &ticket);
    if (status.ok()) tickets[device] = ticket;
  }
  for (Piece& p : chunk->pieces) {
    if (p.kind == RowKind::kLiteral) p.crc = CopyCrc32(0, chunk->memory + p.at, p.literal, p.size);
    if (p.kind != RowKind::kSource || job.sources[p.source].device >= 0) continue;
    const Source& source = job.sources[p.source];
    if (source.watched < 0) p.crc = CopyCrc32(0, chunk->memory + p.at, source.data + p.source_offset, p.size);
  }
  const bool written = witness_ != nullptr && !CopyWatched(job, chunk);
  if (written) witness_->CheckRest(&job.window);
  std::memset(chunk->memory + chunk->size, 0, AlignUp(chunk->size, kBlockBytes) - chunk->size);

  lock.lock();
  if (!status.ok()) FailLocked(job, std::move(status));
  if (written) FailLocked(job, Status(ECANCELED, "memory was written to before it was copied", ""));
  if (chunk->eager) --job.eager_left;
  for (uint64_t bits = chunk->owners; bits != 0; bits &= bits - 1) --job.owner_waiting[std::countr_zero(bits)];
  for (uint64_t bits = chunk->devices; bits != 0; bits &= bits - 1) {
    const int device = std::countr_zero(bits);
    CopyLane& lane = gpus_[device]->lanes[static_cast<size_t>(chunk->lane())];
    if (tickets[device] != nullptr) {
      lane.flights.push_back({chunk, tickets[device]});
    } else {
      lane.EndFlight();
      --chunk->copies_left;
    }
    lane.changed.notify_one();
  }
  if (chunk->copies_left == 0) EndCopy(chunk);
  changed_.notify_all();
}

Status Engine::StartCopies(const Chunk& chunk, int device, const std::vector<std::byte*>& cuts, bool pinned,
                           Device::Ticket* ticket) try {
  std::vector<DeviceCopy> copies;
  std::byte* const to = chunk.bounce != nullptr ? chunk.bounce : chunk.memory;
  for (const Piece& p : chunk.pieces) {
    if (p.kind != RowKind::kSource || chunk.job->sources[p.source].device != device) continue;
    const std::byte* from = chunk.job->sources[p.source].data + p.source_offset;
    AddCopies({to + p.at, p.size}, reinterpret_cast<uint64_t>(from), cuts, &copies);
  }
  return gpus_[device]->device->Start(chunk.lane(), copies, pinned, ticket);
} catch (const std::bad_alloc&) {  // before Start(), which does not throw
  return Status::NoMemory();
}

Status Engine::Upload(int device, std::span<const DeviceCopy> copies) try {
  std::byte* end = copies.front().host;
  for (const DeviceCopy& c : copies) end = std::max(end, c.host + c.size);
  const std::span<std::byte> from(copies.front().host, end);
  std::vector<DeviceCopy> batch;
  batch.reserve(copies.size());  // enough for the small buffer: it needs no memory once it has that
  std::vector<std::byte*> cuts;
  std::byte* bounce = nullptr;
  bool pinned = false;
  {
    std::unique_lock lock(mutex_);
    const std::byte* const base = ring_.base();
    const bool in_ring = from.data() >= base && from.data() < base + ring_.capacity();
    const size_t needed = in_ring ? static_cast<size_t>(end - base) : 0;
    changed_.wait(lock, [&] { return pinned_bytes_ >= needed; });
    cuts = CutsIn(from);
    pinned = IsPinned(from);
    if (!pinned && bounce_ != nullptr) {
      changed_.wait(lock, [&] { return !idle_bounces_.empty(); });
      bounce = idle_bounces_.back();
      idle_bounces_.pop_back();
    }
  }
  if (bounce == nullptr) {
    for (const DeviceCopy& c : copies) AddCopies({c.host, c.size}, c.device, cuts, &batch);
    return Send(device, batch, pinned);
  }
  Status status;
  size_t used = 0;
  const auto send = [&] {
    if (status.ok() && !batch.empty()) status = Send(device, batch, true);
    batch.clear();
    used = 0;
  };
  for (const DeviceCopy& c : copies) {
    for (size_t done = 0; done < c.size;) {
      const size_t n = std::min(c.size - done, options_.chunk_bytes - used);
      std::memcpy(bounce + used, c.host + done, n);
      batch.push_back({bounce + used, c.device + done, n});
      done += n;
      used += n;
      if (used == options_.chunk_bytes) send();
    }
  }
  send();
  Locked([&] { idle_bounces_.push_back(bounce); });
  changed_.notify_all();
  return status;
} catch (const std::bad_alloc&) {  // before the small buffer was taken
  return Status::NoMemory();
}

Status Engine::Send(int device, std::span<const DeviceCopy> copies, bool pinned) {
  Device& target = *gpus_[device]->device;
  Device::Ticket ticket = nullptr;
  const Status status = target.Start(Lane::kRestore, copies, pinned, &ticket);
  return status.ok() ? target.Finish(Lane::kRestore, ticket) : status;
}

// The ends of pinned ranges inside of some memory: no copy may cross them.
std::vector<std::byte*> Engine::CutsIn(std::span<std::byte> memory) const {
  std::vector<std::byte*> cuts;
  for (const auto& pin : pins_) {
    std::byte* const end = pin.data() + pin.size();
    if (end > memory.data() && end < memory.data() + memory.size()) cuts.push_back(end);
  }
  return cuts;
}

// All of it, if it lies in the ring: that is pinned from its begin on.
bool Engine::IsPinned(std::span<std::byte> memory) const {
  return !pins_.empty() && memory.data() >= ring_.base() &&
         memory.data() + memory.size() <= pins_.back().data() + pins_.back().size();
}

// One for each lane of a device: waits for its copies, in their order, and keeps the lane busy.
void Engine::LandLoop(Gpu& gpu, CopyLane& lane) {
  std::unique_lock lock(mutex_);
  for (;;) {
    lane.changed.wait(lock, [&] { return !lane.flights.empty() || (lane.stop && lane.in_flight == 0); });
    if (lane.flights.empty()) return;
    const auto [chunk, ticket] = lane.flights.front();
    lane.flights.erase(lane.flights.begin());
    lock.unlock();
    Status status = gpu.device->Finish(lane.lane, ticket);
    lock.lock();
    lane.EndFlight();
    OnLanded(chunk, std::move(status));
    // The copy threads may all be checksumming; to enqueue the next ones takes microseconds.
    try {
      while (!queue_.empty() && queue_.front()->devices != 0) {
        Chunk* const next = TakeChunk(false);
        if (next == nullptr) break;
        CopyChunk(next, lock);
      }
    } catch (const std::bad_alloc&) {
      FailNext();
    }
  }
}

void Engine::OnLanded(Chunk* chunk, Status status) {
  const auto keep = chunk->job->shared_from_this();
  if (!status.ok()) FailLocked(*keep, std::move(status));
  if (--chunk->copies_left == 0) {
    if (keep->error.ok())
      landed_.push_back(chunk);
    else
      EndCopy(chunk);
  }
  changed_.notify_all();
}

// Called with the lock held; lets go of it meanwhile.
void Engine::SumChunk(Chunk* chunk, std::unique_lock<std::mutex>& lock) {
  const auto keep = chunk->job->shared_from_this();
  const std::byte* const bounce = chunk->bounce;
  lock.unlock();
  for (Piece& p : chunk->pieces) {
    if (p.kind != RowKind::kSource || keep->sources[p.source].device < 0) continue;
    std::byte* const at = chunk->memory + p.at;
    p.crc = bounce == nullptr ? Crc32(0, at, p.size) : CopyCrc32(0, at, bounce + p.at, p.size);
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
  // Sources first: they may be what checksums in this chunk, and in blocked ones, are waiting for.
  for (const Piece& p : chunk->pieces) {
    if (p.kind != RowKind::kSource) continue;
    Source& source = job.sources[p.source];
    source.parts[p.part].crc = p.crc;
    if (--source.parts_left > 0) continue;
    source.crc = source.parts[0].crc;
    for (size_t i = 1; i < source.parts.size(); ++i)
      source.crc = Crc32Combine(source.crc, source.parts[i].crc, source.parts[i].size);
    for (const Slot* slot = std::exchange(source.waiting, nullptr); slot != nullptr; slot = slot->next) {
      WriteCrc32(slot->chunk, slot->chunk->pieces[slot->piece], source.crc);
      --slot->chunk->blockers;
      unblock(slot->chunk);
    }
  }
  for (size_t i = 0; i < chunk->pieces.size(); ++i) {
    Piece& p = chunk->pieces[i];
    if (p.kind != RowKind::kCrc32Le && p.kind != RowKind::kCrc32Hex) continue;
    Source& source = job.sources[p.source];
    if (source.parts_left == 0) {
      WriteCrc32(chunk, p, source.crc);
    } else {
      source.waiting = &chunk->slots.emplace_back(Slot{chunk, i, source.waiting});
      ++chunk->blockers;
    }
  }
  chunk->state = Chunk::State::kBlocked;
  unblock(chunk);
  for (uint64_t bits = chunk->owners; bits != 0; bits &= bits - 1) --job.owner_left[std::countr_zero(bits)];
  if (--job.capture_left == 0) job.captured_at = Clock::now();
  if (any_ready && !job.held) io_->Wake();
}

void Engine::Release(Chunk* chunk) {
  if (chunk->memory != nullptr) ring_.Free(chunk->memory);
  chunk->memory = nullptr;
  chunk->pieces = {};
  if (chunk->edges.capacity() > 0) {
    chunk->edges.clear();
    idle_edges_.push_back(std::exchange(chunk->edges, {}));
    --used_edges_;
  }
  chunk->state = Chunk::State::kDone;
}

void Engine::CopyLoop() {
  // A batch thread that wakes up does not preempt the training thread that woke it, in the middle of save().
  const sched_param priority{};
  pthread_setschedparam(pthread_self(), SCHED_BATCH, &priority);
  std::unique_lock lock(mutex_);
  while (!stop_)
    if (!Work(false, lock)) changed_.wait(lock);
}

// Does one thing that there is to do; false if there is none. Copies begin before checksums: devices work meanwhile.
bool Engine::Work(bool helping, std::unique_lock<std::mutex>& lock) {
  try {
    if (Chunk* chunk = TakeChunk(helping)) {
      copying_ += helping ? 0 : 1;
      CopyChunk(chunk, lock);
      copying_ -= helping ? 0 : 1;
      return true;
    }
  } catch (const std::bad_alloc&) {
    FailNext();
    return true;
  }
  if (landed_.empty()) return false;
  SumChunk(landed_.pop_front(), lock);
  return true;
}

// Copies until done() holds: a thread that has to wait for a copy makes it instead.
bool Engine::HelpUntil(const std::function<bool()>& done, Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  while (!done()) {
    if (Clock::now() >= deadline) return false;
    if (!Work(true, lock)) changed_.wait_until(lock, deadline);
  }
  return true;
}

}  // namespace lazyckpt
