// Test build only: an IoBackend that fails on purpose. See MakeFaultBackend for the grammar of its spec.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>

#include "io_backend.h"

namespace lazyckpt {
namespace {

constexpr int kShort = -1;
constexpr int kStall = -2;
constexpr size_t kBlock = 4096;
constexpr int64_t kOff = 100;
constexpr auto kStallTime = std::chrono::milliseconds(50);

const std::map<std::string, int> kEffects = {
    {"EIO", EIO},       {"ENOSPC", ENOSPC}, {"EACCES", EACCES}, {"EDQUOT", EDQUOT}, {"EINTR", EINTR},
    {"ENOMEM", ENOMEM}, {"EAGAIN", EAGAIN}, {"EINVAL", EINVAL}, {"short", kShort},  {"stall", kStall}};

class FaultBackend final : public IoBackend {
 public:
  explicit FaultBackend(std::unique_ptr<IoBackend> inner) : inner_(std::move(inner)) {}

  bool Parse(const std::string& spec) {
    std::istringstream all(spec);
    for (std::string one; std::getline(all, one, ',');) {
      std::istringstream parts(one);
      std::string op, nth, effect;
      if (!std::getline(parts, op, ':') || !std::getline(parts, nth, ':') || !std::getline(parts, effect)) return false;
      const auto found = kEffects.find(effect);
      if (found == kEffects.end() || nth.find_first_not_of("0123456789") != std::string::npos) return false;
      (found->second == kStall ? stalls_ : plan_)[op][std::stoi(nth)] = found->second;
    }
    return !plan_.empty() || !stalls_.empty();
  }

  const char* name() const override { return inner_->name(); }

  Status Submit(const IoRequest& request) override {
    static constexpr const char* kNames[] = {"read", "write", "sync"};
    const int effect = Next(kNames[static_cast<int>(request.op)]);
    if (effect > 0) {
      std::lock_guard lock(mutex_);
      failed_.push_back({request.tag, -effect});
      return Status::Ok();
    }
    IoRequest passed = request;
    if (effect == kShort && request.size > kBlock) {
      passed.size = std::max(request.size / 2 / kBlock, size_t{1}) * kBlock;
      shortened_.insert(request.tag);
    }
    return inner_->Submit(passed);
  }

  void Wait(std::vector<IoResult>* results) override {
    {
      std::lock_guard lock(mutex_);
      results->insert(results->end(), failed_.begin(), failed_.end());
      failed_.clear();
    }
    if (!results->empty()) return;
    inner_->Wait(results);
    // Off the block boundary, as a disk with small sectors may stop.
    for (IoResult& r : *results)
      if (shortened_.erase(r.tag) > 0 && r.result > kOff) r.result -= kOff;
  }

  void Wake() override { inner_->Wake(); }

  Status Create(const std::string& path, bool want_direct, int* fd, bool* direct) override {
    if (const int effect = Next("create"); effect > 0) return Status(effect, "open", path);
    return inner_->Create(path, want_direct, fd, direct);
  }

  Status Allocate(int fd, uint64_t size, const std::string& path) override {
    if (const int effect = Next("allocate"); effect > 0) return Status(effect, "fallocate", path);
    return inner_->Allocate(fd, size, path);
  }

  Status Truncate(int fd, uint64_t size, const std::string& path) override {
    if (const int effect = Next("truncate"); effect > 0) return Status(effect, "ftruncate", path);
    return inner_->Truncate(fd, size, path);
  }

 private:
  int Next(const std::string& op) {
    std::unique_lock lock(mutex_);
    const int n = ++count_[op];
    const bool stall = stalls_[op].count(n) > 0;
    const auto planned = plan_[op].find(n);
    const int effect = planned == plan_[op].end() ? 0 : planned->second;
    lock.unlock();
    if (stall) std::this_thread::sleep_for(kStallTime);
    return effect;
  }

  std::unique_ptr<IoBackend> inner_;
  std::mutex mutex_;
  using Plan = std::map<std::string, std::map<int, int>>;  // operation -> its number -> effect
  Plan plan_, stalls_;
  std::map<std::string, int> count_;
  std::set<void*> shortened_;  // of the thread that submits and waits
  std::vector<IoResult> failed_;
};

}  // namespace

std::unique_ptr<IoBackend> MakeFaultBackend(std::unique_ptr<IoBackend> inner, const std::string& spec) {
  auto backend = std::make_unique<FaultBackend>(std::move(inner));
  if (!backend->Parse(spec)) return nullptr;
  return backend;
}

}  // namespace lazyckpt
