// The functions for tests: they play PyTorch's part in a training process and report what the fake saw.
#include <algorithm>
#include <cstring>

#include "machine.h"

namespace fake {
std::vector<int>& Contexts();
}

using namespace fake;

namespace {

struct Locked {
  Machine& m = Machine::Get();
  std::unique_lock<std::mutex> lock{m.mu};
};

StreamPtr Find(Machine& m, int device, uint64_t handle) {
  if (handle == 0) return device >= 0 && device < m.devices ? m.legacy[device] : nullptr;
  auto it = m.streams.find(handle);
  return it == m.streams.end() ? nullptr : it->second;
}

const char* Text(std::string text) {
  thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

template <typename Map>
std::string Json(const Map& map) {
  std::string text;
  for (const auto& [key, value] : map) text += (text.empty() ? "{\"" : ", \"") + key + "\": " + std::to_string(value);
  return text.empty() ? "{}" : text + "}";
}

using Numbers = std::map<std::string, uint64_t>;

}  // namespace

// Starts anew; earlier handles are invalid. cuInit stays done, and a thread keeps its stack of contexts.
FAKE_EXPORT void fake_reset(uint64_t seed, int devices) {
  Machine::Get().Reset(seed, devices);
  CaptureMode() = CU_STREAM_CAPTURE_MODE_GLOBAL;  // a failed call may not have restored it
}

FAKE_EXPORT void fake_deinit() { Machine::Get().Deinitialize(); }

FAKE_EXPORT int fake_configure(const char* key, double value) {
  Locked locked;
  Config& c = locked.m.config;
  const std::map<std::string, double*> numbers{{"bandwidth", &c.bandwidth},
                                               {"latency_us", &c.latency_us},
                                               {"delay_us", &c.delay_us},
                                               {"registration_limit", &c.registration_limit}};
  const std::map<std::string, int*> integers{{"driver_version", &c.driver_version},
                                             {"host_pointers", &c.host_pointers},
                                             {"registration_error", &c.registration_error}};
  if (std::string(key) == "mode") return c.mode = static_cast<Mode>(value), CUDA_SUCCESS;
  if (const auto number = numbers.find(key); number != numbers.end()) return *number->second = value, CUDA_SUCCESS;
  const auto integer = integers.find(key);
  if (integer == integers.end()) return CUDA_ERROR_INVALID_VALUE;
  *integer->second = static_cast<int>(value);
  return CUDA_SUCCESS;
}

// Holds back copies or kernels.
FAKE_EXPORT void fake_hold(int copies, int kernels) {
  Locked locked;
  locked.m.hold_copies = copies;
  locked.m.hold_kernels = kernels;
  locked.m.work.notify_all();
}

// Makes the nth call of the function return the code and do nothing else; if sticky, all later ones, too.
FAKE_EXPORT void fake_fail(const char* function, uint64_t nth, int code, int sticky) {
  Locked locked;
  locked.m.failures[function] = {nth, static_cast<CUresult>(code), sticky != 0};
}

// Delays each call of the function before it does anything, so that others get in between.
FAKE_EXPORT void fake_delay(const char* function, double microseconds) {
  Locked locked;
  locked.m.delays[function] = microseconds;
}

// ---- Device memory

FAKE_EXPORT uint64_t fake_malloc(int device, uint64_t size) {
  Locked locked;
  if (device < 0 || device >= locked.m.devices || size == 0) return 0;
  return locked.m.Allocate(device, size);
}

// Frees in the order of a stream, like a caching allocator. Without one (has_stream = 0) nothing may be in flight.
FAKE_EXPORT int fake_free(uint64_t address, int has_stream, uint64_t handle) {
  Locked locked;
  Allocation* allocation = locked.m.Find({address, 1});
  StreamPtr stream = has_stream && allocation ? Find(locked.m, allocation->device, handle) : nullptr;
  if (!allocation || (has_stream && !stream)) return CUDA_ERROR_INVALID_VALUE;
  locked.m.Free(stream, address);
  return CUDA_SUCCESS;
}

// Writes and reads of the test, outside every order.
FAKE_EXPORT int fake_write(uint64_t address, const void* bytes, uint64_t size) {
  Locked locked;
  if (!locked.m.Find({address, size})) return CUDA_ERROR_INVALID_VALUE;
  locked.m.Poke(address, bytes, size);
  return CUDA_SUCCESS;
}

FAKE_EXPORT int fake_read(uint64_t address, void* bytes, uint64_t size) {
  Locked locked;
  if (!locked.m.Find({address, size})) return CUDA_ERROR_INVALID_VALUE;
  locked.m.Peek(address, bytes, size);
  return CUDA_SUCCESS;
}

// ---- Streams and kernels

FAKE_EXPORT uint64_t fake_stream(int device, int blocking) {
  Locked locked;
  return device >= 0 && device < locked.m.devices ? locked.m.MakeStream(device, blocking, false)->handle : 0;
}

// Launches a kernel that fills ranges with bytes; with a fault it breaks the context instead. Returns an error.
FAKE_EXPORT int fake_kernel(int device, uint64_t handle, const char* name, double microseconds, const uint64_t* writes,
                            uint64_t write_count, int fault) {
  Locked locked;
  Machine& m = locked.m;
  StreamPtr stream = Find(m, device, handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  auto op = std::make_shared<Op>(Op{Kind::kKernel});
  op->name = name;
  op->duration = std::chrono::microseconds(static_cast<int64_t>(microseconds));
  op->fault = static_cast<CUresult>(fault);
  for (uint64_t i = 0; i < write_count; ++i) {
    op->writes.push_back({{writes[3 * i], writes[3 * i + 1]}, static_cast<uint8_t>(writes[3 * i + 2])});
    Allocation* allocation = m.Find(op->writes.back().range);
    if (!allocation) return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (allocation->freed) m.Violation("kernel '" + op->name + "' uses device memory after its free");
  }
  return m.Enqueue(stream, op);
}

// Waits on the host for all work on the device (-1: on all).
FAKE_EXPORT int fake_synchronize(int device, int seconds) {
  Locked locked;
  Machine& m = locked.m;
  std::vector<OpPtr> tails;
  m.EachStream([&](const StreamPtr& stream) {
    if (stream->tail && (device < 0 || stream->device == device)) tails.push_back(stream->tail);
  });
  for (const OpPtr& op : tails) {
    if (!m.WaitFor(locked.lock, op, std::chrono::seconds(seconds))) return CUDA_ERROR_TIMEOUT;
    m.Observe(op);
  }
  for (int i = 0; i < m.devices; ++i) {
    if ((device < 0 || device == i) && m.fault[i]) return m.fault[i];
  }
  return CUDA_SUCCESS;
}

FAKE_EXPORT int fake_begin_capture(int device, uint64_t handle, int mode) {
  Locked locked;
  StreamPtr stream = Find(locked.m, device, handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  return locked.m.BeginCapture(stream, static_cast<CUstreamCaptureMode>(mode));
}

// Returns the number of the graph, or minus an error.
FAKE_EXPORT int fake_end_capture(int device, uint64_t handle) {
  Locked locked;
  StreamPtr stream = Find(locked.m, device, handle);
  if (!stream) return -CUDA_ERROR_INVALID_HANDLE;
  int graph = 0;
  if (CUresult e = locked.m.EndCapture(stream, &graph)) return -e;
  return graph;
}

FAKE_EXPORT int fake_replay(int device, uint64_t handle, int graph) {
  Locked locked;
  StreamPtr stream = Find(locked.m, device, handle);
  if (!stream || graph < 0 || graph >= static_cast<int>(locked.m.graphs.size())) return CUDA_ERROR_INVALID_HANDLE;
  for (const Op& op : locked.m.graphs[graph]->ops) {
    if (CUresult e = locked.m.Enqueue(stream, std::make_shared<Op>(op))) return e;
  }
  return CUDA_SUCCESS;
}

// ---- Reports

FAKE_EXPORT const char* fake_violations() { return Text(Machine::Get().Violations()); }

FAKE_EXPORT void fake_forget_violations() { Machine::Get().ForgetViolations(); }

FAKE_EXPORT const char* fake_calls() {
  Locked locked;
  return Text(Json(locked.m.calls));
}

// Counts the objects that the driver's functions made and no call has returned.
FAKE_EXPORT const char* fake_live() {
  Locked locked;
  Machine& m = locked.m;
  uint64_t streams = 0, registrations = 0, bytes = 0, contexts = 0;
  for (const auto& [handle, stream] : m.streams) streams += stream->by_driver;
  for (const auto& [begin, registration] : m.registrations) {
    if (registration.by_driver) continue;
    ++registrations;
    bytes += registration.range.size;
  }
  for (int count : m.retained) contexts += count;
  return Text(Json(Numbers{{"streams", streams},
                           {"events", m.events.size()},
                           {"host_allocations", m.registrations.size() - registrations},
                           {"registrations", registrations},
                           {"registered_bytes", bytes},
                           {"contexts", contexts}}));
}

FAKE_EXPORT const char* fake_statistics() {
  Locked locked;
  const Statistics& s = locked.m.statistics;
  return Text(Json(Numbers{{"copies", s.copies},
                           {"pageable_copies", s.pageable_copies},
                           {"bytes_to_device", s.bytes_to_device},
                           {"largest_batch", s.largest_batch},
                           {"peak_in_flight", s.peak_in_flight},
                           {"contexts_created", s.contexts_created}}));
}

// One line for each kernel and copy in the order in which they ended: number, kind, device, stream, bytes, name.
FAKE_EXPORT const char* fake_log() {
  Locked locked;
  std::string text;
  for (const std::string& line : locked.m.log) text += line + "\n";
  return Text(text);
}

// The depth of this thread's stack of contexts.
FAKE_EXPORT int fake_context_depth() { return static_cast<int>(Contexts().size()); }
