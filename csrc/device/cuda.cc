// A CUDA device behind Device: streams, events, batches of copies, pinned memory.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <string_view>
#include <utility>

#include "device/device.h"

namespace lazyckpt {
namespace {

using namespace cuda;

constexpr size_t kBatchFrom = 8;    // copies; fewer are as fast one by one
constexpr size_t kBatchMost = 256;  // copies in a call: drivers were seen to crash on long ones

class CudaDevice final : public Device {
 public:
  CudaDevice(std::shared_ptr<const Driver> driver, int ordinal) : driver_(std::move(driver)), ordinal_(ordinal) {}

  ~CudaDevice() override {
    if (context_ == nullptr) return;
    (void)InsideAnyCapture([this] {
      if (mark_ != nullptr) (void)Call(driver_->cuEventDestroy, mark_);
      for (CUstream stream : streams_)
        if (stream != nullptr) (void)Call(driver_->cuStreamDestroy, stream);
      return Status::Ok();
    });
    (void)Call(driver_->cuDevicePrimaryCtxRelease, device_);
  }

  Status Open() {
    Status status = Call(driver_->cuDeviceGet, &device_, ordinal_);
    if (status.ok()) status = Call(driver_->cuDevicePrimaryCtxRetain, &context_, device_);
    if (!status.ok()) return status;
    batches_ = TakesBatches();
    return Inside([this] {
      // A blocking stream and the default stream would wait for each other.
      for (CUstream& stream : streams_)
        if (Status made = Call(driver_->cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING); !made.ok()) return made;
      return CreateEvent(&mark_);
    });
  }

  Status CopyAfter(uint64_t stream) override {
    return Inside([&] {
      std::lock_guard lock(marking_);
      Status status = Call(driver_->cuEventRecord, mark_, Stream(stream));
      for (CUstream lane : streams_)
        if (status.ok()) status = Call(driver_->cuStreamWaitEvent, lane, mark_, CU_EVENT_WAIT_DEFAULT);
      return status;
    });
  }

  Status RunAfterCopies(Lane lane, uint64_t stream) override {
    return Inside([&] {
      // Record behind the copies now: an event handed from another thread might not be recorded yet.
      std::lock_guard lock(marking_);
      Status status = Call(driver_->cuEventRecord, mark_, StreamOf(lane));
      if (status.ok()) status = Call(driver_->cuStreamWaitEvent, Stream(stream), mark_, CU_EVENT_WAIT_DEFAULT);
      return status;
    });
  }

  Status IsCapturing(uint64_t stream, bool* capturing) override {
    CUcontext before = nullptr;
    if (Status status = Enter(&before); !status.ok()) return status;
    CUstreamCaptureStatus found = CU_STREAM_CAPTURE_STATUS_NONE;
    const CUresult result = driver_->Result(driver_->cuStreamIsCapturing, Stream(stream), &found);
    const Status left = Leave(before);
    // The driver answers for the default stream with an error while another stream is being captured.
    *capturing = result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT || found != CU_STREAM_CAPTURE_STATUS_NONE;
    return *capturing || result == CUDA_SUCCESS ? left : Named(driver_->Check("cuStreamIsCapturing", result));
  }

  Status Start(Lane lane, std::span<const DeviceCopy> copies, bool pinned, Ticket* ticket) override {
    CUevent event = nullptr;
    const Status status = Inside([&] {
      Status done = CreateEvent(&event);
      if (done.ok()) done = Enqueue(copies, lane, pinned);
      if (done.ok()) done = Call(driver_->cuEventRecord, event, StreamOf(lane));
      return done;
    });
    *ticket = event;
    if (!status.ok() && event != nullptr) {  // some copies may be under way
      (void)Inside([&] { return Call(driver_->cuEventRecord, event, StreamOf(lane)); });
      (void)Finish(lane, event);
      *ticket = nullptr;
    }
    return status;
  }

