// The engine: copies sources into the staging ring, writes the ring to files, knows bytes and nothing else.
#pragma once

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
  size_t chunk_bytes;
  unsigned io_depth;
  unsigned copy_threads;
  std::string backend = "auto";
  std::optional<bool> direct;  // without: except on FUSE
  bool register_buffers = true;
  bool pin_ring = true;         // for devices; without, what they do where that is refused
  size_t copies_in_flight = 4;  // chunks, in each lane of a device; a burst is as long
  size_t copies_ahead = 64;     // the same while a thread waits for copies; not more, since drivers' queues are short
  bool watch_pages = false;     // of lazy host memory: see PageWitness
  bool copy_on_write = false;   // and in its mode kCopy
  std::string fault;            // test build only: see MakeFaultBackend
};

// Any thread may call. Only the process that made an engine may use it: a forked child has its memory but not
// its threads, so every method except the destructor is refused there by the bindings.
//
// One mutex guards all bookkeeping; bytes are copied, checksummed and written outside it. Chunks are copied in
// the order of the queue (checkpoint by checkpoint, in the order of the program), by the copy threads and by any
// thread that waits for them. What is on a device they enqueue there; a thread for each lane of the device waits until
// it has landed in the ring, and the copy threads checksum it.
class Engine {
 public:
  static std::unique_ptr<Engine> Create(const EngineOptions& options, Status* status);
  ~Engine();  // waits for what is being written; unfinished checkpoints must have been failed or waited for

  // Raises the ring's capacity, if it is empty; the pages are faulted in in the background.
  bool Reserve(size_t bytes);

  // A part of the ring for other use, as much as `bytes`, until it is given back; empty if there is none to spare.
  std::span<std::byte> Borrow(size_t bytes);
  void GiveBack(std::span<std::byte> region);

  // Makes the memory of a CUDA device readable: Source::device. False, with the reason, where there is no driver.
  bool Attach(int ordinal, Status* status);

  // Copies that begin from now on come after what these streams hold by now.
  Status CopyAfter(std::span<const StreamRef> streams);
  // Copies to an attached device in its own lane, and waits once for all of it. The host memory is that of one buffer,
  // in the ring or elsewhere, in ascending order.
  Status Upload(int device, std::span<const DeviceCopy> copies);

  // With watch_pages, a write to a page of a lazy host source between Begin and its copy fails the checkpoint
  // (ECANCELED; Job::torn). A source whose pages cannot be watched becomes eager.
  //
  // streams: the caller's current stream of every device that holds a source. What is copied is what they make of it
  // by now. If a device refuses, so does Begin.
  // eager_by_caller: the caller will lay it out and call WaitEager and Go at once. Until Go, only threads that wait for
  // the checkpoint copy it: a copy thread may take the caller's core until the next tick of the scheduler, 10 ms in
  // some kernels. Afterwards copy threads leave the last eager chunk to WaitEager, since one of them may not get a core
  // for milliseconds where training keeps all of them busy.
  std::shared_ptr<Job> Begin(std::vector<Source> sources, size_t files, bool eager_by_caller,
                             std::vector<StreamRef> streams, Status* status);

  void Go(Job& job);  // the copy threads may begin

  // Appends an extent of `file` at `offset` (a multiple of kBlockBytes, or the end of the extent before). Source 0 of
  // its rows is `first_source` of the job. Like sources, the blob stays alive until they are released.
  // Copying begins at once. EINVAL, and the checkpoint fails, if the program does not fit its blob or its sources.
  Status Append(Job& job, size_t file, uint64_t offset, std::span<const Row> rows, std::string_view blob,
                size_t first_source = 0);
  // Nothing more will be appended. EINVAL, and the checkpoint fails, if its files have holes or overlaps, or if a
  // source was left out.
  Status Seal(Job& job);

  // Creates the file, once; bytes wait in the ring until then. `size`: disk space to reserve. If it fails, so does
  // the checkpoint.
  Status Open(Job& job, size_t file, const std::string& path, uint64_t size);

  // Each returns true when the state is reached or the job has failed, false at the deadline. The first two copy
  // while they wait; without copy threads the others do, too, since somebody has to. For eager bytes on devices it is
  // the streams given to Begin that wait from then on; the caller waits only until their copies are enqueued.
  bool WaitEager(Job& job, Clock::time_point deadline);
  bool WaitCaptured(Job& job, uint64_t owners, Clock::time_point deadline);
  // Waits until the copies of these owners are enqueued, and makes these streams wait until they are done. Host memory
  // of theirs is captured. If one of the streams is being captured, WaitCaptured without help.
  bool WaitEnqueued(Job& job, uint64_t owners, std::span<const StreamRef> streams, Clock::time_point deadline);
  bool WaitReleased(Job& job, Clock::time_point deadline);  // captured, and nobody reads the sources any more
  bool WaitSettled(Job& job, Clock::time_point deadline);

  void Fail(Job& job, Status error);

  // Under the lock: for looking at a job's bookkeeping.
  template <class F>
  auto Locked(F look) {
    std::lock_guard lock(mutex_);
    return look();
  }

