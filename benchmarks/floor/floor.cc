// The floor arm: the barest copy + CRC + O_DIRECT pipeline. It plans nothing, knows no container and commits nothing;
// the bytes of all sources are laid end to end into one file. Whatever lazyckpt costs above it is lazyckpt's own.
//
// Threads: `floor_save` and `floor_wait` are called by the training thread; copy threads take chunks in order; one
// writer thread owns the io_uring and makes one checkpoint after the other durable. One mutex guards all bookkeeping,
// which is touched twice per 16 MiB chunk. Sources must stay alive and unchanged until `floor_wait` has returned.

#include <fcntl.h>
#include <libdeflate.h>
#include <liburing.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr size_t kAlign = 4096;  // O_DIRECT

size_t RoundUp(size_t n) { return (n + kAlign - 1) / kAlign * kAlign; }

struct Source {
  const char* data;
  size_t begin;  // offset in the file
};

struct Job {
  std::string path;
  std::vector<Source> sources;
  size_t bytes = 0;
  uint64_t first = 0, end = 0;  // global chunk numbers [first, end)
  size_t copied = 0;            // chunks
  std::vector<bool> ready;      // per chunk: copied, not yet submitted
};

// Ring slot of global chunk n is n % slots. `turn[slot]` is the one chunk that may be copied into it: the slot of
// chunk n passes to chunk n + slots when the write of n has completed.
struct Floor {
  size_t chunk, slots;
  size_t piece;  // copied, then checksummed while still in the cache
  unsigned depth;
  char* ring;
  std::vector<uint64_t> turn;
  std::vector<uint32_t> crc;  // of the chunk last copied into each slot
  io_uring uring;

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Job>> jobs;  // oldest first; the writer pops them when durable
  uint64_t next_chunk = 0;                // next to be copied
  uint64_t end_chunk = 0;                 // of the newest job
  int error = 0;                          // first errno
  bool closing = false;
  std::vector<std::thread> threads;
};

uint32_t CopyRange(const Job& job, size_t begin, size_t end, char* to, size_t piece) {
  uint32_t crc = 0;
  auto after = std::upper_bound(job.sources.begin(), job.sources.end(), begin,
                                [](size_t offset, const Source& s) { return offset < s.begin; });
  for (auto s = after - 1; begin < end; ++s) {
    const size_t stop = std::min(end, s + 1 == job.sources.end() ? job.bytes : (s + 1)->begin);
    for (size_t n; begin < stop; begin += n, to += n) {
      n = std::min(piece, stop - begin);
      memcpy(to, s->data + (begin - s->begin), n);
      crc = libdeflate_crc32(crc, to, n);
    }
  }
  return crc;
}

// Copies the next chunk, once its slot is free; returns false if every chunk below `limit` is already taken.
bool CopyOne(Floor& f, std::unique_lock<std::mutex>& lock, uint64_t limit) {
  if (f.next_chunk >= limit) return false;
  const uint64_t n = f.next_chunk++;
  const size_t slot = n % f.slots;
  f.changed.wait(lock, [&] { return f.turn[slot] == n; });
  auto job = *std::find_if(f.jobs.begin(), f.jobs.end(), [&](auto& j) { return n < j->end; });
  lock.unlock();
  const size_t begin = (n - job->first) * f.chunk;
  char* const to = f.ring + slot * f.chunk;
  const uint32_t crc = CopyRange(*job, begin, std::min(job->bytes, begin + f.chunk), to, f.piece);
  lock.lock();
  f.crc[slot] = crc;
  job->ready[n - job->first] = true;
  job->copied++;
  f.changed.notify_all();
  return true;
}

void CopyLoop(Floor& f) {
  std::unique_lock lock(f.mutex);
  while (true) {
    f.changed.wait(lock, [&] { return f.closing || f.next_chunk < f.end_chunk; });
    if (!CopyOne(f, lock, f.end_chunk) && f.closing) return;
  }
}

// Writes [0, bytes) through the ring with at most `depth` writes in flight. `next(i)` blocks until chunk i may be
// submitted and returns its memory; with `may_wait` false it returns nullptr instead. `done(i)` recycles it.
template <typename Next, typename Done>
int Transfer(Floor& f, bool write, int fd, size_t bytes, Next next, Done done) {
  const size_t total = RoundUp(bytes);
  size_t submitted = 0, completed = 0;
  const size_t chunks = (total + f.chunk - 1) / f.chunk;
  int error = 0;
  while (completed < chunks) {
    while (submitted < chunks && submitted - completed < f.depth) {
      char* memory = next(submitted, submitted == completed);
      if (!memory) break;
      const size_t offset = submitted * f.chunk, n = std::min(f.chunk, total - offset);
      io_uring_sqe* sqe = io_uring_get_sqe(&f.uring);
      if (write) {
        io_uring_prep_write(sqe, fd, memory, n, offset);
      } else {
        io_uring_prep_read(sqe, fd, memory, n, offset);
      }
      io_uring_sqe_set_data64(sqe, submitted++);
      io_uring_submit(&f.uring);
    }
    io_uring_cqe* cqe;
    if (io_uring_wait_cqe(&f.uring, &cqe) < 0) continue;  // EINTR
    const size_t i = cqe->user_data, want = std::min(f.chunk, total - i * f.chunk);
    if (cqe->res < 0)
      error = error ? error : -cqe->res;
    else if (write && size_t(cqe->res) != want)
      error = error ? error : EIO;  // a floor may refuse short writes
    io_uring_cqe_seen(&f.uring, cqe);
    ++completed;
    done(i);
  }
  return error;
}

