// The only way to the operating system's files: everything above is testable without a failing disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "status.h"

namespace lazyckpt {

struct IoRequest {
  enum class Op { kRead, kWrite, kSync };  // kSync is fdatasync
  Op op;
  int fd;
  std::byte* data;  // must stay valid until the result is reaped
  size_t size;
  uint64_t offset;
  void* tag;            // handed back with the result
  bool pooled = false;  // a backend that has a thread pool besides uses that
};

struct IoResult {
  void* tag;
  int64_t result;  // bytes moved (may be fewer than asked), or -errno
};

// Submit and Wait belong to one thread; Wake may be called from any.
class IoBackend {
 public:
  virtual ~IoBackend() = default;

  virtual const char* name() const = 0;

  // Queues one request and returns at once. The caller keeps at most `depth` requests in flight.
  virtual Status Submit(const IoRequest& request) = 0;

  // Appends at least one result, or none if Wake was called. Blocks until either. Needs no memory if there is room for
  // `depth` of them.
  virtual void Wait(std::vector<IoResult>* results) = 0;

  virtual void Wake() = 0;

  // Makes room for pooled requests, before the first of them. Any thread may call.
  virtual Status PreparePool() { return Status::Ok(); }

  // Pins buffers once instead of at every request. Optional: failure costs speed, nothing else.
  virtual Status RegisterBuffers(std::span<const std::span<std::byte>>) { return Status::Ok(); }

  // Creates a file that must not exist. Tries O_DIRECT if asked; *direct tells what it got.
  virtual Status Create(const std::string& path, bool want_direct, int* fd, bool* direct);

  // Reserves disk space, so that a full disk shows before the first write. Unsupported is not an error.
  virtual Status Allocate(int fd, uint64_t size, const std::string& path);

  virtual Status Truncate(int fd, uint64_t size, const std::string& path);
};

// io_uring; *status tells why there is none (a kernel or a container that refuses it).
std::unique_ptr<IoBackend> MakeUringBackend(unsigned depth, Status* status);

// `depth` threads with pread, pwrite and fdatasync, or as many as the machine grants: works everywhere.
std::unique_ptr<IoBackend> MakePosixBackend(unsigned depth, Status* status);

// Whether a folder is on FUSE, virtiofs included. Its direct writes cannot be trusted with io_uring: where the server
// answers a write short, Linux 6.18 continues with bytes from the wrong place in memory, and reports success.
bool IsOnFuse(const std::string& folder);

// "io_uring", "posix", or "auto": io_uring where it is allowed, with a thread pool for pooled requests, otherwise
// posix, and *status tells why. nullptr, and *status, if there is no such backend.
std::unique_ptr<IoBackend> MakeBackend(const std::string& kind, unsigned depth, Status* status);

#ifdef LAZYCKPT_FAULTS
// Wraps a backend and fails the n-th operation of a kind. Spec: "write:3:ENOSPC", "sync:1:EIO", "write:2:short",
// "read:1:EIO", "create:1:EACCES", "allocate:1:ENOSPC", "truncate:1:EIO", "write:3:stall" (waits 50 ms first, and then
// does what else is said of it), "sync:2:kill" (SIGKILL comes instead), "sync:2:lost" (nothing is done, and success
// reported); several joined by commas. "trace:PATH" appends a line to a file when an operation begins and when it was
// answered. nullptr if the spec makes no sense.
std::unique_ptr<IoBackend> MakeFaultBackend(std::unique_ptr<IoBackend> inner, const std::string& spec);
#endif

}  // namespace lazyckpt
