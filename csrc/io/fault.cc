// Test build only: an IoBackend that fails on purpose. backend.h has the grammar of its spec.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>

#include "io/backend.h"

namespace lazyckpt {
namespace {

constexpr int kShort = -1;
constexpr int kStall = -2;
constexpr int kKill = -3;
constexpr int kLost = -4;
constexpr int64_t kOff = 100;  // bytes by which a short answer misses the block boundary
constexpr auto kStallTime = std::chrono::milliseconds(50);

const std::map<std::string, int> kEffects = {{"EIO", EIO},       {"ENOSPC", ENOSPC}, {"EACCES", EACCES},
                                             {"EDQUOT", EDQUOT}, {"EINTR", EINTR},   {"ENOMEM", ENOMEM},
                                             {"EAGAIN", EAGAIN}, {"EINVAL", EINVAL}, {"short", kShort},
                                             {"stall", kStall},  {"kill", kKill},    {"lost", kLost}};

class FaultBackend final : public IoBackend {
 public:
  explicit FaultBackend(std::unique_ptr<IoBackend> inner) : inner_(std::move(inner)) {}

  ~FaultBackend() override {
    if (log_ >= 0) close(log_);
  }

  bool Parse(const std::string& spec) {
    std::istringstream all(spec);
    for (std::string one; std::getline(all, one, ',');) {
      std::istringstream parts(one);
      std::string op, nth, effect;
      if (one.rfind("trace:", 0) == 0) {
        log_ = open(one.substr(6).c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
        if (log_ < 0) return false;
        continue;
      }
      if (!std::getline(parts, op, ':') || !std::getline(parts, nth, ':') || !std::getline(parts, effect)) return false;
      const auto found = kEffects.find(effect);
      if (found == kEffects.end() || nth.find_first_not_of("0123456789") != std::string::npos) return false;
      (found->second == kStall ? stalls_ : plan_)[op][std::stoi(nth)] = found->second;
    }
    return !plan_.empty() || !stalls_.empty() || log_ >= 0;
  }

  const char* name() const override { return inner_->name(); }

  Status Submit(const IoRequest& request) override {
    static constexpr const char* kNames[] = {"read", "write", "sync"};
    const char* name = kNames[static_cast<int>(request.op)];
    const int effect = Next(name);
    if (effect > 0 || effect == kLost) {
      std::lock_guard lock(mutex_);
      answered_.push_back({request.tag, effect > 0 ? -effect : static_cast<int64_t>(request.size)});
      return Status::Ok();
    }
    IoRequest passed = request;
    if (effect == kShort && request.size > kBlockBytes) {
      passed.size = std::max(request.size / 2 / kBlockBytes, size_t{1}) * kBlockBytes;
      shortened_.insert(request.tag);
    }
    if (log_ >= 0) {
      std::lock_guard lock(mutex_);
      const Traced traced = {++operations_, name, paths_[request.fd], passed.offset, passed.size};
      traced_[request.tag] = traced;
      Log("begin", traced);
    }
    return inner_->Submit(passed);
  }

  void Wait(std::vector<IoResult>* results) override {
    {
      std::lock_guard lock(mutex_);
      results->insert(results->end(), answered_.begin(), answered_.end());
      answered_.clear();
    }
    if (!results->empty()) return;
    inner_->Wait(results);
    if (log_ >= 0) {
      std::lock_guard lock(mutex_);
      for (const IoResult& r : *results) Log(r.result >= 0 ? "end" : "failed", traced_[r.tag]);
    }
    // A disk with small sectors may stop off the block boundary.
    for (IoResult& r : *results)
      if (shortened_.erase(r.tag) > 0 && r.result > kOff) r.result -= kOff;
  }

  void Wake() override { inner_->Wake(); }

  Status PreparePool() override { return inner_->PreparePool(); }

  Status Create(const std::string& path, bool want_direct, int* fd, bool* direct) override {
    return Attempt("create", "open", path, 0, [&] {
      Status status = inner_->Create(path, want_direct, fd, direct);
      std::lock_guard lock(mutex_);
      paths_[*fd] = path;
      return status;
    });
  }

  Status OpenToWrite(const std::string& path, bool want_direct, int* fd, bool* direct) override {
    return Attempt("create", "open", path, 0, [&] {
      Status status = inner_->OpenToWrite(path, want_direct, fd, direct);
      std::lock_guard lock(mutex_);
      paths_[*fd] = path;
      return status;
    });
  }

  Status Allocate(int fd, uint64_t size, const std::string& path) override {
    return Attempt("allocate", "fallocate", path, size, [&] { return inner_->Allocate(fd, size, path); });
  }

  Status Truncate(int fd, uint64_t size, const std::string& path) override {
    return Attempt("truncate", "ftruncate", path, size, [&] { return inner_->Truncate(fd, size, path); });
  }

 private:
  struct Traced {
    int number;
    const char* name;
    std::string path;
    uint64_t offset;
    uint64_t size;
  };

  // Writes one line at once, since others append to the same file.
  void Log(const char* what, const Traced& t) {
    std::ostringstream line;
    line << what << ' ' << t.number << ' ' << t.name << ' ' << t.path << ' ' << t.offset << ' ' << t.size << '\n';
    (void)!write(log_, line.str().data(), line.str().size());
  }

  template <class F>
  Status Attempt(const char* name, const char* call, const std::string& path, uint64_t size, const F& perform) {
    const int effect = Next(name);
    if (effect > 0) return Status(effect, call, path);
    if (effect == kLost) return Status::Ok();
    if (log_ < 0) return perform();
    Traced traced = {0, name, path, 0, size};
    {
      std::lock_guard lock(mutex_);
      traced.number = ++operations_;
      Log("begin", traced);
    }
    Status status = perform();
    Log(status.ok() ? "end" : "failed", traced);
    return status;
  }

  int Next(const std::string& op) {
    std::unique_lock lock(mutex_);
    const int n = ++count_[op];
    const bool stall = stalls_[op].count(n) > 0;
    const auto planned = plan_[op].find(n);
    const int effect = planned == plan_[op].end() ? 0 : planned->second;
    lock.unlock();
    if (stall) std::this_thread::sleep_for(kStallTime);
    if (effect == kKill) kill(getpid(), SIGKILL);
    return effect;
  }

  std::unique_ptr<IoBackend> inner_;
  std::mutex mutex_;
  using Plan = std::map<std::string, std::map<int, int>>;  // operation -> its number -> effect
  Plan plan_, stalls_;
  std::map<std::string, int> count_;
  std::set<void*> shortened_;       // by tag; used by the thread that submits and waits
  std::vector<IoResult> answered_;  // here, not by inner_

  int log_ = -1;
  int operations_ = 0;                // traced
  std::map<int, std::string> paths_;  // by descriptor
  std::map<void*, Traced> traced_;    // under way, by tag
};

}  // namespace

std::unique_ptr<IoBackend> MakeFaultBackend(std::unique_ptr<IoBackend> inner, const std::string& spec) {
  auto backend = std::make_unique<FaultBackend>(std::move(inner));
  if (!backend->Parse(spec)) return nullptr;
  return backend;
}

}  // namespace lazyckpt
