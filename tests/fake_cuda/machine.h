// A machine with GPUs that exist only here: memory, streams, events, captures, and a thread that plays the devices.
// driver.cc gives it the driver's functions, control.cc those of the tests.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "abi.h"

namespace fake {

constexpr int kMaxDevices = 8;
using Time = std::chrono::steady_clock::time_point;

// For every lane (a stream), the number of its operations that are known to come before.
using Clock = std::vector<uint64_t>;
void Join(Clock* clock, const Clock& other);
CUstreamCaptureMode& CaptureMode();  // of this thread

struct Range {
  uint64_t begin;
  uint64_t size;
  uint64_t end() const { return begin + size; }
};

struct Fill {
  Range range;
  uint8_t byte;
};

struct Copy {
  uint64_t device_address;
  uint64_t host;
  uint64_t size;
  bool to_host;
  bool pinned;
  bool poisoned = false;                 // the destination was filled with poison when the copy was enqueued
  std::optional<uint64_t> source_sum{};  // of a host source when the copy was enqueued
};

enum class Kind { kKernel, kCopy, kRecord, kWait, kFree };

struct Op {
  Kind kind;
  uint64_t number = 0;
  int device = 0;
  uint64_t stream = 0;
  std::string name;
  size_t lane = 0;
  uint64_t tick = 0;
  Clock clock;
  std::vector<std::shared_ptr<Op>> after;
  std::vector<Copy> copies;
  std::vector<Fill> writes;
  std::chrono::microseconds duration{0};
  CUresult fault = CUDA_SUCCESS;
  enum State { kQueued, kRunning, kDone } state = kQueued;
  bool effects_first = false;
  bool raced = false;
  std::optional<Time> ready;
  Time eligible, finish;

  uint64_t bytes() const;
  bool to_host() const { return !copies.empty() && copies.front().to_host; }
  std::string Describe() const;
};
using OpPtr = std::shared_ptr<Op>;

struct Stream;

struct Capture {
  uint64_t origin;
  std::thread::id thread;
  CUstreamCaptureMode mode;
  bool invalidated = false;
  bool ended = false;
  std::vector<uint64_t> unjoined;  // streams that an event drew in and none led back
  std::vector<Op> ops;
};
using CapturePtr = std::shared_ptr<Capture>;

struct Stream {
  uint64_t handle;
  int device;
  bool legacy;    // the NULL stream
  bool blocking;  // orders itself with the NULL stream
  bool by_driver;
  bool destroyed = false;
  size_t lane;
  uint64_t ticks = 0;
  Clock clock;
  OpPtr tail;
  std::deque<OpPtr> queue;
  size_t copies_in_flight = 0;
  CapturePtr capture;
};
using StreamPtr = std::shared_ptr<Stream>;

struct Event {
  int device;
  OpPtr recorded;        // null: never, which counts as complete
  CapturePtr capture;    // where it was recorded, if in a capture
  uint64_t captured_on;  // the stream, then
};

struct Allocation {
  Range range;
  int device;
  bool freed = false;
};

struct Registration {
  Range range;
  int device;
  bool portable;
  bool by_driver = false;  // memory that the driver made, pinned
};

struct Access {
  Range range;
  bool write;
  OpPtr op;
};

struct Failure {
  uint64_t countdown;
  CUresult code;
  bool sticky;
};

// copies-late runs kernels as early and copies as late as their order permits, copies-early the other way round.
enum class Mode { kRandom = 0, kCopiesLate = 1, kCopiesEarly = 2 };

struct Config {
  double bandwidth = 4e9;  // bytes per second of one copy engine
  double latency_us = 20;
  double delay_us = 300;  // the longest time for which a ready operation is held back, so that others precede it
  int driver_version = 12080;
  int host_pointers = 1;             // batches take registered memory by its address in the host
  double registration_limit = 1e18;  // bytes in all; beyond it registration is refused
  int registration_error = CUDA_ERROR_OUT_OF_MEMORY;
  Mode mode = Mode::kRandom;
};

struct Statistics {
  uint64_t bytes_to_device = 0, copies = 0, pageable_copies = 0, largest_batch = 0, peak_in_flight = 0;
  uint64_t contexts_created = 0;
};

class Machine {
 public:
  std::mutex mu;
  std::condition_variable work, progress;