  const EngineOptions& options() const { return options_; }
  Ring& ring() { return ring_; }
  const char* backend_name() const { return io_->name(); }
  const Status& fallback() const { return fallback_; }  // why io_uring is not used; OK if it is
  // Under the lock: why the ring is not pinned for devices, or OK; and whether there is a pinned buffer in its stead.
  const Status& unpinned() const { return unpinned_; }
  bool bounces() const { return bounce_ != nullptr; }

 private:
  static constexpr size_t kPrepareBytes = size_t{64} << 20;  // of the ring, between two looks at what is to be written

  // The copies of one lane of a device that are under way.
  struct CopyLane {
    struct Flight {
      Chunk* chunk;
      Device::Ticket ticket;
    };
    Lane lane;
    size_t in_flight = 0;         // chunks, with those that are about to be
    size_t burst = 0;             // chunks since none was in flight
    std::vector<Flight> flights;  // has room for copies_ahead
    bool stop = false;
    std::condition_variable changed;
    std::thread thread;  // waits for them

    void EndFlight() {
      if (--in_flight == 0) burst = 0;
    }
  };
  struct Gpu {
    std::unique_ptr<Device> device;
    CopyLane lanes[2];  // Lane::kEager, Lane::kLazy
  };

  Engine() = default;

  // engine.cc
  void StopLanes(Gpu& gpu);
  void RunAfterCopies(Job& job, Lane lane, const StreamRef& stream);

  // layout.cc
  Status LayOut(Job& job, size_t file, uint64_t offset, std::span<const Row> rows, std::string_view blob,
                size_t first_source);
  void OpenChunk(Job& job, size_t file, uint64_t offset);
  void AddPiece(Job& job, Piece piece);
  void SplitAtLastBlock(Job& job);
  void QueueOpenChunk(Job& job);

  // watch.cc
  void Watch(Job& job);
  void KeepEdges(Chunk* chunk);
  bool CopyWatched(Job& job, Chunk* chunk);
  void EndWatch(Job& job);

  // capture.cc
  void CopyLoop();
  void LandLoop(Gpu& gpu, CopyLane& lane);
  bool Work(bool helping, std::unique_lock<std::mutex>& lock);
  Chunk* TakeChunk(bool helping);
  void FailNext();
  void CopyChunk(Chunk* chunk, std::unique_lock<std::mutex>& lock);
  Status Send(int device, std::span<const DeviceCopy> copies, bool pinned);
  Status StartCopies(const Chunk& chunk, int device, const std::vector<std::byte*>& cuts, bool pinned,
                     Device::Ticket* ticket);
  std::vector<std::byte*> CutsIn(std::span<std::byte> memory) const;
  bool IsPinned(std::span<std::byte> memory) const;
  void OnLanded(Chunk* chunk, Status status);
  void SumChunk(Chunk* chunk, std::unique_lock<std::mutex>& lock);
  void EndCopy(Chunk* chunk);
  void OnCopied(Chunk* chunk);
  void Release(Chunk* chunk);
  bool HelpUntil(const std::function<bool()>& done, Clock::time_point deadline);
  bool WaitUntil(const std::function<bool()>& done, Clock::time_point deadline);

  // writer.cc
  void WriteLoop();
  bool PrepareRing();
  void PinRange(Device& device, size_t at, size_t end, int node);
  int NearestNode() const;
  bool SubmitNext(unsigned* in_flight);
  void QueueSyncs(Job& job);
  void OnResult(const IoResult& result);
  void OnChunkResult(Chunk* chunk, int64_t result);
  void FailLocked(Job& job, Status error);
  void CloseIfSettled(Job& job);

  EngineOptions options_;
  Status fallback_;
  Ring ring_;
  std::unique_ptr<IoBackend> io_;
  std::vector<IoResult> results_;  // the writer's; has room for io_depth

  std::mutex mutex_;
  std::condition_variable changed_;         // anything a thread may wait for
  Queue<Chunk> queue_;                      // to be copied
  Queue<Chunk> landed_;                     // copied from devices, to be checksummed
  Queue<Chunk> ready_;                      // to be written
  Queue<File> syncs_;                       // files to be synced
  std::vector<std::shared_ptr<Job>> jobs_;  // unsettled
  size_t faulted_bytes_ = 0;                // of the ring: its pages are there
  size_t registered_bytes_ = 0;             // and io_uring knows them
  bool stop_ = false;

  std::mutex attaching_;
  std::shared_ptr<const cuda::Driver> driver_;  // guarded by attaching_
  std::unique_ptr<Gpu> gpus_[kMaxDevices];      // by ordinal
  Device* pinner_ = nullptr;                    // the first of them
  size_t pinned_bytes_ = 0;                     // of the ring: devices copy into them
  std::vector<std::span<std::byte>> pins_;      // in the order of their addresses
  Status unpinned_;
  std::byte* bounce_ = nullptr;  // copies_in_flight pinned chunks, if the ring is not pinned and a device gave them
  std::vector<std::byte*> idle_bounces_;  // those of them that hold nothing

  PageWitness* witness_ = nullptr;                  // with watch_pages
  std::vector<std::vector<std::byte>> idle_edges_;  // for Chunk::edges: memory that is new is slow
  size_t used_edges_ = 0;                           // by chunks

  std::vector<std::thread> copiers_;
  unsigned copying_ = 0;  // copiers that copy now
  unsigned modest_ = 1;   // half of the cores: so many copiers work before the ring is full
  std::thread writer_;
};

}  // namespace lazyckpt
