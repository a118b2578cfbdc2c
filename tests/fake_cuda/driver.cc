// The driver's functions that lazyckpt uses, with their names, ABI and errors. A forbidden call returns the driver's
// error and is a violation, too, even if the caller handles the error.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "machine.h"

namespace fake {
namespace {

constexpr uint64_t kContext = 0x40000000;  // a device's primary context

thread_local std::vector<int> contexts;  // devices, the current one last
thread_local bool told_deinitialized = false;

CUcontext ContextOf(int device) { return reinterpret_cast<CUcontext>(kContext + 16 * device); }

// The conditions of a function; kUnsafe: not during a capture; kAlways: even after the end.
enum Needs : unsigned { kNothing = 0, kInit = 1, kContextToo = 3, kUnsafe = 4, kAlways = 8 };

// One call of a function: holds the lock and checks the conditions.
class Call {
 public:
  Call(const char* name, unsigned needs) : m(Machine::Get()), name_(name) {
    if (m.InChild()) {
      m.Violation(std::string(name) + " was called in a forked child");
      result = CUDA_ERROR_NOT_INITIALIZED;
      return;
    }
    lock = std::unique_lock(m.mu);
    ++m.calls[name];
    if (const auto delay = m.delays.find(name); delay != m.delays.end()) {
      const std::chrono::duration<double, std::micro> time(delay->second);
      lock.unlock();
      std::this_thread::sleep_for(time);
      lock.lock();
    }
    result = Check(needs);
  }

  CUresult Fail(CUresult code, const std::string& why) {
    m.Violation(std::string(name_) + ": " + why);
    return code;
  }

  CUresult Deinitialized() {
    if (told_deinitialized) m.Violation(std::string(name_) + " was called after CUDA_ERROR_DEINITIALIZED");
    told_deinitialized = true;
    return CUDA_ERROR_DEINITIALIZED;
  }

  int device() const { return contexts.back(); }

  // A live stream; the NULL stream is that of the current context.
  CUresult Find(CUstream handle, StreamPtr* stream) {
    const auto number = reinterpret_cast<uint64_t>(handle);
    if (number <= 1) {
      if (contexts.empty() || device() >= m.devices) {
        return Fail(CUDA_ERROR_INVALID_CONTEXT, "the NULL stream needs a current context");
      }
      *stream = m.legacy[device()];
      return m.fault[device()];
    }
    auto it = m.streams.find(number);
    if (it == m.streams.end()) return Fail(CUDA_ERROR_INVALID_HANDLE, "no such stream");
    *stream = it->second;
    return m.fault[it->second->device];
  }

  CUresult Find(CUevent handle, Event** event) {
    auto it = m.events.find(reinterpret_cast<uint64_t>(handle));
    if (it == m.events.end()) return Fail(CUDA_ERROR_INVALID_HANDLE, "no such event");
    *event = &it->second;
    return m.fault[it->second.device];
  }

  Machine& m;
  std::unique_lock<std::mutex> lock;
  CUresult result = CUDA_SUCCESS;

