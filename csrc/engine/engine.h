// The engine: copies sources into the staging ring and writes the ring to files. csrc/README.md lists the files.
#pragma once

#include <array>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "device/device.h"
#include "engine/job.h"
#include "engine/ring.h"
#include "io/backend.h"
#include "witness/page_witness.h"

namespace lazyckpt {

struct EngineOptions {
  size_t max_ring_bytes;
  size_t chunk_bytes;  // a multiple of kBlockBytes
  unsigned io_depth;   // writes in flight
  unsigned copy_threads;
  std::string backend = "auto";  // see MakeBackend
  std::optional<bool> direct;    // O_DIRECT; nullopt: except on FUSE
  bool pin_ring = true;          // for devices; false: as if the driver refused
  size_t copies_in_flight = 4;   // chunks in each lane of a device, and in one burst
  size_t copies_ahead = 64;      // while a thread waits for copies; limited, since drivers' queues are short
  bool watch_pages = false;      // watch the pages of lazy host memory: see PageWitness
  bool huge_pages = false;       // a thread moves watched memory to huge pages
  std::string fault;             // test build only: see MakeFaultBackend
};

// Any thread may call the engine, but only in the process that made it: a forked child has its memory but not its
// threads.
//
// One mutex guards all bookkeeping; bytes are copied, checksummed and written outside it. Chunks are copied in the
// order of the queue (job by job, in the order of the program) by the copy threads and by every thread that waits for
// them. Bytes on a device are enqueued there; one thread for each lane of a device waits until they land in the ring,
// and the copy threads checksum them. One thread writes.
//
// If memory runs out on an engine thread, the job it works for fails with ENOMEM.
class Engine {
 public:
  static std::unique_ptr<Engine> Create(const EngineOptions& options, Status* status);
  ~Engine();  // fails unsettled jobs and waits for copies and writes under way

  // Raises the ring's capacity if the ring is empty; the writer thread faults the new pages in.
  bool Reserve(size_t bytes);

  // Lends up to `bytes` of the ring until GiveBack; empty if there is no room.
  std::span<std::byte> Borrow(size_t bytes);
  void GiveBack(std::span<std::byte> region);

  // Makes the memory of a CUDA device readable (Source::device). Returns false, with the reason, if it cannot.
  bool Attach(int ordinal, Status* status);

  // Makes later copies wait for the work already enqueued on these streams.
  Status CopyAfter(std::span<const StreamRef> streams);
  // Copies to an attached device in its own lane and returns when all of it is done. The host memory lies in one
  // buffer, in the ring or elsewhere, in ascending order. Throws std::bad_alloc, with no copy under way.
  Status Upload(int device, std::span<const DeviceCopy> copies);

  // Bytes [begin, end) of a file. `begin` is a multiple of kBlockBytes, and so is `end`, except at the end of the file.
  struct FilePart {
    size_t file;
    uint64_t begin;
    uint64_t end;
  };

  // Starts a job. A copy holds what the work already enqueued on `streams` makes of a source; there is one stream for
  // each device that holds a source. Fails if a device refuses.
  //
  // With watch_pages, a write to a page of a lazy host source between Begin and its copy fails the job (ECANCELED;
  // Job::torn). A source whose pages cannot be watched becomes eager.
  //
  // eager_by_caller: the caller lays the job out and calls WaitEager and Go at once. Until Go, only threads that wait
  // for the job copy it, since a copy thread may take the caller's core for a tick of the scheduler, up to 10 ms. After
  // Go, copy threads leave the last eager chunk to WaitEager, since they may not get a core for milliseconds.
  //
  // `parts`: of the files of which other processes write the rest.
  std::shared_ptr<Job> Begin(std::vector<Source> sources, size_t files, bool eager_by_caller,
                             std::vector<StreamRef> streams, std::span<const FilePart> parts, Status* status);

  // One extent for Append.
  struct Extent {
    size_t file;
    uint64_t offset;
    std::span<const Row> rows;
    std::string_view blob;
    size_t first_source;
  };
  // Begin with eager_by_caller, Append, Seal, and as much of WaitEager as the ring has room for, without a point at
  // which code of the calling thread could write in between: all bytes are of one moment. With watch_pages, eager host
  // bytes that may not fit into the ring are watched until their copy, as lazy ones are.
  std::shared_ptr<Job> Capture(std::vector<Source> sources, size_t files, std::vector<StreamRef> streams,
                               std::span<const Extent> extents, std::span<const FilePart> parts, Status* status);

  void Go(Job& job);  // lets the copy threads begin

