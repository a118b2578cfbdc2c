#include "machine.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

namespace fake {
namespace {

using std::chrono::microseconds;
constexpr uint64_t kDeviceSpan = uint64_t{64} << 30;  // addresses for one device, never used twice
constexpr uint64_t kGap = 4096;
constexpr uint64_t kBlock = 1 << 20;
constexpr uint8_t kFresh = 0xA5, kFreed = 0xDE, kInFlight = 0xDB;
constexpr auto kStarvation = std::chrono::milliseconds(50);

[[noreturn]] void Die(const char* what) {
  std::perror(what);
  std::abort();
}

// Shared with forked children, whose violations the parent reports.
struct Shared {
  std::atomic<uint32_t> used;
  char text[(1 << 20) - sizeof(std::atomic<uint32_t>)];
};

Shared* SharedText() {
  static Shared* shared = [] {
    void* p = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) Die("mmap");
    return new (p) Shared{};
  }();
  return shared;
}

pid_t owner;

// Accesses the host's memory through a file, since a system call reports unmapped memory and an access would crash.
class HostAccess {
 public:
  HostAccess() : file_(memfd_create("fake-cuda-host", MFD_CLOEXEC)) {
    const std::vector<uint8_t> poison(kBlock, kInFlight);
    if (file_ < 0 || pwrite(file_, poison.data(), kBlock, kBlock) != static_cast<ssize_t>(kBlock)) Die("memfd_create");
  }
  bool Read(uint64_t address, void* to, uint64_t size) {
    std::lock_guard lock(mu_);
    return pwrite(file_, reinterpret_cast<const void*>(address), size, 0) == static_cast<ssize_t>(size) &&
           pread(file_, to, size, 0) == static_cast<ssize_t>(size);
  }
  bool Write(uint64_t address, const void* from, uint64_t size) {
    std::lock_guard lock(mu_);
    return pwrite(file_, from, size, 0) == static_cast<ssize_t>(size) &&
           pread(file_, reinterpret_cast<void*>(address), size, 0) == static_cast<ssize_t>(size);
  }
  bool Poison(uint64_t address, uint64_t size) {
    return pread(file_, reinterpret_cast<void*>(address), size, kBlock) == static_cast<ssize_t>(size);
  }

 private:
  std::mutex mu_;
  int file_;
};

HostAccess& TheHost() {
  static auto* host = new HostAccess;
  return *host;
}

template <typename F>
bool InBlocks(uint64_t size, F each) {
  for (uint64_t at = 0; at < size; at += kBlock) {
    if (!each(at, std::min(kBlock, size - at))) return false;
  }
  return true;
}

uint64_t Sum(uint64_t sum, const std::vector<uint8_t>& bytes, uint64_t size) {
  return (sum * 31) ^ std::hash<std::string_view>()({reinterpret_cast<const char*>(bytes.data()), size});
}

bool Overlap(Range a, Range b) { return a.begin < b.end() && b.begin < a.end(); }

}  // namespace

void Join(Clock* clock, const Clock& other) {
  if (clock->size() < other.size()) clock->resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) (*clock)[i] = std::max((*clock)[i], other[i]);
}

static bool Includes(const Clock& clock, size_t lane, uint64_t tick) {
  return lane < clock.size() && clock[lane] >= tick;
}

uint64_t Op::bytes() const {
  uint64_t sum = 0;
  for (const Copy& copy : copies) sum += copy.size;
  return sum;
}

std::string Op::Describe() const {
  char stream_text[40];
  std::snprintf(stream_text, sizeof stream_text, stream ? "stream %#lx" : "the NULL stream", stream);
  std::string where = " (#" + std::to_string(number) + ", device " + std::to_string(device) + ", " + stream_text + ")";
  switch (kind) {
    case Kind::kKernel:
      return "kernel '" + name + "'" + where;
    case Kind::kCopy:
      return (to_host() ? "D2H copy of " : "H2D copy of ") + std::to_string(bytes()) + " bytes" + where;
    case Kind::kRecord:
      return "event record" + where;
    case Kind::kWait:
      return "event wait" + where;
    case Kind::kFree:
      return "free" + where;
  }
  return "?";
}