 private:
  CUresult Check(unsigned needs) {
    if (m.deinitialized && !(needs & kAlways)) return Deinitialized();
    told_deinitialized = false;
    if ((needs & kInit) && !m.initialized) return Fail(CUDA_ERROR_NOT_INITIALIZED, "before cuInit");
    if (auto it = m.failures.find(name_); it != m.failures.end()) {
      Failure& failure = it->second;
      if (failure.countdown > 0) --failure.countdown;
      if (failure.countdown == 0) {
        const CUresult code = failure.code;
        if (!failure.sticky) m.failures.erase(it);
        return code;
      }
    }
    if ((needs & kContextToo) == kContextToo) {
      if (contexts.empty()) return Fail(CUDA_ERROR_INVALID_CONTEXT, "no context is current");
      if (contexts.back() >= m.devices) return Fail(CUDA_ERROR_INVALID_CONTEXT, "the context is of another machine");
      if (m.retained[device()] == 0) return Fail(CUDA_ERROR_INVALID_CONTEXT, "the current context was released");
      if (m.fault[device()] != CUDA_SUCCESS) return m.fault[device()];
    }
    if ((needs & kUnsafe) && m.BreakCaptures(name_)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return CUDA_SUCCESS;
  }

  const char* name_;
};

#define ENTER(name, needs)             \
  Call call(#name, needs);             \
  if (call.result) return call.result; \
  [[maybe_unused]] Machine& m = call.m

CUresult Copied(Call& call, uint64_t device_address, uint64_t host, uint64_t size, bool to_host, Copy* copy) {
  Machine& m = call.m;
  Allocation* allocation = m.Find({device_address, size});
  if (!allocation) return call.Fail(CUDA_ERROR_INVALID_VALUE, "not a range of device memory");
  if (allocation->freed) return call.Fail(CUDA_ERROR_INVALID_VALUE, "use of device memory after its free");
  if (m.IsDeviceAddress(host)) return call.Fail(CUDA_ERROR_INVALID_VALUE, "a device pointer in the host's place");
  auto registration = m.FindRegistration({host, size});
  if (!registration) return call.Fail(CUDA_ERROR_INVALID_VALUE, "the copy crosses the end of a registration");
  const bool pinned = *registration && ((*registration)->portable || (*registration)->device == call.device());
  *copy = Copy{device_address, host, size, to_host, pinned};
  return CUDA_SUCCESS;
}

CUresult CheckDevice(Call& call, const StreamPtr& stream, const Copy& copy) {
  const Allocation* allocation = call.m.Find({copy.device_address, copy.size});
  if (allocation->device == stream->device) return CUDA_SUCCESS;
  return call.Fail(CUDA_ERROR_INVALID_VALUE, "memory of device " + std::to_string(allocation->device) +
                                                 " on a stream of device " + std::to_string(stream->device));
}

CUresult Launch(Call& call, const StreamPtr& stream, const OpPtr& op) {
  Machine& m = call.m;
  bool pageable = false;
  for (const Copy& copy : op->copies) pageable |= !copy.pinned;
  const bool captured = stream->capture != nullptr;
  if (CUresult e = m.Enqueue(stream, op)) return e;
  if (captured) return CUDA_SUCCESS;
  for (const Copy& copy : op->copies) {
    ++m.statistics.copies;
    m.statistics.pageable_copies += !copy.pinned;
    if (!copy.to_host) m.statistics.bytes_to_device += copy.size;
  }
  if (!pageable) return CUDA_SUCCESS;
  if (!m.WaitFor(call.lock, op, std::chrono::hours(1))) return call.Deinitialized();
  if (op->to_host()) m.Observe(op);  // to a device, only the read of the source is over
  return m.fault[stream->device];
}

CUresult CopyAsync(Call& call, uint64_t device_address, uint64_t host, size_t size, bool to_host, CUstream handle) {
  StreamPtr stream;
  if (CUresult e = call.Find(handle, &stream)) return e;
  if (size == 0) return CUDA_SUCCESS;
  auto op = std::make_shared<Op>(Op{Kind::kCopy});
  op->copies.resize(1);
  if (CUresult e = Copied(call, device_address, host, size, to_host, &op->copies[0])) return e;
  if (CUresult e = CheckDevice(call, stream, op->copies[0])) return e;
  return Launch(call, stream, op);
}

}  // namespace

std::vector<int>& Contexts() { return contexts; }

}  // namespace fake

using namespace fake;

FAKE_EXPORT CUresult cuInit(unsigned flags) {
  ENTER(cuInit, kNothing);
  if (flags != 0) return call.Fail(CUDA_ERROR_INVALID_VALUE, "flags");
  if (m.devices == 0) return CUDA_ERROR_NO_DEVICE;
  m.initialized = true;
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuDriverGetVersion(int* version) {
  ENTER(cuDriverGetVersion, kNothing);
  *version = m.config.driver_version;
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuGetErrorName(CUresult error, const char** text) {
  ENTER(cuGetErrorName, kAlways);
  static const std::map<CUresult, const char*> names{{CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
                                                     {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
                                                     {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
                                                     {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
                                                     {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
                                                     {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"},
                                                     {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
                                                     {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN"}};
  const auto found = names.find(error);
  *text = found == names.end() ? nullptr : found->second;
  return *text == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuDeviceGetCount(int* count) {
  ENTER(cuDeviceGetCount, kInit);
  *count = m.devices;
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  ENTER(cuDeviceGet, kInit);
  if (ordinal < 0 || ordinal >= m.devices) return call.Fail(CUDA_ERROR_INVALID_DEVICE, "no such device");
  *device = ordinal;
  return CUDA_SUCCESS;
}

static CUresult CheckOrdinal(Call& call, CUdevice device) {
  if (device >= 0 && device < call.m.devices) return CUDA_SUCCESS;
  return call.Fail(CUDA_ERROR_INVALID_DEVICE, "no such device");
}

FAKE_EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  ENTER(cuDeviceGetAttribute, kInit);
  if (CUresult e = CheckOrdinal(call, device)) return e;
  if (attribute == CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM)
    return *value = m.config.host_pointers, CUDA_SUCCESS;
  if (attribute == CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED) return *value = 1, CUDA_SUCCESS;
  return call.Fail(CUDA_ERROR_INVALID_VALUE, "attribute " + std::to_string(attribute) + " is not imitated");
}

// ---- Contexts

FAKE_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  ENTER(cuDevicePrimaryCtxRetain, kInit);
  if (CUresult e = CheckOrdinal(call, device)) return e;
  if (m.retained[device]++ == 0) ++m.statistics.contexts_created;
  *context = ContextOf(device);
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  ENTER(cuDevicePrimaryCtxRelease_v2, kInit);
  if (CUresult e = CheckOrdinal(call, device)) return e;
  if (m.retained[device] == 0) return call.Fail(CUDA_ERROR_INVALID_CONTEXT, "not retained");
  --m.retained[device];
  return CUDA_SUCCESS;
}

static CUresult DeviceOf(Call& call, CUcontext context, int* device) {
  for (*device = 0; *device < call.m.devices; ++*device) {
    if (context == ContextOf(*device) && call.m.retained[*device] > 0) return CUDA_SUCCESS;
  }
  return call.Fail(CUDA_ERROR_INVALID_CONTEXT, "no such context, or not retained");
}

FAKE_EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
  ENTER(cuCtxSetCurrent, kInit);
  int device = 0;
  if (context) {
    if (CUresult e = DeviceOf(call, context, &device)) return e;
  }
  if (!Contexts().empty()) Contexts().pop_back();
  if (context) Contexts().push_back(device);
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  ENTER(cuCtxGetCurrent, kInit);
  *context = Contexts().empty() ? nullptr : ContextOf(Contexts().back());
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) {
  ENTER(cuCtxPushCurrent_v2, kInit);
  int device = 0;
  if (CUresult e = DeviceOf(call, context, &device)) return e;
  Contexts().push_back(device);
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  ENTER(cuCtxPopCurrent_v2, kInit);
  if (Contexts().empty()) return call.Fail(CUDA_ERROR_INVALID_CONTEXT, "no context is current");
  if (context) *context = ContextOf(Contexts().back());
  Contexts().pop_back();
  return CUDA_SUCCESS;
}

// ---- Streams and events

FAKE_EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  ENTER(cuThreadExchangeStreamCaptureMode, kInit);
  if (*mode < CU_STREAM_CAPTURE_MODE_GLOBAL || *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
    return call.Fail(CUDA_ERROR_INVALID_VALUE, "mode");
  std::swap(*mode, CaptureMode());
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  ENTER(cuStreamCreate, kContextToo | kUnsafe);
  if (flags > CU_STREAM_NON_BLOCKING) return call.Fail(CUDA_ERROR_INVALID_VALUE, "flags");
  *stream = reinterpret_cast<CUstream>(m.MakeStream(call.device(), flags != CU_STREAM_NON_BLOCKING, true)->handle);
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuStreamDestroy_v2(CUstream handle) {
  ENTER(cuStreamDestroy_v2, kContextToo | kUnsafe);
  StreamPtr stream;
  if (CUresult e = call.Find(handle, &stream)) return e;
  if (stream->legacy) return call.Fail(CUDA_ERROR_INVALID_HANDLE, "the NULL stream");
  m.DestroyStream(stream->handle);
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  ENTER(cuStreamIsCapturing, kInit);
  StreamPtr stream;
  if (CUresult e = call.Find(handle, &stream)) return e;
  if (m.ImplicitCapture(stream)) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  *status = !stream->capture               ? CU_STREAM_CAPTURE_STATUS_NONE
            : stream->capture->invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                           : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned flags) {
  ENTER(cuStreamWaitEvent, kContextToo);
  StreamPtr stream;
  Event* event = nullptr;
  if (CUresult e = call.Find(handle, &stream)) return e;
  if (CUresult e = call.Find(event_handle, &event)) return e;
  if (flags != 0) return call.Fail(CUDA_ERROR_INVALID_VALUE, "flags");
  return m.Wait(stream, *event);
}

FAKE_EXPORT CUresult cuEventCreate(CUevent* event, unsigned flags) {
  ENTER(cuEventCreate, kContextToo);
  if (flags > 7) return call.Fail(CUDA_ERROR_INVALID_VALUE, "flags");
  static uint64_t next = 0;
  const uint64_t handle = 0x60000000 + 16 * ++next;
  m.events[handle] = Event{call.device(), nullptr, nullptr, 0};
  *event = reinterpret_cast<CUevent>(handle);
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuEventDestroy_v2(CUevent handle) {
  ENTER(cuEventDestroy_v2, kContextToo);
  Event* event = nullptr;
  if (CUresult e = call.Find(handle, &event)) return e;
  m.events.erase(reinterpret_cast<uint64_t>(handle));
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
  ENTER(cuEventRecord, kContextToo);
  StreamPtr stream;
  Event* event = nullptr;
  if (CUresult e = call.Find(stream_handle, &stream)) return e;
  if (CUresult e = call.Find(handle, &event)) return e;
  if (event->device != stream->device) {
    return call.Fail(CUDA_ERROR_INVALID_HANDLE, "the event and the stream are of different contexts");
  }
  return m.Record(stream, event);
}

static CUresult CapturedEvent(Call& call, Event* event) {
  if (!event->capture) return CUDA_SUCCESS;
  event->capture->invalidated = true;
  return call.Fail(CUDA_ERROR_CAPTURED_EVENT, "the event was last recorded in a capture");
}

FAKE_EXPORT CUresult cuEventSynchronize(CUevent handle) {
  ENTER(cuEventSynchronize, kContextToo | kUnsafe);
  Event* event = nullptr;
  if (CUresult e = call.Find(handle, &event)) return e;
  if (CUresult e = CapturedEvent(call, event)) return e;
  OpPtr op = event->recorded;
  if (!op) return CUDA_SUCCESS;
  if (!m.WaitFor(call.lock, op, std::chrono::hours(1))) return call.Deinitialized();
  m.Observe(op);
  return m.fault[op->device];
}

// ---- Memory

FAKE_EXPORT CUresult cuMemcpyDtoHAsync_v2(void* host, CUdeviceptr device, size_t size, CUstream stream) {
  ENTER(cuMemcpyDtoHAsync_v2, kContextToo);
  return CopyAsync(call, device, reinterpret_cast<uint64_t>(host), size, true, stream);
}

FAKE_EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr device, const void* host, size_t size, CUstream stream) {
  ENTER(cuMemcpyHtoDAsync_v2, kContextToo);
  return CopyAsync(call, device, reinterpret_cast<uint64_t>(host), size, false, stream);
}

// As of CUDA 12.8, with nine arguments. *fail_index is the copy at fault, or SIZE_MAX.
FAKE_EXPORT CUresult cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                                        CUmemcpyAttributes* attributes, size_t* first, size_t attribute_count,
                                        size_t* fail_index, CUstream handle) {
  ENTER(cuMemcpyBatchAsync, kContextToo);
  if (!fail_index) return call.Fail(CUDA_ERROR_INVALID_VALUE, "failIdx is null");
  *fail_index = SIZE_MAX;
  m.statistics.largest_batch = std::max<uint64_t>(m.statistics.largest_batch, count);
  if (!m.config.host_pointers) m.Violation("cuMemcpyBatchAsync: this device takes no registered memory by its address");
  StreamPtr stream;
  if (CUresult e = call.Find(handle, &stream)) return e;
  if (stream->legacy) return call.Fail(CUDA_ERROR_INVALID_VALUE, "the NULL stream takes no batches");
  if (!to || !from || !sizes || count == 0) return call.Fail(CUDA_ERROR_INVALID_VALUE, "no copies");
  if (!attributes || !first || attribute_count != 1 || first[0] != 0)
    return call.Fail(CUDA_ERROR_INVALID_VALUE, "the fake takes one attribute, for all copies");
  if (attributes->srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM)
    m.Violation("cuMemcpyBatchAsync: the driver may read a source before the stream has waited");
  auto op = std::make_shared<Op>(Op{Kind::kCopy});
  for (size_t i = 0; i < count; ++i) {
    *fail_index = i;
    if (sizes[i] == 0) return call.Fail(CUDA_ERROR_INVALID_VALUE, "an empty copy");
    const bool to_host = m.IsDeviceAddress(from[i]);
    Copy copy;
    if (CUresult e = Copied(call, to_host ? from[i] : to[i], to_host ? to[i] : from[i], sizes[i], to_host, &copy)) {
      return e;
    }
    if (CUresult e = CheckDevice(call, stream, copy)) return e;
    op->copies.push_back(copy);
  }
  *fail_index = SIZE_MAX;
  std::vector<Range> written;
  for (const Copy& copy : op->copies) written.push_back({copy.to_host ? copy.host : copy.device_address, copy.size});
  std::sort(written.begin(), written.end(), [](Range a, Range b) { return a.begin < b.begin; });
  for (size_t i = 1; i < written.size(); ++i) {
    if (written[i].begin < written[i - 1].end())
      m.Violation("cuMemcpyBatchAsync: two copies of a batch write the same memory");
  }
  return Launch(call, stream, op);
}

FAKE_EXPORT CUresult cuMemHostRegister_v2(void* host, size_t size, unsigned flags) {
  ENTER(cuMemHostRegister_v2, kContextToo | kUnsafe);
  const Range range{reinterpret_cast<uint64_t>(host), size};
  if (!host || size == 0 || flags > 15) return call.Fail(CUDA_ERROR_INVALID_VALUE, "arguments");
  if (!m.HostReadable(range)) return call.Fail(CUDA_ERROR_INVALID_VALUE, "memory that is not mapped");
  uint64_t sum = size;
  for (const auto& [begin, other] : m.registrations) {
    sum += other.range.size;
    if (range.begin < other.range.end() && begin < range.end()) {
      return call.Fail(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "the range is registered in part or whole");
    }
  }
  if (static_cast<double>(sum) > m.config.registration_limit) return static_cast<CUresult>(m.config.registration_error);
  m.registrations[range.begin] = {range, call.device(), (flags & CU_MEMHOSTREGISTER_PORTABLE) != 0};
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuMemHostUnregister(void* host) {
  ENTER(cuMemHostUnregister, kContextToo | kUnsafe);
  auto it = m.registrations.find(reinterpret_cast<uint64_t>(host));
  if (it == m.registrations.end() || it->second.by_driver)
    return call.Fail(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "no such registration");
  std::string by;
  if (m.InUse(it->second.range, &by)) m.Violation("host memory was unregistered while " + by + " is in flight");
  if (!m.HostReadable(it->second.range)) m.Violation("host memory was unmapped before it was unregistered");
  m.registrations.erase(it);
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuMemHostAlloc(void** host, size_t size, unsigned flags) {
  ENTER(cuMemHostAlloc, kContextToo | kUnsafe);
  if (!host || size == 0 || flags > 7) return call.Fail(CUDA_ERROR_INVALID_VALUE, "arguments");
  void* made = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  std::memset(made, 0xA5, size);  // poison, as in fresh device memory
  const Range range{reinterpret_cast<uint64_t>(made), size};
  m.registrations[range.begin] = {range, call.device(), (flags & CU_MEMHOSTALLOC_PORTABLE) != 0, true};
  *host = made;
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuMemFreeHost(void* host) {
  ENTER(cuMemFreeHost, kContextToo | kUnsafe);
  auto it = m.registrations.find(reinterpret_cast<uint64_t>(host));
  if (it == m.registrations.end() || !it->second.by_driver)
    return call.Fail(CUDA_ERROR_INVALID_VALUE, "not memory of the driver");
  std::string by;
  if (m.InUse(it->second.range, &by)) m.Violation("pinned memory was freed while " + by + " is in flight");
  munmap(host, it->second.range.size);
  m.registrations.erase(it);
  return CUDA_SUCCESS;
}