  Status Finish(Lane, Ticket ticket) override {
    auto* event = static_cast<CUevent>(ticket);
    bool over = false;
    const Status status = Inside([&] {
      const Status waited = Call(driver_->cuEventSynchronize, event);
      over = waited.ok();
      if (over) (void)Call(driver_->cuEventDestroy, event);
      return waited;
    });
    if (over) return status;
    (void)Inside([&] {  // the copies may be under way all the same; a lost device fails again
      (void)Call(driver_->cuEventSynchronize, event);
      return Call(driver_->cuEventDestroy, event);
    });
    return status;
  }

  Status Pin(std::span<std::byte> memory) override {
    bool pinned = false;
    const Status status = Inside([&] {
      void* const begin = memory.data();
      const Status done = Call(driver_->cuMemHostRegister, begin, memory.size(), CU_MEMHOSTREGISTER_PORTABLE);
      pinned = done.ok();
      return done;
    });
    if (pinned && !status.ok()) Unpin(memory);
    return status;
  }

  void Unpin(std::span<std::byte> memory) override {
    (void)InsideAnyCapture([&] { return Call(driver_->cuMemHostUnregister, static_cast<void*>(memory.data())); });
  }

  Status AllocatePinned(size_t bytes, std::byte** memory) override {
    void* made = nullptr;
    const Status status = Inside([&] { return Call(driver_->cuMemHostAlloc, &made, bytes, CU_MEMHOSTALLOC_PORTABLE); });
    if (made != nullptr && !status.ok()) FreePinned(static_cast<std::byte*>(std::exchange(made, nullptr)));
    *memory = static_cast<std::byte*>(made);
    return status;
  }

  void FreePinned(std::byte* memory) override {
    (void)InsideAnyCapture([&] { return Call(driver_->cuMemFreeHost, static_cast<void*>(memory)); });
  }

  size_t CallsFor(size_t copies) const override {
    return batches_ && refusal_ == CUDA_SUCCESS ? (copies + kBatchMost - 1) / kBatchMost : copies;
  }

  Status unbatched() const override { return Named(driver_->Check(driver_->cuMemcpyBatchAsync.name, refusal_)); }

 private:
  static CUstream Stream(uint64_t handle) { return reinterpret_cast<CUstream>(handle); }
  CUstream StreamOf(Lane lane) const { return streams_[static_cast<size_t>(lane)]; }

  template <class F, class... Arguments>
  Status Call(const F& function, Arguments... arguments) const {
    return Named(driver_->Call(function, arguments...));
  }

  Status Named(const Status& status) const {
    return status.ok() ? status : Status(status.error(), status.operation(), "cuda:" + std::to_string(ordinal_));
  }

  // Calls `work` with the device's context current, since the handle of the default stream names no device, and in a
  // mode in which graphs that other threads capture neither fail the calls nor are invalidated by them.
  template <class F>
  Status Inside(F work, CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) const {
    CUcontext before = nullptr;
    Status status = Enter(&before);
    if (!status.ok()) return status;
    status = Call(driver_->cuThreadExchangeStreamCaptureMode, &mode);
    if (status.ok()) {
      status = work();
      const Status restored = Call(driver_->cuThreadExchangeStreamCaptureMode, &mode);
      if (status.ok()) status = restored;
    }
    const Status left = Leave(before);
    return status.ok() ? left : status;
  }

  // For calls that give something back: the garbage collector may make them on a thread that captures a graph.
  template <class F>
  Status InsideAnyCapture(F work) const {
    return Inside(work, CU_STREAM_CAPTURE_MODE_RELAXED);
  }

  Status Enter(CUcontext* before) const {
    const Status status = Call(driver_->cuCtxGetCurrent, before);
    return status.ok() && *before != context_ ? Call(driver_->cuCtxSetCurrent, context_) : status;
  }

  // Any call may return the error of earlier work, whether or not it did its own. Setting a context twice is safe;
  // popping twice would remove one of the caller's.
  Status Leave(CUcontext before) const {
    if (before == context_) return Status::Ok();
    const Status status = Call(driver_->cuCtxSetCurrent, before);
    if (!status.ok()) (void)Call(driver_->cuCtxSetCurrent, before);
    return status;
  }