static Machine* started = nullptr;

Machine& Machine::Get() {
  static auto* machine = started = new Machine;  // never destroyed: threads may call until the process ends
  return *machine;
}

Machine::Machine() {
  owner = getpid();
  SharedText();
  TheHost();
  void* p = mmap(nullptr, kMaxDevices * kDeviceSpan, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) Die("mmap");
  base_ = reinterpret_cast<uint64_t>(p);
  for (int i = 0; i < kMaxDevices; ++i) {
    memory_.push_back(memfd_create("fake-cuda-device", MFD_CLOEXEC));
    if (memory_.back() < 0 || ftruncate(memory_.back(), kDeviceSpan) != 0) Die("memfd_create");
    used_.push_back(kGap);
  }
  Reset(0, 2);
  thread_ = std::thread([this] { Run(); });
  thread_.detach();
}

bool Machine::InChild() const { return getpid() != owner; }

void Machine::Reset(uint64_t seed, int count) {
  std::unique_lock lock(mu);
  progress.wait(lock, [this] { return !in_effects_; });
  EachStream([](const StreamPtr& stream) {
    for (const OpPtr& op : stream->queue) op->state = Op::kDone;
    stream->queue.clear();
  });
  running_.clear();
  ++epoch_;
  streams.clear(), draining.clear(), legacy.clear(), events.clear(), registrations.clear(), history_.clear();
  for (auto& capture : captures) capture->ended = true;
  captures.clear(), graphs.clear(), calls.clear(), failures.clear(), delays.clear(), log.clear(), host.clear();
  allocations.clear();
  for (int i = 0; i < kMaxDevices; ++i) {
    if (ftruncate(memory_[i], 0) != 0 || ftruncate(memory_[i], kDeviceSpan) != 0) Die("ftruncate");
  }
  lanes_ = 0;
  devices = std::min(count, kMaxDevices);
  deinitialized = hold_copies = hold_kernels = false;
  config = {};
  statistics = {};
  random.seed(seed);
  retained.assign(kMaxDevices, 0);
  fault.assign(kMaxDevices, CUDA_SUCCESS);
  for (int i = 0; i < devices; ++i) {
    legacy.push_back(std::make_shared<Stream>(Stream{0, i, true, true, false, false, lanes_++}));
  }
  ForgetViolations();
  progress.notify_all();
}

void Machine::Deinitialize() {
  std::lock_guard lock(mu);
  deinitialized = true;
  progress.notify_all();
}

// ---- Memory

bool Machine::IsDeviceAddress(uint64_t address) const {
  return address >= base_ && address < base_ + kMaxDevices * kDeviceSpan;
}

uint64_t Machine::Allocate(int device, uint64_t size) {
  const uint64_t offset = used_[device];
  if (offset + size + kGap > kDeviceSpan) Die("fake CUDA: out of addresses");
  used_[device] = (offset + size + kGap + 511) / 512 * 512;
  const uint64_t begin = base_ + device * kDeviceSpan + offset;
  allocations[begin] = {{begin, size}, device};
  const std::vector<uint8_t> poison(std::min(size, kBlock), kFresh);
  InBlocks(size, [&](uint64_t at, uint64_t n) { return Poke(begin + at, poison.data(), n), true; });
  return begin;
}

Allocation* Machine::Find(Range range) {
  auto it = allocations.upper_bound(range.begin);
  if (it == allocations.begin()) return nullptr;
  Allocation& allocation = std::prev(it)->second;
  return range.end() <= allocation.range.end() ? &allocation : nullptr;
}