  // Appends an extent of `file` at `offset` (a multiple of kBlockBytes, or the end of the extent before) and starts to
  // copy it. Source 0 of its rows is `first_source` of the job. The blob stays alive until the sources are released.
  // EINVAL, and the job fails, if the program does not fit its blob or its sources.
  Status Append(Job& job, size_t file, uint64_t offset, std::span<const Row> rows, std::string_view blob,
                size_t first_source = 0);
  // Ends the layout. EINVAL, and the job fails, if a file, or what this job writes of it, has holes or overlaps, or if
  // a source was left out.
  Status Seal(Job& job);

  // Creates a file, once, and reserves `size` bytes on the disk; chunks wait in the ring until then. The job fails if
  // this fails.
  Status Open(Job& job, size_t file, const std::string& path, uint64_t size);
  // Opens a file that another process has created, and writes the parts of this job there, `shift` bytes behind the
  // offsets of the program. Neither reserves space nor changes the size. The job fails if this fails, or with EINVAL if
  // the bytes of another process are in a block of this one.
  Status OpenExisting(Job& job, size_t file, const std::string& path, int64_t shift);

  // Instead of Open: nothing is written, and the chunks leave the ring as soon as they are copied.
  Status Drop(Job& job, size_t file);

  // Each returns true when the state is reached or the job has failed, false at the deadline. WaitEager, WaitCaptured
  // and WaitEnqueued copy while they wait; so do the others if there are no copy threads. For eager bytes on devices,
  // WaitEager waits only until the copies are enqueued, and makes the streams given to Begin wait for them.
  bool WaitEager(Job& job, Clock::time_point deadline);
  // Waits on the host until the bytes of these owners and all eager bytes are copied, so that any stream may write.
  bool WaitCaptured(Job& job, uint64_t owners, Clock::time_point deadline);
  // Waits until host bytes of these owners are copied and device copies are enqueued, then makes `streams` wait for the
  // latter, and for eager copies. If one of them is being captured, waits as WaitCaptured does and calls no other
  // function of the driver.
  bool WaitEnqueued(Job& job, uint64_t owners, std::span<const StreamRef> streams, Clock::time_point deadline);
  bool WaitReleased(Job& job, Clock::time_point deadline);  // nothing reads the sources any more
  bool WaitSettled(Job& job, Clock::time_point deadline);   // durable, or failed and drained

  void Fail(Job& job, Status error);

  // Calls `look` under the engine's mutex, to read the bookkeeping of a job.
  template <class F>
  auto Locked(F look) {
    std::lock_guard lock(mutex_);
    return look();
  }

  const EngineOptions& options() const { return options_; }
  Ring& ring() { return ring_; }
  const char* backend_name() const { return io_->name(); }
  const Status& fallback() const { return fallback_; }  // why io_uring is not used; OK if it is
  // Under the mutex: why the ring is not pinned, or OK; whether a small pinned buffer serves instead.
  const Status& unpinned() const { return unpinned_; }
  bool bounces() const { return bounce_ != nullptr; }
  Status unbatched() const;  // under the mutex: why some device copies small pieces one by one; see Device

 private:
  // The copies under way in one lane of a device.
  struct CopyLane {
    struct Flight {
      Chunk* chunk;
      Device::Ticket ticket;
    };
    Lane lane;
    size_t in_flight = 0;         // chunks, including those about to be enqueued
    size_t calls = 0;             // of the driver, for these
    size_t burst = 0;             // chunks since none was in flight
    std::vector<Flight> flights;  // has room for copies_ahead
    bool stop = false;
    std::condition_variable changed;
    std::thread thread;  // waits for the flights

    void EndFlight(const Chunk& chunk) {
      calls -= chunk.calls;
      if (--in_flight == 0) burst = 0;
    }
  };
  struct Gpu {
    std::unique_ptr<Device> device;
    CopyLane lanes[2];  // Lane::kEager, Lane::kLazy
  };
  using Tickets = std::array<Device::Ticket, kMaxDevices>;  // by ordinal; null: no copy under way
  using Lock = std::unique_lock<std::mutex>;

  Engine() = default;

  // layout.cc
  bool HasRoomForEager(const Job& job, std::span<const Extent> extents) const;
  Status LayOut(Job& job, size_t file, uint64_t offset, std::span<const Row> rows, std::string_view blob,
                size_t first_source);
  void OpenChunk(Job& job, size_t file, uint64_t offset);
  Piece& AddPiece(Job& job, RowKind kind, uint32_t size, size_t source_number);
  void SplitAtLastBlock(Job& job);
  void QueueOpenChunk(Job& job);

  // watch.cc
  void Watch(Job& job, bool eager_too);
  void KeepEdges(Chunk* chunk);
  bool CopyWatched(Job& job, Chunk* chunk);
  void EndWatch(Job& job);
  void CollapseLoop();

