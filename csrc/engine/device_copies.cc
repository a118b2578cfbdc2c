// Copies between devices and the staging ring: attaching devices, starting and landing copies, uploads.
#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "engine/engine.h"

namespace lazyckpt {
namespace {

// Appends the copies between host memory and `device`, split where host memory has a cut.
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

bool Engine::Attach(int ordinal, Status* status) {
  std::lock_guard attaching(attaching_);
  *status = Status::Ok();
  if (ordinal < 0 || static_cast<size_t>(ordinal) >= kMaxDevices) {
    *status = Status(EINVAL, "ordinal of a device", "");
    return false;
  }
  if (gpus_[ordinal] != nullptr) return true;
  if (driver_ == nullptr) driver_ = cuda::Driver::Load(status);
  if (driver_ == nullptr) return false;
  auto gpu = std::make_unique<Gpu>();
  gpu->device = OpenCudaDevice(driver_, ordinal, status);
  if (gpu->device == nullptr) return false;
  try {
    for (const Lane lane : {Lane::kEager, Lane::kLazy}) {
      CopyLane& l = gpu->lanes[static_cast<size_t>(lane)];
      l.lane = lane;
      l.flights.reserve(options_.copies_ahead);
      l.thread = std::thread([this, &g = *gpu, &l] { LandLoop(g, l); });
      pthread_setname_np(l.thread.native_handle(), "lazyckpt-land");
    }
  } catch (const std::system_error& error) {
    StopLanes(*gpu);
    *status = Status(error.code().value(), "start of an engine thread", "");
    return false;
  }
  {
    std::lock_guard lock(mutex_);
    if (pinner_ == nullptr) pinner_ = gpu->device.get();
    gpus_[ordinal] = std::move(gpu);
  }
  io_->Wake();  // the writer thread pins the ring
  return true;
}

Status Engine::unbatched() const {
  for (const auto& gpu : gpus_)
    if (Status status = gpu == nullptr ? Status::Ok() : gpu->device->unbatched(); !status.ok()) return status;
  return Status::Ok();
}

void Engine::StopLanes(Gpu& gpu) {
  {
    std::lock_guard lock(mutex_);
    for (CopyLane& lane : gpu.lanes) lane.stop = true;
  }
  for (CopyLane& lane : gpu.lanes) {
    lane.changed.notify_one();
    if (lane.thread.joinable()) lane.thread.join();
  }
}

Status Engine::CopyAfter(std::span<const StreamRef> streams) {
  for (const StreamRef& s : streams) {
    Gpu* gpu = s.device >= 0 && static_cast<size_t>(s.device) < kMaxDevices ? gpus_[s.device].get() : nullptr;
    if (gpu == nullptr) return Status(EINVAL, "a device that is not attached", "");
    if (Status status = gpu->device->CopyAfter(s.handle); !status.ok()) return status;
  }
  return Status::Ok();
}

// A failure fails the job, and the caller then waits on the host until nothing reads the sources.
void Engine::RunAfterCopies(Job& job, Lane lane, const StreamRef& stream) {
  Status status = gpus_[stream.device]->device->RunAfterCopies(lane, stream.handle);
  if (!status.ok()) Fail(job, std::move(status));
}

// Enqueues the copies of one chunk from one device. On an error none is under way and the ticket is null.
Status Engine::StartCopies(const Chunk& chunk, int device, const std::vector<std::byte*>& cuts, bool pinned,
                           Device::Ticket* ticket) {
  std::vector<DeviceCopy> copies;
  std::byte* const to = chunk.bounce != nullptr ? chunk.bounce : chunk.memory;
  for (const Piece& p : chunk.pieces) {
    if (p.kind != RowKind::kSource || chunk.job->sources[p.source].device != device) continue;
    const std::byte* from = chunk.job->sources[p.source].data + p.source_offset;
    AddCopies({to + p.at, p.size}, reinterpret_cast<uint64_t>(from), cuts, &copies);
  }
  return gpus_[device]->device->Start(chunk.lane(), copies, pinned, ticket);
}

// The ends of pinned ranges inside some memory; no copy may cross one.
std::vector<std::byte*> Engine::CutsIn(std::span<std::byte> memory) const {
  std::vector<std::byte*> cuts;
  for (const auto& pin : pins_) {
    std::byte* const end = pin.data() + pin.size();
    if (end > memory.data() && end < memory.data() + memory.size()) cuts.push_back(end);
  }
  return cuts;
}

// Whether all of some memory is pinned. The ring is pinned from its begin on.
bool Engine::IsPinned(std::span<std::byte> memory) const {
  return !pins_.empty() && memory.data() >= ring_.base() &&
         memory.data() + memory.size() <= pins_.back().data() + pins_.back().size();
}

// Waits for the copies of one lane, in their order, and keeps the lane busy.
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
    lane.EndFlight(*chunk);
    OnLanded(chunk, std::move(status));
    // The copy threads may all be checksumming, and enqueuing the next copies takes only microseconds.
    while (!queue_.empty() && queue_.front()->devices != 0 && CopyNext(false, lock)) {
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

Status Engine::Upload(int device, std::span<const DeviceCopy> copies) {
  std::byte* end = copies.front().host;
  for (const DeviceCopy& c : copies) end = std::max(end, c.host + c.size);
  const std::span<std::byte> from(copies.front().host, end);
  std::vector<DeviceCopy> batch;
  batch.reserve(copies.size());  // enough for the pinned buffer: nothing throws once that is taken
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
}

Status Engine::Send(int device, std::span<const DeviceCopy> copies, bool pinned) {
  Device& target = *gpus_[device]->device;
  Device::Ticket ticket = nullptr;
  const Status status = target.Start(Lane::kRestore, copies, pinned, &ticket);
  return status.ok() ? target.Finish(Lane::kRestore, ticket) : status;
}

}  // namespace lazyckpt
