// Threads that block in pread, pwrite and fdatasync.
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "io/backend.h"

namespace lazyckpt {
namespace {

class PosixBackend final : public IoBackend {
 public:
  // `waker`: if not null, each result wakes it; its thread then calls Drain.
  explicit PosixBackend(IoBackend* waker = nullptr) : waker_(waker) {}

  Status Init(unsigned depth) {
    requests_.resize(depth);
    results_.reserve(depth);
    try {
      for (unsigned i = 0; i < depth; ++i) {
        threads_.emplace_back([this] { Serve(); });
        pthread_setname_np(threads_.back().native_handle(), "lazyckpt-io");
      }
    } catch (const std::system_error& error) {
      // The machine refuses threads (a limit on processes); fewer do.
      if (threads_.empty()) return Status(error.code().value(), "start of an I/O thread", "");
    }
    return Status::Ok();
  }

  ~PosixBackend() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    work_.notify_all();
    for (auto& t : threads_) t.join();
  }

  const char* name() const override { return "posix"; }

  Status Submit(const IoRequest& request) override {
    {
      std::lock_guard lock(mutex_);
      requests_[(first_ + waiting_++) % requests_.size()] = request;
    }
    work_.notify_one();
    return Status::Ok();
  }

  void Wait(std::vector<IoResult>* results) override {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return woken_ || !results_.empty(); });
    woken_ = false;
    TakeResults(results);
  }

  // Wait, without blocking.
  void Drain(std::vector<IoResult>* results) {
    std::lock_guard lock(mutex_);
    TakeResults(results);
  }

  void Wake() override {
    {
      std::lock_guard lock(mutex_);
      woken_ = true;
    }
    done_.notify_one();
  }

 private:
  void TakeResults(std::vector<IoResult>* results) {
    results->insert(results->end(), results_.begin(), results_.end());
    results_.clear();
  }

  static int64_t Perform(const IoRequest& r) {
    int64_t n = 0;
    do {
      switch (r.op) {
        case IoRequest::Op::kRead:
          n = pread(r.fd, r.data, r.size, static_cast<off_t>(r.offset));
          break;
        case IoRequest::Op::kWrite:
          n = pwrite(r.fd, r.data, r.size, static_cast<off_t>(r.offset));
          break;
        case IoRequest::Op::kSync:
          n = fdatasync(r.fd);
          break;
      }
    } while (n < 0 && errno == EINTR && r.op != IoRequest::Op::kSync);  // a failed sync is never retried
    return n < 0 ? -errno : n;
  }

  void Serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      work_.wait(lock, [this] { return stop_ || waiting_ > 0; });
      if (waiting_ == 0) return;
      const IoRequest request = requests_[first_];
      first_ = (first_ + 1) % requests_.size();
      --waiting_;
      lock.unlock();
      const int64_t n = Perform(request);
      lock.lock();
      results_.push_back({request.tag, n});
      done_.notify_one();
      if (waker_ != nullptr) waker_->Wake();
    }
  }

  IoBackend* const waker_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable done_;
  std::vector<IoRequest> requests_;  // a ring, as long as there may be requests in flight
  size_t first_ = 0, waiting_ = 0;   // the requests in it that no thread has taken
  std::vector<IoResult> results_;    // has room for as many as requests_
  bool woken_ = false;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

// io_uring, and a thread pool for pooled requests, made by the first PreparePool.
class PooledBackend final : public IoBackend {
 public:
  PooledBackend(std::unique_ptr<IoBackend> uring, unsigned depth) : uring_(std::move(uring)), depth_(depth) {}

  const char* name() const override { return uring_->name(); }

  Status Submit(const IoRequest& request) override {
    return request.pooled ? pool_.load()->Submit(request) : uring_->Submit(request);
  }

  void Wait(std::vector<IoResult>* results) override {
    Drain(results);
    if (!results->empty()) return;
    uring_->Wait(results);
    Drain(results);
  }

  void Wake() override { uring_->Wake(); }

  Status PreparePool() override {
    std::lock_guard lock(mutex_);
    if (owned_ != nullptr) return Status::Ok();
    auto pool = std::make_unique<PosixBackend>(uring_.get());
    Status status = pool->Init(depth_);
    if (!status.ok()) return status;
    owned_ = std::move(pool);
    pool_ = owned_.get();
    return status;
  }

  Status RegisterBuffers(std::span<const std::span<std::byte>> buffers) override {
    return uring_->RegisterBuffers(buffers);
  }

 private:
  void Drain(std::vector<IoResult>* results) {
    if (PosixBackend* const pool = pool_; pool != nullptr) pool->Drain(results);
  }

  const std::unique_ptr<IoBackend> uring_;
  const unsigned depth_;
  std::mutex mutex_;
  std::unique_ptr<PosixBackend> owned_;  // its threads wake uring_, so it is destroyed first
  std::atomic<PosixBackend*> pool_ = nullptr;
};

}  // namespace

std::unique_ptr<IoBackend> MakePosixBackend(unsigned depth, Status* status) {
  auto backend = std::make_unique<PosixBackend>();
  *status = backend->Init(depth);
  if (!status->ok()) return nullptr;
  return backend;
}

std::unique_ptr<IoBackend> MakePooledBackend(std::unique_ptr<IoBackend> uring, unsigned depth) {
  return std::make_unique<PooledBackend>(std::move(uring), depth);
}

}  // namespace lazyckpt