  // All below under mu.
  int devices = 2;
  bool initialized = false, deinitialized = false;
  bool hold_copies = false, hold_kernels = false;
  Config config;
  Statistics statistics;
  std::mt19937_64 random;
  Clock host;  // what the host has seen to be complete
  std::map<uint64_t, StreamPtr> streams;
  std::vector<StreamPtr> draining;  // destroyed with work left
  std::vector<StreamPtr> legacy;    // by device

  template <class F>
  void EachStream(F each) const {
    for (const auto& [handle, stream] : streams) each(stream);
    for (const auto& stream : draining) each(stream);
    for (const auto& stream : legacy) each(stream);
  }

  std::map<uint64_t, Event> events;
  std::map<uint64_t, Allocation> allocations;  // by begin; freed ones stay until reset
  std::map<uint64_t, Registration> registrations;
  std::vector<CapturePtr> captures, graphs;
  std::vector<int> retained;    // by device
  std::vector<CUresult> fault;  // by device; sticky
  std::map<std::string, uint64_t> calls;
  std::map<std::string, Failure> failures;
  std::map<std::string, double> delays;  // by function: microseconds that each of its calls takes
  std::vector<std::string> log;

  static Machine& Get();
  void Reset(uint64_t seed, int count);
  void Deinitialize();

  // Memory.
  uint64_t Allocate(int device, uint64_t size);
  void Free(const StreamPtr& stream, uint64_t address);
  Allocation* Find(Range range);  // the allocation, live or freed, that holds all of the range
  bool IsDeviceAddress(uint64_t address) const;
  void Poke(uint64_t address, const void* bytes, uint64_t size);
  void Peek(uint64_t address, void* bytes, uint64_t size);
  // The registration that holds the range; null if none touches it; nullopt if the range leaves the one it begins in.
  std::optional<const Registration*> FindRegistration(Range range) const;
  bool HostReadable(Range range);

  // Streams. Enqueue returns an error of capture, or queues the operation.
  StreamPtr MakeStream(int device, bool blocking, bool by_driver);
  void DestroyStream(uint64_t handle);
  CUresult Enqueue(const StreamPtr& stream, OpPtr op, const std::vector<OpPtr>& after = {});
  CUresult Record(const StreamPtr& stream, Event* event);
  CUresult Wait(const StreamPtr& stream, const Event& event);
  void Observe(const OpPtr& op) { Join(&host, op->clock); }
  bool WaitFor(std::unique_lock<std::mutex>& lock, const OpPtr& op, std::chrono::seconds limit);
  void Tails(const StreamPtr& stream, std::vector<OpPtr>* tails);
  bool InUse(Range range, std::string* by);

  // Captures.
  CUresult BeginCapture(const StreamPtr& stream, CUstreamCaptureMode mode);
  CUresult EndCapture(const StreamPtr& stream, int* graph);
  // Breaks every capture that forbids unsafe calls to this thread; returns whether there was one.
  bool BreakCaptures(const char* call);
  CapturePtr ImplicitCapture(const StreamPtr& stream) const;

  void Violation(const std::string& text);  // needs no lock: also in a forked child
  std::string Violations() const;
  void ForgetViolations();
  bool InChild() const;

 private:
  Machine();
  void CheckAccess(const OpPtr& op, Range range, bool write);
  void Guard(Copy* copy);
  void Run();
  void Effects(std::unique_lock<std::mutex>& lock, const OpPtr& op);
  void RunCopy(const Op& op, const Copy& copy);
  bool Ready(const OpPtr& op) const;
  bool Held(const Op& op) const;
  OpPtr Pick(Time now, Time* wake);
  void Start(const OpPtr& op, Time now);
  void Complete(const OpPtr& op);
  std::vector<OpPtr> Fronts() const;

  uint64_t base_ = 0;  // device addresses: reserved, never accessible
  std::vector<int> memory_;
  std::vector<uint64_t> used_;
  size_t lanes_ = 0;
  uint64_t ops_ = 0, next_stream_ = 0, epoch_ = 0;
  std::vector<OpPtr> running_;
  bool in_effects_ = false;
  std::vector<Access> history_;
  std::thread thread_;
};

}  // namespace fake
