// The nouns of the engine: a Job is one checkpoint, from the training state to its files.
//
// Data only. layout.cc cuts a job into chunks; capture.cc and writer.cc move them. The engine's mutex guards a job; the
// bytes of a chunk belong to the one thread, device or kernel that is moving it.
#pragma once

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "device/device.h"
#include "status.h"
#include "witness/page_witness.h"

namespace lazyckpt {

using Clock = std::chrono::steady_clock;

struct Chunk;
struct Job;

// The link of a Queue, and the tag of an I/O request: a chunk to write or a file to sync.
struct IoTag {
  explicit IoTag(bool sync) : is_sync(sync) {}
  const bool is_sync;
  Job* job = nullptr;
  IoTag* next = nullptr;  // in the queue that holds it
};

// An item is in at most one queue at a time. Queuing allocates nothing, so a job can always be failed and drained.
// Not thread-safe: the engine's mutex guards every queue.
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

  // Inserts `item` before the first one for which `later` holds.
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

  // Removes and returns the first item for which `wanted` holds; nullptr if there is none.
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
  IoTag** end_ = &first_;  // where the next item is linked
};

// The numbers of the bits set in a mask: for (const int n : Bits{mask}).
struct Bits {
  uint64_t mask;

  struct Iterator {
    uint64_t left;
    int operator*() const { return std::countr_zero(left); }
    Iterator& operator++() { return left &= left - 1, *this; }
    bool operator!=(const Iterator& other) const { return left != other.left; }
  };
  Iterator begin() const { return {mask}; }
  Iterator end() const { return {0}; }
};

// The copy order of a job's chunks. save() waits until eager host bytes are copied, but only until eager copies from
// devices are enqueued; with host bytes first, a device that still computes does not delay them.
enum class Turn { kEagerHost, kEagerDevice, kLazy };

inline constexpr size_t kMaxDevices = 64;  // in one process: the bits of Chunk::devices

// A stream of the caller on a device.
struct StreamRef {
  int device;
  uint64_t handle;
};

// The kinds of a program's rows (lazyckpt/formats/program.py has the same numbers).
enum class RowKind : uint8_t { kLiteral = 0, kSource = 1, kCrc32Le = 2, kCrc32Hex = 3, kCrc32Segments = 4 };

inline constexpr uint64_t kSegmentBytes = 1 << 20;  // of a source: each has a checksum in a kCrc32Segments row

// The memory layout of one row of a program.
struct Row {
  int64_t kind;
  int64_t size;
  int64_t arg;  // kLiteral: offset in the blob; otherwise: index among the sources of its file
};

// A checksum that waits for its source, in a list.
struct Slot {
  Chunk* chunk;
  size_t piece;
  Slot* next;
};

// One storage of the training state. The caller keeps it alive and, if it is lazy, unchanged until it is captured.
struct Source {
  const std::byte* data;
  uint64_t size;
  uint64_t owners;         // which owners wait for it in WaitCaptured, as bits; 0: eager, copied before save() returns
  int device = -1;         // the ordinal of the CUDA device that holds it; negative: host memory
  int64_t watched = -1;    // its number in its window; negative: the witness watches none of its pages
  uint32_t window = 0;     // in Job::windows
  bool segmented = false;  // the file holds the checksums of its segments

  struct Part {
    uint64_t size;
    uint32_t crc;
    size_t first_cut = 0;  // its index in Source::cuts
  };
  std::vector<Part> parts{};     // its runs in consecutive chunks
  std::vector<Part> cuts{};      // if it is segmented: the parts, cut where a segment ends
  size_t parts_left = 0;         // not yet copied
  uint32_t crc = 0;              // valid once no part is left
  Turn turn = Turn::kEagerHost;  // the latest turn of its chunks
  Slot* waiting = nullptr;       // checksums to fill in when it is complete

  // How many cuts a run of bytes has.
  size_t CutsIn(uint64_t offset, uint64_t bytes) const {
    if (!segmented || bytes == 0) return 0;
    return (offset + bytes - 1) / kSegmentBytes - offset / kSegmentBytes + 1;
  }
};

// Bytes of a chunk that come from one place. Kept small: a storage has about six pieces.
struct Piece {
  union {
    const std::byte* literal;  // kLiteral: in a blob that the caller keeps alive as long as the sources
    uint64_t source_offset;    // kSource: in the source; kCrc32*: in the checksum's written form, which chunks may cut
  };
  uint32_t size = 0;
  uint32_t at = 0;      // offset in the chunk
  uint32_t source = 0;  // kSource, kCrc32*
  uint32_t part = 0;    // kSource: index in Source::parts
  uint32_t crc = 0;
  RowKind kind = RowKind::kLiteral;

  bool is_checksum() const { return kind != RowKind::kLiteral && kind != RowKind::kSource; }
};

// The unit of copying and writing.
//
//   building -> queued -> copying -> blocked -> ready -> writing -> done
//
// copying: copies from devices are enqueued, host memory is copied, then what devices delivered is checksummed.
// blocked: the chunk holds the checksum of a source that is still being copied. A source precedes its checksums in the
// queue (the queue is ordered by Turn, and a chunk's turn is never before that of a source it holds the checksum of),
// so the wait always ends.
struct Chunk : IoTag {
  enum class State { kBuilding, kQueued, kCopying, kBlocked, kReady, kWriting, kDone };