  bool TakesBatches() const {
    const char* const wanted = std::getenv("LAZYCKPT_CUDA_BATCHES");  // "0" where a driver crashes on them
    if (!driver_->has_batches() || (wanted != nullptr && std::string_view(wanted) == "0")) return false;
    // Without this (WSL), a batch into registered memory fails later and breaks the context of the process.
    constexpr auto kByHostAddress = CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM;
    int by_host_address = 0;
    return Call(driver_->cuDeviceGetAttribute, &by_host_address, kByHostAddress, device_).ok() && by_host_address != 0;
  }

  Status Enqueue(std::span<const DeviceCopy> copies, Lane lane, bool pinned) {
    // Some devices refuse batches that touch pageable memory.
    while (pinned && batches_ && refusal_ == CUDA_SUCCESS && copies.size() >= kBatchFrom) {
      const auto batch = copies.first(std::min(copies.size(), kBatchMost));
      const CUresult result = EnqueueBatch(batch, lane);
      if (result == CUDA_ERROR_INVALID_VALUE || result == CUDA_ERROR_NOT_SUPPORTED) {
        // The driver takes no batches, unless it refuses these copies one by one, too.
        if (Status status = EnqueueEach(batch, lane); !status.ok()) return status;
        refusal_ = result;
      } else if (result != CUDA_SUCCESS) {
        return Named(driver_->Check(driver_->cuMemcpyBatchAsync.name, result));
      }
      copies = copies.subspan(batch.size());
    }
    return EnqueueEach(copies, lane);
  }

  Status EnqueueEach(std::span<const DeviceCopy> copies, Lane lane) const {
    CUstream const stream = StreamOf(lane);
    for (const DeviceCopy& c : copies) {
      const Status status = lane == Lane::kRestore ? Call(driver_->cuMemcpyHtoDAsync, CUdeviceptr{c.device},
                                                          static_cast<const void*>(c.host), c.size, stream)
                                                   : Call(driver_->cuMemcpyDtoHAsync, static_cast<void*>(c.host),
                                                          CUdeviceptr{c.device}, c.size, stream);
      if (!status.ok()) return status;
    }
    return Status::Ok();
  }

  CUresult EnqueueBatch(std::span<const DeviceCopy> copies, Lane lane) const {
    std::array<CUdeviceptr, kBatchMost> host, device;
    std::array<size_t, kBatchMost> sizes;
    for (size_t i = 0; i < copies.size(); ++i) {
      host[i] = reinterpret_cast<CUdeviceptr>(copies[i].host);
      device[i] = copies[i].device;
      sizes[i] = copies[i].size;
    }
    CUdeviceptr* const to = lane == Lane::kRestore ? device.data() : host.data();
    CUdeviceptr* const from = lane == Lane::kRestore ? host.data() : device.data();
    // STREAM order: with any other the driver may read before the stream has waited.
    CUmemcpyAttributes attributes{};
    attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    size_t first = 0, failed = 0;
    return driver_->Result(driver_->cuMemcpyBatchAsync, to, from, sizes.data(), copies.size(), &attributes, &first,
                           size_t{1}, &failed, StreamOf(lane));
  }

  Status CreateEvent(CUevent* event) const {
    return Call(driver_->cuEventCreate, event, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC);
  }

  const std::shared_ptr<const Driver> driver_;
  const int ordinal_;
  bool batches_ = false;
  std::atomic<CUresult> refusal_ = CUDA_SUCCESS;  // of the first batch that the driver refused; it is given no other
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  std::array<CUstream, kLanes> streams_{};
  std::mutex marking_;  // from the record of mark_ to the last wait for it
  CUevent mark_ = nullptr;
};

}  // namespace

std::unique_ptr<Device> OpenCudaDevice(std::shared_ptr<const Driver> driver, int ordinal, Status* status) {
  auto device = std::make_unique<CudaDevice>(std::move(driver), ordinal);
  *status = device->Open();
  if (!status->ok()) return nullptr;
  return device;
}

}  // namespace lazyckpt
