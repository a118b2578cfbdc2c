// The engine's only way to files, so that tests can inject disk failures.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "status.h"

namespace lazyckpt {

inline constexpr size_t kBlockBytes = 4096;  // O_DIRECT: offsets, lengths and addresses are multiples of this

inline constexpr unsigned kMaxRetries = 1000;  // of requests for the same bytes that moved none

inline constexpr size_t AlignUp(size_t n, size_t to) { return (n + to - 1) / to * to; }

struct IoRequest {
  enum class Op { kRead, kWrite, kSync };  // kSync is fdatasync
  Op op;
  int fd;
  std::byte* data;  // must stay valid until the result is reaped
  size_t size;      // bytes
  uint64_t offset;
  void* tag;            // returned with the result
  bool pooled = false;  // a backend that also has a thread pool uses it
};

struct IoResult {
  void* tag;
  int64_t result;  // bytes moved (possibly fewer than requested), or -errno
};

// One thread calls Submit and Wait; any thread may call the other functions. Results come in any order.
class IoBackend {
 public:
  virtual ~IoBackend() = default;

  virtual const char* name() const = 0;

  // Queues one request and returns at once. The caller keeps at most `depth` requests in flight.
  virtual Status Submit(const IoRequest& request) = 0;

  // Blocks until a result or a Wake, then appends the results that there are. Allocates nothing if `results` has room
  // for `depth` of them.
  virtual void Wait(std::vector<IoResult>* results) = 0;

  virtual void Wake() = 0;

  // Makes the thread pool; must precede the first pooled request.
  virtual Status PreparePool() { return Status::Ok(); }

  // Pins buffers once instead of at every request, in place of the buffers before. A failure only costs speed. Called
  // by the thread that submits.
  virtual Status RegisterBuffers(std::span<const std::span<std::byte>>) { return Status::Ok(); }

  // Creates a file that must not exist. Tries O_DIRECT if asked; *direct says whether it works.
  virtual Status Create(const std::string& path, bool want_direct, int* fd, bool* direct);

  // Opens a file that exists. Otherwise as Create.
  virtual Status OpenToWrite(const std::string& path, bool want_direct, int* fd, bool* direct);

  // Reserves disk space, so that a full disk shows before the first write. Succeeds where this is unsupported.
  virtual Status Allocate(int fd, uint64_t size, const std::string& path);

  virtual Status Truncate(int fd, uint64_t size, const std::string& path);
};

// "io_uring", "posix", or "auto": io_uring with a thread pool for pooled requests, or posix where io_uring is refused.
// Returns nullptr with *status if it cannot be made. With "auto", *status says why io_uring is not used. `fault`: test
// build only; see MakeFaultBackend.
std::unique_ptr<IoBackend> MakeBackend(const std::string& kind, unsigned depth, const std::string& fault,
                                       Status* status);

// io_uring; nullptr and *status if the kernel or the container refuses it.
std::unique_ptr<IoBackend> MakeUringBackend(unsigned depth, Status* status);

// `depth` threads, or as many as the machine grants, with pread, pwrite and fdatasync. Works everywhere.
std::unique_ptr<IoBackend> MakePosixBackend(unsigned depth, Status* status);

// `uring`, and a posix backend for pooled requests.
std::unique_ptr<IoBackend> MakePooledBackend(std::unique_ptr<IoBackend> uring, unsigned depth);

// Whether a folder is on FUSE, virtiofs included. io_uring cannot be trusted with direct writes there: where the server
// answers a write short, Linux 6.18 continues with bytes from the wrong place in memory and reports success.
bool IsOnFuse(const std::string& folder);

#ifdef LAZYCKPT_FAULTS
// Wraps a backend and fails the n-th operation of a kind. `spec`, joined by commas:
//   "write:3:ENOSPC"     fails with an errno; the kinds are read, write, sync, create, allocate and truncate
//   "write:2:short"      moves only a part
//   "write:3:stall"      waits 50 ms first; may be combined with another effect
//   "sync:2:kill"        sends SIGKILL to the process instead
//   "sync:2:lost"        does nothing and reports success
//   "trace:PATH"         appends a line to a file when an operation begins and when it is answered
// Returns nullptr if the spec makes no sense.
std::unique_ptr<IoBackend> MakeFaultBackend(std::unique_ptr<IoBackend> inner, const std::string& spec);
#endif

}  // namespace lazyckpt