  // capture.cc
  bool CopyEager(Job& job, Clock::time_point deadline);
  void CopyLoop();
  bool Work(bool helping, Lock& lock);
  bool CopyNext(bool helping, Lock& lock);
  Chunk* TakeChunk(bool helping);
  Status MoveBytes(Chunk* chunk, Tickets* tickets, Lock& lock);
  void OnMoved(Chunk* chunk, const Tickets& tickets);
  void SumChunk(Chunk* chunk, Lock& lock);
  void EndCopy(Chunk* chunk);
  void OnCopied(Chunk* chunk);
  void Release(Chunk* chunk);
  bool HelpUntil(const std::function<bool()>& done, Clock::time_point deadline);

  // device_copies.cc
  void StopLanes(Gpu& gpu);
  void RunAfterCopies(Job& job, Lane lane, const StreamRef& stream);
  CopyLane& LaneOf(const Chunk& chunk, int device) const {
    return gpus_[device]->lanes[static_cast<size_t>(chunk.lane())];
  }
  Status StartCopies(const Chunk& chunk, int device, const std::vector<std::byte*>& cuts, bool pinned,
                     Device::Ticket* ticket);
  void LandLoop(Gpu& gpu, CopyLane& lane);
  void OnLanded(Chunk* chunk, Status status);
  Status Send(int device, std::span<const DeviceCopy> copies, bool pinned);
  std::vector<std::byte*> CutsIn(std::span<std::byte> memory) const;
  bool IsPinned(std::span<std::byte> memory) const;

  // staging.cc
  bool PrepareRing();
  void PinRange(Device& device, size_t at, size_t end);
  void LeaveUnpinned(Status why, std::byte* bounce);

  // writer.cc
  void WriteLoop();
  bool SubmitNext(unsigned* in_flight);
  void QueueSyncs(Job& job);
  void OnResult(const IoResult& result);
  void OnChunkResult(Chunk* chunk, int64_t result);
  void EndChunk(Chunk* chunk);

  // engine.cc
  std::shared_ptr<Job> MakeJob(std::vector<Source> sources, size_t files, bool eager_by_caller,
                               std::vector<StreamRef> streams, std::span<const FilePart> parts, Status* status);
  Status OpenFile(Job& job, size_t file, const std::string& path, std::optional<uint64_t> size);
  bool FollowEager(Job& job, Clock::time_point deadline);
  bool WaitForEnd(Job& job, const std::function<bool()>& ended, Clock::time_point deadline);
  bool WaitUntil(const std::function<bool()>& done, Clock::time_point deadline);
  void FailLocked(Job& job, Status error);
  void CloseIfSettled(Job& job);

  EngineOptions options_;
  Status fallback_;
  Ring ring_;
  std::unique_ptr<IoBackend> io_;
  std::vector<IoResult> results_;  // the writer's; has room for io_depth

  std::mutex mutex_;
  std::condition_variable changed_;         // anything a thread may wait for
  Queue<Chunk> queue_;                      // to copy
  Queue<Chunk> landed_;                     // copied from devices, to checksum
  Queue<Chunk> ready_;                      // to write
  Queue<File> syncs_;                       // files to sync
  std::vector<std::shared_ptr<Job>> jobs_;  // unsettled
  size_t faulted_bytes_ = 0;                // of the ring; the writer's
  size_t registered_bytes_ = 0;             // of the ring, with io_uring; the writer's
  const Job* capturing_ = nullptr;          // the job in Capture: no other one takes room in the ring meanwhile
  bool stop_ = false;

  std::mutex attaching_;
  std::shared_ptr<const cuda::Driver> driver_;  // guarded by attaching_
  std::unique_ptr<Gpu> gpus_[kMaxDevices];      // by ordinal
  Device* pinner_ = nullptr;                    // the first of them
  size_t pinned_bytes_ = 0;                     // of the ring, from its begin: devices copy into these
  std::vector<std::span<std::byte>> pins_;      // by address, without gaps
  Status unpinned_;
  std::byte* bounce_ = nullptr;           // copies_in_flight pinned chunks, if the ring could not be pinned
  std::vector<std::byte*> idle_bounces_;  // those of them that hold nothing

  PageWitness* witness_ = nullptr;  // with watch_pages
  // Reused for Chunk::edges, since new memory is slow; by capacity, so that the chunks of the next job find theirs.
  std::vector<std::vector<std::byte>> idle_edges_;
  size_t used_edges_ = 0;  // by chunks

  std::vector<std::thread> copiers_;
  unsigned copying_ = 0;  // copy threads that copy now
  unsigned modest_ = 1;   // half of the cores: the copy threads at work until the ring is full
  std::thread writer_;

  std::condition_variable watch_ended_;  // for collapser_
  bool may_collapse_ = false;
  std::thread collapser_;  // with huge_pages
};

}  // namespace lazyckpt
