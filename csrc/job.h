// One checkpoint on its way from the training state to its files. Data only: layout.cc makes chunks of it,
// capture.cc and writer.cc move them.
#pragma once

#include <bit>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "device.h"
#include "page_witness.h"
#include "status.h"

namespace lazyckpt {

using Clock = std::chrono::steady_clock;

struct Job;
struct Chunk;

// Which chunks of a checkpoint are copied first. save() waits for the eager ones of the host, and for a device only
// until the copies are enqueued, so that a device which is still computing does not hold up the others.
enum class Turn { kEagerHost, kEagerDevice, kLazy };

inline constexpr size_t kMaxDevices = 64;  // in one process: bits of Chunk::devices

// A stream of the caller's, on a device.
struct StreamRef {
  int device;
  uint64_t handle;
};

// What the writer hands to the I/O backend as a tag: a chunk being written or a file being synced.
struct IoTag {
  explicit IoTag(bool sync) : is_sync(sync) {}
  const bool is_sync;
  Job* job = nullptr;
  IoTag* next = nullptr;  // in the Queue that it is in
};

// Chunks or files, in order; each is in one queue at a time, or in none. It needs no memory, so that what is under way
// can always go on, and a checkpoint can fail.
template <class T>
class Queue {
 public:
  Queue() = default;
  Queue(const Queue&) = delete;

  bool empty() const { return first_ == nullptr; }
  T* front() const { return static_cast<T*>(first_); }
  void push_back(T* item) { Link(end_, item); }
  void push_front(T* item) { Link(&first_, item); }
  T* pop_front() { return Unlink(&first_); }

  // Before the first of those for which `later` holds.
  template <class F>
  void insert(T* item, F later) {
    Link(Find(later), item);
  }

  template <class F>
  void erase_if(F unwanted) {
    for (IoTag** at = &first_; *at != nullptr;)
      if (unwanted(static_cast<const T*>(*at)))
        Unlink(at);
      else
        at = &(*at)->next;
  }

  // Takes the first for which `wanted` holds; nullptr if there is none.
  template <class F>
  T* take(F wanted) {
    IoTag** const at = Find(wanted);
    return *at == nullptr ? nullptr : Unlink(at);
  }

 private:
  template <class F>
  IoTag** Find(F wanted) {
    IoTag** at = &first_;
    while (*at != nullptr && !wanted(static_cast<const T*>(*at))) at = &(*at)->next;
    return at;
  }

  void Link(IoTag** at, T* item) {
    item->next = *at;
    *at = item;
    if (at == end_) end_ = &item->next;
  }

  T* Unlink(IoTag** at) {
    IoTag* const item = *at;
    *at = item->next;
    if (end_ == &item->next) end_ = at;
    return static_cast<T*>(item);
  }

  IoTag* first_ = nullptr;
  IoTag** end_ = &first_;  // where the next one is linked
};

// The kinds of a program's rows (lazyckpt/formats/program.py has the same numbers).
enum class RowKind : uint8_t { kLiteral = 0, kSource = 1, kCrc32Le = 2, kCrc32Hex = 3 };

// As the rows of a program lie in memory.
struct Row {
  int64_t kind;
  int64_t size;
  int64_t arg;  // kLiteral: offset in the blob; otherwise: index of a source among those of its file
};

// A checksum that waits for its source, in the list of those that do.
struct Slot {
  Chunk* chunk;
  size_t piece;
  Slot* next;
};

// Bytes of the training state: one storage. The caller keeps it alive and, if it is lazy, unchanged until captured.
struct Source {
  const std::byte* data;
  uint64_t size;
  uint64_t owners;       // bit set of the gates that protect it; 0: eager, to be captured before save() returns
  int device = -1;       // the ordinal of the CUDA device whose memory it is; negative: host memory
  int64_t watched = -1;  // its number in Job::window; negative: no page of it is watched

  struct Part {
    uint64_t size;
    uint32_t crc;
  };
  std::vector<Part> parts;       // its runs in consecutive chunks
  size_t parts_left = 0;         // not yet copied
  uint32_t crc = 0;              // valid once no part is left
  Turn turn = Turn::kEagerHost;  // the latest of the chunks that it is in
  Slot* waiting = nullptr;       // checksums to fill in when complete
};

// Bytes of a chunk that come from one place. There are six for each storage: kept small.
struct Piece {
  union {
    const std::byte* literal;  // kLiteral: in a blob that the caller keeps alive, as it does sources
    uint64_t source_offset;    // kSource: in the source; kCrc32*: in its written form, which chunks may cut
  };
  uint32_t size;
  uint32_t at = 0;      // offset in the chunk
  uint32_t source = 0;  // kSource, kCrc32*
  uint32_t part = 0;    // kSource: index in Source::parts
  uint32_t crc = 0;
  RowKind kind;
};

// What is copied, written and freed at once.
//
//   building -> queued -> copying -> blocked -> ready -> writing -> done
//
// copying: host memory is being copied, then copies from devices are under way (they are enqueued first), then their
// bytes are checksummed.
// blocked: some checksum in it belongs to a source that is still being copied; sources stand before their checksums in
// the order of the queue, so the wait always ends. (The queue is in the order of turns: see Turn. A chunk with the
// checksum of a source has its turn when that has, or later.)
struct Chunk : IoTag {
  enum class State { kBuilding, kQueued, kCopying, kBlocked, kReady, kWriting, kDone };