  Chunk() : IoTag(false) {}
  size_t file = 0;
  uint64_t offset = 0;  // in the file; a multiple of kBlockBytes
  size_t size = 0;      // bytes used
  size_t limit = 0;     // bytes it may grow to
  std::vector<Piece> pieces;
  std::vector<uint32_t> cut_crcs;  // of the cuts of its pieces, in their order; until OnCopied
  std::vector<std::byte> edges;    // of watched pieces: the bytes outside their own pages, copied inside save()
  uint64_t owners = 0;
  bool eager = false;
  bool has_lazy = false;
  Turn turn = Turn::kEagerHost;
  uint64_t devices = 0;     // the devices that hold some of its bytes, as bits
  size_t pieces_there = 0;  // those on devices
  size_t calls = 0;         // of the driver, on each of its devices, at most; while they are under way
  size_t copies_left = 0;   // devices that are still copying

  Lane lane() const { return eager ? Lane::kEager : Lane::kLazy; }
  // Whether the writer checksums the chunk as a whole, because it has many small pieces. Combining two checksums takes
  // about a microsecond, in which 8 KiB can be checksummed.
  bool summed_whole() const { return pieces.size() * (8 << 10) > size; }

  State state = State::kBuilding;
  std::byte* memory = nullptr;  // its region of the ring, from copying to done
  std::byte* bounce = nullptr;  // while copying: pinned memory for bytes from devices, where the ring is not pinned
  size_t blockers = 0;
  std::vector<Slot> slots;  // its checksums that wait; has room for all of them
  size_t written = 0;
  unsigned retries = 0;
  uint32_t crc = 0;        // set when it is first submitted
  double ring_wait_s = 0;  // how long its copy waited for room in the ring
  Clock::time_point copy_begin, copy_end, write_begin, write_end;
};

struct File : IoTag {
  File() : IoTag(true) {}
  std::string path;
  int fd = -1;
  bool direct = false;
  bool pooled = false;  // IoRequest::pooled
  uint64_t size = 0;
  // The parts that this job writes, by offset, where other processes write the rest; empty: all of it.
  std::vector<std::pair<uint64_t, uint64_t>> parts;
  bool drops = false;      // its bytes are copied for their checksums, and not written
  bool exists = false;     // another process creates it and gives it its size
  int64_t shift = 0;       // from the offsets of the program to those in the file
  size_t chunks_left = 0;  // not yet written
  bool sync_begun = false;
  bool synced = false;
};

struct Job : std::enable_shared_from_this<Job> {
  std::vector<Source> sources;
  std::deque<File> files;  // a deque: pointers to its files stay valid
  std::vector<std::unique_ptr<Chunk>> chunks;
  Chunk* open = nullptr;  // the chunk that Append is filling
  bool sealed = false;
  bool held = false;               // until Go, copy threads leave the job alone
  bool eager_by_caller = false;    // copy threads leave the last eager chunk to WaitEager
  Status error;                    // the first one
  std::deque<PageWindow> windows;  // the watched pages of lazy sources; of those that share memory in several
  std::vector<size_t> torn;        // sources written to before they were copied; known once they are released

  // "Waiting" and "left" until a chunk's copy has begun: its host memory is copied then, and its device copies are
  // enqueued, so work that follows on a stream can wait for them there.
  size_t eager_left = 0;                                        // chunks with eager bytes
  std::vector<size_t> owner_waiting = std::vector<size_t>(64);  // chunks with lazy bytes, by owner
  size_t capture_left = 0;                                      // chunks not yet captured
  size_t eager_landing = 0;                                     // chunks with eager bytes of devices not yet captured
  std::vector<size_t> owner_left = std::vector<size_t>(64);     // chunks with lazy bytes not yet captured, by owner
  size_t copying = 0;                                           // chunks whose sources are being read now
  std::vector<StreamRef> streams;  // the streams given to Begin, one for each device that holds sources
  uint64_t eager_devices = 0;      // devices with eager bytes for which no stream was told to wait yet
  size_t writes_in_flight = 0;     // writes and syncs that the kernel has not answered yet

  // For metrics.py, which says what each means. Seconds.
  Clock::time_point begin = Clock::now();
  Clock::time_point captured_at, written, synced;
  Clock::time_point ring_wait_begin;
  bool ring_waiting = false;
  bool ring_was_full = false;
  double copy_s = 0, ring_wait_s = 0;
  double watch_s = 0, eager_copy_s = 0;  // on the thread that calls Begin or Capture, which sets them

  bool durable() const {
    return sealed && std::all_of(files.begin(), files.end(), [](const File& f) { return f.synced; });
  }
  // Whether eager host bytes are copied and eager device copies are enqueued. Of a failed job: as captured().
  bool eager_copied() const { return error.ok() ? eager_left == 0 : copying == 0; }
  // Whether the bytes of these owners and all eager bytes are copied. For `enqueued`, whether these owners' host bytes
  // are copied and their device copies are enqueued. Of a failed job: whether no copy is under way.
  bool captured(uint64_t owners) const {
    return error.ok() ? eager_landing == 0 && None(owner_left, owners) : copying == 0;
  }
  bool enqueued(uint64_t owners) const { return error.ok() ? None(owner_waiting, owners) : copying == 0; }
  // Whether nothing reads the sources any more.
  bool sources_released() const { return error.ok() ? sealed && capture_left == 0 : copying == 0; }
  // Whether neither the engine, a device nor the kernel touches anything of this job any more.
  bool settled() const { return durable() || (!error.ok() && copying == 0 && writes_in_flight == 0); }

  std::vector<const Chunk*> ChunksInFileOrder(size_t file) const {
    std::vector<const Chunk*> found;
    for (const auto& c : chunks)
      if (c->file == file) found.push_back(c.get());
    std::sort(found.begin(), found.end(), [](const Chunk* a, const Chunk* b) { return a->offset < b->offset; });
    return found;
  }

 private:
  static bool None(const std::vector<size_t>& chunks_of, uint64_t owners) {
    for (const int owner : Bits{owners})
      if (chunks_of[owner] > 0) return false;
    return true;
  }
};

}  // namespace lazyckpt