int WriteFile(Floor& f, const char* path, size_t bytes, auto next, auto done) {
  const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_DIRECT | O_CLOEXEC, 0644);
  int error = fd < 0 ? errno : 0;
  if (!error) error = posix_fallocate(fd, 0, RoundUp(bytes));
  // On failure, keep taking and recycling the chunks, so that no thread waits for them.
  const int transfer = Transfer(f, true, fd, bytes, next, done);
  if (!error) error = transfer;
  if (!error && fdatasync(fd)) error = errno;
  if (fd >= 0) close(fd);
  return error;
}

void WriteLoop(Floor& f) {
  std::unique_lock lock(f.mutex);
  while (true) {
    f.changed.wait(lock, [&] { return f.closing || !f.jobs.empty(); });
    if (f.jobs.empty()) return;
    auto job = f.jobs.front();
    lock.unlock();
    auto next = [&](size_t i, bool may_wait) -> char* {
      std::unique_lock inner(f.mutex);
      if (!may_wait && !job->ready[i]) return nullptr;
      f.changed.wait(inner, [&] { return bool(job->ready[i]); });
      return f.ring + (job->first + i) % f.slots * f.chunk;
    };
    auto done = [&](size_t i) {
      std::lock_guard inner(f.mutex);
      f.turn[(job->first + i) % f.slots] += f.slots;
      f.changed.notify_all();
    };
    const int error = WriteFile(f, job->path.c_str(), job->bytes, next, done);
    lock.lock();
    if (!f.error) f.error = error;
    f.jobs.pop_front();
    f.changed.notify_all();
  }
}

}  // namespace

extern "C" {

Floor* floor_open(size_t ring_bytes, size_t chunk_bytes, unsigned depth, unsigned copy_threads, size_t piece_bytes) {
  auto f = std::make_unique<Floor>();
  f->chunk = chunk_bytes;
  f->slots = std::max<size_t>(1, ring_bytes / chunk_bytes);
  f->depth = depth;
  f->piece = piece_bytes;
  const size_t bytes = f->slots * chunk_bytes;
  void* ring = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (ring == MAP_FAILED) return nullptr;
  f->ring = static_cast<char*>(ring);
  madvise(ring, bytes, MADV_HUGEPAGE);
  madvise(ring, bytes, MADV_DONTFORK);
  memset(ring, 0, bytes);
  if (const int rc = io_uring_queue_init(2 * depth, &f->uring, 0); rc < 0) {
    errno = -rc;
    return nullptr;
  }
  for (size_t i = 0; i < f->slots; ++i) f->turn.push_back(i);
  f->crc.resize(f->slots);
  for (unsigned i = 0; i < copy_threads; ++i) f->threads.emplace_back([p = f.get()] { CopyLoop(*p); });
  f->threads.emplace_back([p = f.get()] { WriteLoop(*p); });
  return f.release();
}

void floor_save(Floor* f, const char* path, size_t count, const void* const* data, const size_t* sizes) {
  auto job = std::make_shared<Job>();
  job->path = path;
  for (size_t i = 0; i < count; ++i) {
    if (sizes[i]) job->sources.push_back({static_cast<const char*>(data[i]), job->bytes});
    job->bytes += sizes[i];
  }
  const size_t chunks = (job->bytes + f->chunk - 1) / f->chunk;
  job->ready.resize(chunks);
  std::lock_guard lock(f->mutex);
  job->first = f->end_chunk;
  job->end = f->end_chunk += chunks;
  f->jobs.push_back(job);
  f->changed.notify_all();
}

// The gate: helps to copy until every chunk of every checkpoint has been copied.
void floor_wait(Floor* f) {
  std::unique_lock lock(f->mutex);
  while (CopyOne(*f, lock, f->end_chunk)) {
  }
  f->changed.wait(lock, [&] {
    return std::all_of(f->jobs.begin(), f->jobs.end(), [](auto& j) { return j->copied == j->ready.size(); });
  });
}

// Waits until at most `pending` checkpoints are not yet durable. Returns the first errno since the last call, or 0.
int floor_drain(Floor* f, size_t pending) {
  std::unique_lock lock(f->mutex);
  f->changed.wait(lock, [&] { return f->jobs.size() <= pending; });
  return std::exchange(f->error, 0);
}

// The disk's ceiling: the same transfer from the ring as it lies, without copy or CRC, open to fdatasync. Only while
// nothing is in flight. Returns seconds, or -errno.
double floor_raw(Floor* f, const char* path, size_t bytes, int write) {
  const auto start = std::chrono::steady_clock::now();
  auto next = [&](size_t i, bool) { return f->ring + i % f->slots * f->chunk; };
  auto done = [](size_t) {};
  int error = 0;
  if (write) {
    error = WriteFile(*f, path, bytes, next, done);
  } else {
    const int fd = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
    error = fd < 0 ? errno : Transfer(*f, false, fd, bytes, next, done);
    if (fd >= 0) close(fd);
  }
  return error ? -double(error) : std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void floor_close(Floor* f) {
  {
    std::lock_guard lock(f->mutex);
    f->closing = true;
    f->changed.notify_all();
  }
  for (auto& t : f->threads) t.join();
  io_uring_queue_exit(&f->uring);
  munmap(f->ring, f->slots * f->chunk);
  delete f;
}

}  // extern "C"