void Machine::Poke(uint64_t address, const void* bytes, uint64_t size) {
  const uint64_t offset = address - base_;
  if (pwrite(memory_[offset / kDeviceSpan], bytes, size, offset % kDeviceSpan) != static_cast<ssize_t>(size)) {
    Die("fake CUDA: pwrite");
  }
}

void Machine::Peek(uint64_t address, void* bytes, uint64_t size) {
  const uint64_t offset = address - base_;
  if (pread(memory_[offset / kDeviceSpan], bytes, size, offset % kDeviceSpan) != static_cast<ssize_t>(size)) {
    Die("fake CUDA: pread");
  }
}

void Machine::Free(const StreamPtr& stream, uint64_t address) {
  auto it = allocations.find(address);
  if (it == allocations.end() || it->second.freed) return Violation("free of memory that is not allocated");
  const Range range = it->second.range;
  if (stream) {
    auto op = std::make_shared<Op>(Op{Kind::kFree});
    op->writes.push_back({range, kFreed});
    Enqueue(stream, op);
  } else {
    std::string by;
    if (InUse(range, &by)) Violation("device memory freed while " + by + " is in flight");
    const std::vector<uint8_t> poison(kBlock, kFreed);
    InBlocks(range.size, [&](uint64_t at, uint64_t n) { return Poke(range.begin + at, poison.data(), n), true; });
  }
  it->second.freed = true;
}

bool Machine::InUse(Range range, std::string* by) {
  for (const Access& access : history_) {
    if (Overlap(access.range, range) && !Includes(host, access.op->lane, access.op->tick)) {
      *by = access.op->Describe();
      return true;
    }
  }
  return false;
}

std::optional<const Registration*> Machine::FindRegistration(Range range) const {
  for (const auto& [begin, registration] : registrations) {
    if (!Overlap(registration.range, range)) continue;
    if (range.begin < begin || range.end() > registration.range.end()) return std::nullopt;
    return &registration;
  }
  return nullptr;
}

bool Machine::HostReadable(Range range) {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t first = range.begin / page * page;
  std::vector<uint8_t> resident((range.end() - first + page - 1) / page);
  return mincore(reinterpret_cast<void*>(first), range.end() - first, resident.data()) == 0;
}

// ---- Streams

StreamPtr Machine::MakeStream(int device, bool blocking, bool by_driver) {
  const uint64_t handle = 0x50000000 + 16 * ++next_stream_;
  auto stream = std::make_shared<Stream>(Stream{handle, device, false, blocking, by_driver, false, lanes_++});
  streams[handle] = stream;
  return stream;
}

void Machine::DestroyStream(uint64_t handle) {
  StreamPtr stream = streams.at(handle);
  stream->destroyed = true;
  if (stream->capture) stream->capture->invalidated = true;
  if (stream->blocking) Join(&legacy[stream->device]->clock, stream->clock);  // which still waits for its work
  if (!stream->queue.empty()) draining.push_back(stream);
  streams.erase(handle);
}

