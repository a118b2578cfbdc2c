#include <cerrno>

#include "io/backend.h"

#ifdef LAZYCKPT_HAVE_LIBURING

#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace lazyckpt {
namespace {

// io_uring takes 32-bit lengths; a longer request comes back short, and the caller submits the rest.
constexpr size_t kMaxRequestBytes = size_t{1} << 30;

class UringBackend final : public IoBackend {
 public:
  ~UringBackend() override {
    if (ring_ready_) io_uring_queue_exit(&ring_);
    if (wake_fd_ >= 0) close(wake_fd_);
  }

  Status Init(unsigned depth) {
    // Two more entries than requests: one for the wake-up poll, one so that the queue is never full.
    if (const int r = io_uring_queue_init(depth + 2, &ring_, 0); r < 0) return Status(-r, "io_uring_setup", "");
    ring_ready_ = true;
    // Linux 5.6 brought this feature together with the reads and writes used below.
    if ((ring_.features & IORING_FEAT_RW_CUR_POS) == 0) return Status(ENOSYS, "io_uring before Linux 5.6", "");
    wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_fd_ < 0) return Status(errno, "eventfd", "");
    return ArmWake();
  }

  const char* name() const override { return "io_uring"; }

  Status Submit(const IoRequest& request) override {
    io_uring_sqe* sqe = nullptr;
    if (Status s = NextEntry(&sqe); !s.ok()) return s;
    const auto length = static_cast<unsigned>(std::min(request.size, kMaxRequestBytes));
    const int buffer = BufferIndex(request.data, length);
    switch (request.op) {
      case IoRequest::Op::kRead:
        io_uring_prep_read(sqe, request.fd, request.data, length, request.offset);
        break;
      case IoRequest::Op::kWrite:
        if (buffer >= 0)
          io_uring_prep_write_fixed(sqe, request.fd, request.data, length, request.offset, buffer);
        else
          io_uring_prep_write(sqe, request.fd, request.data, length, request.offset);
        break;
      case IoRequest::Op::kSync:
        io_uring_prep_fsync(sqe, request.fd, IORING_FSYNC_DATASYNC);
        break;
    }
    io_uring_sqe_set_data(sqe, request.tag);
    Status status = Flush();
    if (!status.ok()) {
      // The entry stays in the queue. A later submission would run it on memory that is then reused.
      io_uring_prep_nop(sqe);
      io_uring_sqe_set_data(sqe, nullptr);
    }
    return status;
  }

  void Wait(std::vector<IoResult>* results) override {
    io_uring_cqe* cqe = nullptr;
    int r = 0;
    if (!ArmWake().ok() || ((r = io_uring_wait_cqe(&ring_, &cqe)) < 0 && r != -EINTR))
      usleep(1000);  // Wake cannot reach this thread, so poll
    unsigned head;
    unsigned seen = 0;
    bool woken = false;
    io_uring_for_each_cqe(&ring_, head, cqe) {
      ++seen;
      void* tag = io_uring_cqe_get_data(cqe);
      if (tag == this)
        woken = true;
      else if (tag != nullptr)
        results->push_back({tag, cqe->res});
    }
    io_uring_cq_advance(&ring_, seen);
    if (!woken) return;
    wake_ = Poll::kNone;
    uint64_t count;
    (void)!read(wake_fd_, &count, sizeof count);
  }

  void Wake() override {
    const uint64_t one = 1;
    (void)!write(wake_fd_, &one, sizeof one);
  }

  Status RegisterBuffers(std::span<const std::span<std::byte>> buffers) override {
    if (!buffers_.empty()) io_uring_unregister_buffers(&ring_);
    buffers_.clear();
    std::vector<std::span<std::byte>> kept(buffers.begin(), buffers.end());
    std::vector<iovec> vectors;
    for (const auto& b : buffers) vectors.push_back({b.data(), b.size()});
    const int r = io_uring_register_buffers(&ring_, vectors.data(), static_cast<unsigned>(vectors.size()));
    if (r < 0) return Status(-r, "io_uring_register_buffers", "");
    buffers_ = std::move(kept);
    return Status::Ok();
  }

 private:
  // A poll, not a read, so that the kernel never writes into this object after its end.
  Status ArmWake() {
    if (wake_ == Poll::kArmed) return Status::Ok();
    if (wake_ == Poll::kNone) {
      io_uring_sqe* sqe = nullptr;
      if (Status s = NextEntry(&sqe); !s.ok()) return s;
      io_uring_prep_poll_add(sqe, wake_fd_, POLLIN);
      io_uring_sqe_set_data(sqe, this);
      wake_ = Poll::kQueued;
    }
    Status status = Flush();
    if (status.ok()) wake_ = Poll::kArmed;
    return status;
  }

  // The queue is full only if the kernel has not taken its entries.
  Status NextEntry(io_uring_sqe** sqe) {
    if ((*sqe = io_uring_get_sqe(&ring_)) != nullptr) return Status::Ok();
    if (Status s = Flush(); !s.ok()) return s;
    *sqe = io_uring_get_sqe(&ring_);
    return *sqe != nullptr ? Status::Ok() : Status(EBUSY, "io_uring submission queue", "");
  }

  Status Flush() {
    int r;
    // EAGAIN: the kernel is short of memory for a moment.
    while ((r = io_uring_submit(&ring_)) == -EINTR || r == -EAGAIN) usleep(r == -EAGAIN ? 100 : 0);
    return r < 0 ? Status(-r, "io_uring_submit", "") : Status::Ok();
  }

  int BufferIndex(const std::byte* data, size_t size) const {
    for (size_t i = 0; i < buffers_.size(); ++i)
      if (data >= buffers_[i].data() && data + size <= buffers_[i].data() + buffers_[i].size())
        return static_cast<int>(i);
    return -1;
  }

  io_uring ring_{};
  bool ring_ready_ = false;
  int wake_fd_ = -1;
  enum class Poll { kNone, kQueued, kArmed } wake_ = Poll::kNone;
  std::vector<std::span<std::byte>> buffers_;
};

}  // namespace

std::unique_ptr<IoBackend> MakeUringBackend(unsigned depth, Status* status) {
  auto backend = std::make_unique<UringBackend>();
  *status = backend->Init(depth);
  if (!status->ok()) return nullptr;
  return backend;
}

}  // namespace lazyckpt

#else

namespace lazyckpt {

std::unique_ptr<IoBackend> MakeUringBackend(unsigned, Status* status) {
  *status = Status(ENOSYS, "built without liburing", "");
  return nullptr;
}

}  // namespace lazyckpt

#endif