  Chunk() : IoTag(false) {}
  size_t file = 0;
  uint64_t offset = 0;  // in the file; a multiple of kBlockBytes
  size_t size = 0;      // bytes used
  size_t limit = 0;     // bytes it may grow to
  std::vector<Piece> pieces;
  std::vector<std::byte> edges;  // of watched pieces: what lies in no page of their own, as it was at save()
  uint64_t owners = 0;
  bool eager = false;
  bool has_lazy = false;
  Turn turn = Turn::kEagerHost;
  uint64_t devices = 0;    // those that hold some of its bytes, by ordinal
  size_t copies_left = 0;  // devices that are still copying

  Lane lane() const { return eager ? Lane::kEager : Lane::kLazy; }

  State state = State::kBuilding;
  std::byte* memory = nullptr;  // its region of the ring, from copying to done
  std::byte* bounce = nullptr;  // pinned, while copying: what comes from devices lands there, where the ring is not
  size_t blockers = 0;
  std::vector<Slot> slots;  // those of its checksums that wait; has room for all of them
  size_t written = 0;
  unsigned retries = 0;
  uint32_t crc = 0;        // set when it is first submitted
  double ring_wait_s = 0;  // before its copy, when all before it were under way
  Clock::time_point copy_begin, copy_end, write_begin, write_end;
};

struct File : IoTag {
  File() : IoTag(true) {}
  std::string path;
  int fd = -1;
  bool direct = false;
  bool pooled = false;  // IoRequest::pooled
  uint64_t size = 0;
  size_t chunks_left = 0;  // not yet written
  bool sync_begun = false;
  bool synced = false;
};

struct Job : std::enable_shared_from_this<Job> {
  std::vector<Source> sources;
  std::deque<File> files;  // deques: what points into them stays valid
  std::vector<std::unique_ptr<Chunk>> chunks;
  Chunk* open = nullptr;  // the chunk that Append is filling
  bool sealed = false;
  bool held = false;             // copy threads leave it alone, until Go
  bool eager_by_caller = false;  // copy threads leave the last eager chunk to WaitEager
  Status error;                  // the first one
  PageWindow window;             // the pages of lazy sources, where they are watched
  std::vector<size_t> torn;      // sources that were written before they were copied; known when they are released

  // Chunks whose copy has not begun. Once it has, host memory is copied and copies from devices are enqueued: what
  // follows in a stream of the device can wait for them there.
  size_t eager_left = 0;                                        // with eager bytes
  std::vector<size_t> owner_waiting = std::vector<size_t>(64);  // with lazy bytes, per owner bit
  size_t capture_left = 0;                                      // chunks not yet captured
  std::vector<size_t> owner_left = std::vector<size_t>(64);     // with lazy bytes, per owner bit
  size_t copying = 0;                                           // chunks being copied now: source memory is being read
  std::vector<StreamRef> streams;  // of the caller of Begin: those of the devices that hold sources
  uint64_t eager_devices = 0;      // those with eager bytes, as long as no stream was told to wait for these
  size_t writes_in_flight = 0;     // writes and syncs the kernel has not answered yet

  // Seconds; see metrics.py for what each means.
  Clock::time_point begin = Clock::now();
  Clock::time_point captured_at, written, synced;
  Clock::time_point ring_wait_begin;
  bool ring_waiting = false;
  bool ring_was_full = false;
  double copy_s = 0, ring_wait_s = 0;

  bool durable() const {
    if (!sealed) return false;
    for (const File& f : files)
      if (!f.synced) return false;
    return true;
  }
  // What these owners protect is copied; or, of host memory copied, and on its way from devices. Of a checkpoint that
  // has failed: nothing is under way.
  bool captured(uint64_t owners) const { return error.ok() ? none(owner_left, owners) : copying == 0; }
  bool enqueued(uint64_t owners) const { return error.ok() ? none(owner_waiting, owners) : copying == 0; }
  // Nobody reads the sources any more.
  bool sources_released() const { return error.ok() ? sealed && capture_left == 0 : copying == 0; }
  // Neither the engine, a device nor the kernel touches anything of this job any more.
  bool settled() const { return durable() || (!error.ok() && copying == 0 && writes_in_flight == 0); }

 private:
  static bool none(const std::vector<size_t>& chunks, uint64_t owners) {
    for (; owners != 0; owners &= owners - 1)
      if (chunks[static_cast<size_t>(std::countr_zero(owners))] > 0) return false;
    return true;
  }
};

}  // namespace lazyckpt
