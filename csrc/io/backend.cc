#include "io/backend.h"

#include <fcntl.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace lazyckpt {

bool IsOnFuse(const std::string& folder) {
  constexpr auto kFuseSuperMagic = 0x65735546;
  struct statfs info{};
  return statfs(folder.c_str(), &info) == 0 && info.f_type == kFuseSuperMagic;
}

Status IoBackend::Create(const std::string& path, bool want_direct, int* fd, bool* direct) {
  constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;  // O_EXCL: follows no link
  *direct = want_direct;
  *fd = open(path.c_str(), kFlags | (want_direct ? O_DIRECT : 0), 0666);  // the umask decides
  if (*fd < 0 && errno == EINVAL && want_direct) {
    // No O_DIRECT here (tmpfs, some network file systems). Some kernels create the file and then fail.
    unlink(path.c_str());
    *direct = false;
    *fd = open(path.c_str(), kFlags, 0666);
  }
  return *fd < 0 ? Status(errno, "open", path) : Status::Ok();
}

Status IoBackend::OpenToWrite(const std::string& path, bool want_direct, int* fd, bool* direct) {
  constexpr int kFlags = O_WRONLY | O_CLOEXEC | O_NOFOLLOW;
  *direct = want_direct;
  *fd = open(path.c_str(), kFlags | (want_direct ? O_DIRECT : 0));
  if (*fd < 0 && errno == EINVAL && want_direct) {
    *direct = false;
    *fd = open(path.c_str(), kFlags);
  }
  return *fd < 0 ? Status(errno, "open", path) : Status::Ok();
}

Status IoBackend::Allocate(int fd, uint64_t size, const std::string& path) {
  if (size == 0) return Status::Ok();
  int r;
  while ((r = fallocate(fd, 0, 0, static_cast<off_t>(size))) != 0 && errno == EINTR) {
  }
  if (r == 0 || errno == EOPNOTSUPP || errno == ENOSYS) return Status::Ok();
  return Status(errno, "fallocate", path);
}

Status IoBackend::Truncate(int fd, uint64_t size, const std::string& path) {
  int r;
  while ((r = ftruncate(fd, static_cast<off_t>(size))) != 0 && errno == EINTR) {
  }
  return r == 0 ? Status::Ok() : Status(errno, "ftruncate", path);
}

std::unique_ptr<IoBackend> MakeBackend(const std::string& kind, unsigned depth, const std::string& fault,
                                       Status* status) {
  *status = Status::Ok();
  std::unique_ptr<IoBackend> backend;
  if (kind == "posix") {
    backend = MakePosixBackend(depth, status);
  } else if (kind == "io_uring" || kind == "auto") {
    backend = MakeUringBackend(depth, status);
    if (kind == "auto" && backend != nullptr) backend = MakePooledBackend(std::move(backend), depth);
  } else {
    *status = Status(EINVAL, "I/O backend \"" + kind + "\"", "");
  }
  if (kind == "auto" && backend == nullptr) {
    Status posix;
    backend = MakePosixBackend(depth, &posix);
    if (backend == nullptr) *status = posix;
  }
  if (backend == nullptr || fault.empty()) return backend;
#ifdef LAZYCKPT_FAULTS
  if (auto faulty = MakeFaultBackend(std::move(backend), fault)) return faulty;
#endif
  *status = Status(EINVAL, "fault specification", "");
  return nullptr;
}

}  // namespace lazyckpt