// Orders the operation by its stream, by the NULL stream and the blocking ones, and by events.
CUresult Machine::Enqueue(const StreamPtr& stream, OpPtr op, const std::vector<OpPtr>& after) {
  op->device = stream->device;
  op->stream = stream->handle;
  if (CapturePtr implicit = ImplicitCapture(stream)) {
    implicit->invalidated = true;
    Violation("the NULL stream was used while a blocking stream of its context was capturing");
    return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  if (stream->capture) {
    if (stream->capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (op->kind == Kind::kCopy) Violation(op->Describe() + " was captured instead of run");
    if (op->kind == Kind::kKernel || op->kind == Kind::kCopy) stream->capture->ops.push_back(*op);
    return CUDA_SUCCESS;
  }
  op->number = ++ops_;
  op->lane = stream->lane;
  op->after = after;
  for (const OpPtr& other : after) Join(&stream->clock, other->clock);
  std::vector<OpPtr> tails;
  Tails(stream, &tails);
  for (const OpPtr& tail : tails) {
    Join(&stream->clock, tail->clock);
    op->after.push_back(tail);
  }
  if (stream->clock.size() <= stream->lane) stream->clock.resize(stream->lane + 1);
  op->tick = stream->clock[stream->lane] = ++stream->ticks;
  op->clock = stream->clock;
  for (Copy& copy : op->copies) Guard(&copy);
  for (const Copy& copy : op->copies) {
    CheckAccess(op, {copy.device_address, copy.size}, !copy.to_host);
    CheckAccess(op, {copy.host, copy.size}, copy.to_host);
  }
  for (const Fill& fill : op->writes) CheckAccess(op, fill.range, true);
  if (op->kind == Kind::kCopy) {
    statistics.peak_in_flight = std::max<uint64_t>(statistics.peak_in_flight, ++stream->copies_in_flight);
  }
  stream->tail = op;
  stream->queue.push_back(op);
  work.notify_all();
  return CUDA_SUCCESS;
}

CUresult Machine::Record(const StreamPtr& stream, Event* event) {
  auto op = std::make_shared<Op>(Op{Kind::kRecord});
  if (CUresult e = Enqueue(stream, op)) return e;
  event->capture = stream->capture;
  event->captured_on = stream->handle;
  event->recorded = stream->capture ? nullptr : op;
  return CUDA_SUCCESS;
}

CUresult Machine::Wait(const StreamPtr& stream, const Event& event) {
  const CapturePtr& capture = event.capture;
  if (!capture) {
    if (!event.recorded) return CUDA_SUCCESS;
    if (!stream->capture) return Enqueue(stream, std::make_shared<Op>(Op{Kind::kWait}), {event.recorded});
    stream->capture->invalidated = true;
    Violation("a capturing stream was made to wait for an event from outside of its capture");
    return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  }
  if (capture->ended || stream->legacy) {
    capture->invalidated = true;
    Violation("a stream was made to wait for an event from inside of a capture");
    return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  }
  if (!stream->capture) {
    if (stream->by_driver) Violation("a stream of the driver's caller joined a capture: its work will not run");
    stream->capture = capture;
    capture->unjoined.push_back(stream->handle);
    return CUDA_SUCCESS;
  }
  if (stream->handle == capture->origin) std::erase(capture->unjoined, event.captured_on);
  return CUDA_SUCCESS;
}

// The operations before the next one of the stream; for the NULL stream, the last one of every blocking stream.
void Machine::Tails(const StreamPtr& stream, std::vector<OpPtr>* tails) {
  EachStream([&](const StreamPtr& other) {
    const bool implicit = other->device == stream->device && other->blocking && stream->blocking;
    const bool before = other == stream || (implicit && (stream->legacy || other->legacy));
    if (before && other->tail) tails->push_back(other->tail);
  });
}

bool Machine::WaitFor(std::unique_lock<std::mutex>& lock, const OpPtr& op, std::chrono::seconds limit) {
  return progress.wait_for(lock, limit, [&] { return op->state == Op::kDone || deinitialized; }) &&
         op->state == Op::kDone;
}

// Two operations on the same bytes, one of them a write, need an order from events, streams or waits of the host.
// Without one they race, even if they did not meet this time.
void Machine::CheckAccess(const OpPtr& op, Range range, bool write) {
  // Operations that the host has seen to end come before all later ones.
  std::erase_if(history_, [&](const Access& a) { return Includes(host, a.op->lane, a.op->tick); });
  for (const Access& a : history_) {
    if (a.op == op || !(write || a.write) || !Overlap(a.range, range)) continue;
    if (Includes(op->clock, a.op->lane, a.op->tick)) continue;
    op->raced = a.op->raced = true;
    Violation("race: " + a.op->Describe() + (a.write ? " writes" : " reads") + ", " + op->Describe() +
              (write ? " writes" : " reads") + " the same memory, and neither waits for the other");
  }
  // An operation after this one is also after the stream's earlier ones.
  std::erase_if(history_, [&](const Access& a) {
    return a.op->lane == op->lane && (write || !a.write) && range.begin <= a.range.begin &&
           a.range.end() <= range.end();
  });
  history_.push_back({range, write, op});
}

// Fills a destination with poison at once, so that no reader finds the right bytes too early. Checksums a
// source to notice a change before it is read.
void Machine::Guard(Copy* copy) {
  if (!copy->pinned) return;  // the caller waits
  const Range range{copy->host, copy->size};
  for (const Access& access : history_) {  // perhaps ordered on the device, but not yet for the host
    if (Overlap(access.range, range) && !Includes(host, access.op->lane, access.op->tick)) return;
  }
  if (copy->to_host) {
    copy->poisoned =
        InBlocks(copy->size, [&](uint64_t at, uint64_t n) { return TheHost().Poison(copy->host + at, n); });
    return;
  }
  std::vector<uint8_t> block(std::min(copy->size, kBlock));
  uint64_t sum = 0;
  if (InBlocks(copy->size, [&](uint64_t at, uint64_t n) {
        if (!TheHost().Read(copy->host + at, block.data(), n)) return false;
        sum = Sum(sum, block, n);
        return true;
      })) {
    copy->source_sum = sum;
  }
}

// ---- The devices' thread

bool Machine::Ready(const OpPtr& op) const {
  return op->state == Op::kQueued &&
         std::all_of(op->after.begin(), op->after.end(), [](const OpPtr& o) { return o->state == Op::kDone; });
}

bool Machine::Held(const Op& op) const {
  return (hold_copies && op.kind == Kind::kCopy) || (hold_kernels && op.kind == Kind::kKernel);
}

std::vector<OpPtr> Machine::Fronts() const {
  std::vector<OpPtr> fronts;
  EachStream([&](const StreamPtr& stream) {
    if (!stream->queue.empty() && Ready(stream->queue.front())) fronts.push_back(stream->queue.front());
  });
  return fronts;
}

void Machine::Run() {
  std::unique_lock lock(mu);
  for (;;) {
    if (deinitialized) {
      work.wait_for(lock, std::chrono::milliseconds(20));
      continue;
    }
    const Time now = std::chrono::steady_clock::now();
    auto due = std::min_element(running_.begin(), running_.end(),
                                [](const OpPtr& a, const OpPtr& b) { return a->finish < b->finish; });
    if (due != running_.end() && (*due)->finish <= now) {
      OpPtr op = *due;
      running_.erase(due);
      const uint64_t epoch = epoch_;
      if (!op->effects_first) Effects(lock, op);
      if (epoch == epoch_) Complete(op);
      progress.notify_all();
      continue;
    }
    Time wake = due != running_.end() ? (*due)->finish : now + std::chrono::hours(1);
    OpPtr next = Pick(now, &wake);
    if (!next) {
      work.wait_until(lock, std::max(wake, now + microseconds(50)));
      continue;
    }
    Start(next, now);
    const uint64_t epoch = epoch_;
    if (next->effects_first) Effects(lock, next);
    if (epoch == epoch_) running_.push_back(next);
  }
}

// The operation that runs next; if there is none, the latest time to look again.
OpPtr Machine::Pick(Time now, Time* wake) {
  std::vector<OpPtr> fronts = Fronts();
  std::erase_if(fronts, [&](const OpPtr& op) { return Held(*op); });
  const auto any = [&](Kind kind) {
    const auto is = [&](const OpPtr& op) { return op->kind == kind; };
    return std::any_of(fronts.begin(), fronts.end(), is) || std::any_of(running_.begin(), running_.end(), is);
  };
  const bool kernels = any(Kind::kKernel), copies = any(Kind::kCopy);
  OpPtr next;
  for (const OpPtr& op : fronts) {
    if (op->kind == Kind::kRecord || op->kind == Kind::kWait) return op;
    if (!op->ready) {
      op->ready = now;
      double delay = config.delay_us;
      if (config.mode == Mode::kRandom) delay *= std::uniform_real_distribution(0.0, 1.0)(random);
      if (config.mode == Mode::kCopiesLate && op->kind != Kind::kCopy) delay = 0;
      if (config.mode == Mode::kCopiesEarly && op->kind != Kind::kKernel) delay = 0;
      op->eligible = now + microseconds(static_cast<int64_t>(delay));
    }
    const bool engine_busy =
        op->kind == Kind::kCopy && std::any_of(running_.begin(), running_.end(), [&](const OpPtr& other) {
          return other->kind == Kind::kCopy && other->device == op->device && other->to_host() == op->to_host();
        });
    if (engine_busy) continue;
    const bool yields = (config.mode == Mode::kCopiesLate && op->kind == Kind::kCopy && kernels) ||
                        (config.mode == Mode::kCopiesEarly && op->kind == Kind::kKernel && copies);
    const Time from = yields ? *op->ready + kStarvation : op->eligible;
    if (from <= now && (!next || op->eligible < next->eligible)) next = op;
    *wake = std::min(*wake, from);
  }
  return next;
}

void Machine::Start(const OpPtr& op, Time now) {
  op->state = Op::kRunning;
  auto duration = op->duration;
  if (op->kind == Kind::kCopy) {
    duration = microseconds(static_cast<int64_t>(config.latency_us + 1e6 * op->bytes() / config.bandwidth));
  }
  op->finish = now + duration;
  switch (config.mode) {
    case Mode::kRandom:
      op->effects_first = random() & 1;
      break;
    case Mode::kCopiesLate:
      op->effects_first = op->kind != Kind::kCopy;
      break;
    case Mode::kCopiesEarly:
      op->effects_first = op->kind == Kind::kCopy;
      break;
  }
}

void Machine::Complete(const OpPtr& op) {
  op->state = Op::kDone;
  op->after.clear();
  if (op->fault != CUDA_SUCCESS && fault[op->device] == CUDA_SUCCESS) fault[op->device] = op->fault;
  if (op->kind == Kind::kKernel || op->kind == Kind::kCopy) {
    const char* kind = op->kind == Kind::kKernel ? "kernel" : op->to_host() ? "d2h" : "h2d";
    log.push_back(std::to_string(op->number) + " " + kind + " " + std::to_string(op->device) + " " +
                  std::to_string(op->stream) + " " + std::to_string(op->bytes()) + " " + op->name);
  }
  EachStream([&](const StreamPtr& stream) {
    if (stream->queue.empty() || stream->queue.front() != op) return;
    stream->queue.pop_front();
    if (op->kind == Kind::kCopy) --stream->copies_in_flight;
  });
  std::erase_if(draining, [](const StreamPtr& stream) { return stream->queue.empty(); });
}

// Unlocks while bytes move, so that callers do not wait.
void Machine::Effects(std::unique_lock<std::mutex>& lock, const OpPtr& op) {
  if (fault[op->device] != CUDA_SUCCESS) return;
  in_effects_ = true;
  std::vector<Copy> copies = op->copies;
  if (op->raced) {  // the host did not cause what the bytes are
    for (Copy& copy : copies) copy.poisoned = false, copy.source_sum.reset();
  }
  lock.unlock();
  std::shuffle(copies.begin(), copies.end(), std::mt19937_64(op->number));
  for (const Copy& copy : copies) RunCopy(*op, copy);
  for (const Fill& fill : op->writes) {
    const std::vector<uint8_t> block(std::min(fill.range.size, kBlock), fill.byte);
    InBlocks(fill.range.size,
             [&](uint64_t at, uint64_t n) { return Poke(fill.range.begin + at, block.data(), n), true; });
  }
  lock.lock();
  in_effects_ = false;
  progress.notify_all();
}

void Machine::RunCopy(const Op& op, const Copy& copy) {
  std::vector<uint8_t> block(std::min(copy.size, kBlock)), poison(copy.poisoned ? block.size() : 0, kInFlight);
  uint64_t sum = 0;
  bool touched = false;
  const bool whole = InBlocks(copy.size, [&](uint64_t at, uint64_t n) {
    if (!copy.to_host) {
      if (!TheHost().Read(copy.host + at, block.data(), n)) return false;
      sum = Sum(sum, block, n);
      Poke(copy.device_address + at, block.data(), n);
      return true;
    }
    if (copy.poisoned) {
      if (!TheHost().Read(copy.host + at, block.data(), n)) return false;
      touched |= std::memcmp(block.data(), poison.data(), n) != 0;
    }
    Peek(copy.device_address + at, block.data(), n);
    return TheHost().Write(copy.host + at, block.data(), n);
  });
  if (!whole) Violation("the host memory of " + op.Describe() + " was unmapped while the copy was in flight");
  if (touched) Violation("the host wrote to the destination of " + op.Describe() + " while the copy was in flight");
  if (whole && copy.source_sum && *copy.source_sum != sum) {
    Violation("the host changed the source of " + op.Describe() + " while the copy was in flight");
  }
}

// ---- Captures

CUresult Machine::BeginCapture(const StreamPtr& stream, CUstreamCaptureMode mode) {
  if (stream->legacy || stream->capture) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  stream->capture = std::make_shared<Capture>(Capture{stream->handle, std::this_thread::get_id(), mode});
  captures.push_back(stream->capture);
  return CUDA_SUCCESS;
}

CUresult Machine::EndCapture(const StreamPtr& stream, int* graph) {
  CapturePtr capture = stream->capture;
  if (!capture) return CUDA_ERROR_INVALID_VALUE;
  capture->ended = true;
  std::erase(captures, capture);
  for (const auto& [handle, other] : streams) {
    if (other->capture == capture) other->capture = nullptr;
  }
  if (capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (!capture->unjoined.empty()) return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
  graphs.push_back(capture);
  *graph = static_cast<int>(graphs.size()) - 1;
  return CUDA_SUCCESS;
}

CapturePtr Machine::ImplicitCapture(const StreamPtr& stream) const {
  if (!stream->legacy) return nullptr;
  for (const auto& [handle, other] : streams) {
    if (other->device == stream->device && other->blocking && other->capture) return other->capture;
  }
  return nullptr;
}

thread_local CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
CUstreamCaptureMode& CaptureMode() { return capture_mode; }

bool Machine::BreakCaptures(const char* call) {
  bool broken = false;
  for (const CapturePtr& capture : captures) {
    const bool own = capture->thread == std::this_thread::get_id();
    const bool forbidden =
        own ? capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED
            : capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (!forbidden) continue;
    broken = capture->invalidated = true;
    Violation(std::string(call) + " invalidated a capture of " + (own ? "its own" : "another") + " thread");
  }
  return broken;
}

// ---- Violations

void Machine::Violation(const std::string& text) {
  Shared* shared = SharedText();
  const std::string line = text + "\n";
  const uint32_t at = shared->used.fetch_add(line.size());
  if (at + line.size() <= sizeof shared->text) std::memcpy(shared->text + at, line.data(), line.size());
  if (const char* path = std::getenv("FAKE_CUDA_REPORT")) {
    const int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (file < 0 || write(file, line.data(), line.size()) < 0) Die(path);
    close(file);
  }
}

std::string Machine::Violations() const {
  const Shared* shared = SharedText();
  return {shared->text, std::min<size_t>(shared->used, sizeof shared->text)};
}

void Machine::ForgetViolations() { SharedText()->used = 0; }

}  // namespace fake

// At the end of the process, before the libraries that loaded the driver are torn down, as in the driver.
__attribute__((destructor)) static void Unload() {
  if (fake::Machine* machine = fake::started; machine && !machine->InChild()) machine->Deinitialize();
}
