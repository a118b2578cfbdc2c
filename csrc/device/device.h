// A device with memory and copy engines of its own, and the copies between it and host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "device/cuda_driver.h"
#include "status.h"

namespace lazyckpt {

struct DeviceCopy {
  std::byte* host;  // no copy leaves the pinned range in which it begins
  uint64_t device;  // an address on the device
  size_t size;      // bytes; not 0
};

// A stream for each kind of copy. Two lead to the host: training waits for eager copies at once, for lazy ones at its
// next step.
enum class Lane : size_t { kEager, kLazy, kRestore };
inline constexpr size_t kLanes = 3;

// Any thread may call; the context and the device that are current in the thread stay as they were. `stream` is a
// handle of the caller's; 0 is the default stream of the device. No function throws.
class Device {
 public:
  using Ticket = void*;

  virtual ~Device() = default;  // every copy must be finished

  // Makes later copies wait for the work already enqueued on `stream`.
  virtual Status CopyAfter(uint64_t stream) = 0;
  // Makes later work on `stream` wait for the copies started so far in `lane`. Does not block.
  virtual Status RunAfterCopies(Lane lane, uint64_t stream) = 0;
  // Whether `stream` is being captured into a graph. The only function that may be called during a capture.
  virtual Status IsCapturing(uint64_t stream, bool* capturing) = 0;

  // Enqueues copies in a lane and returns. On an error none is under way and *ticket is null. `pinned`: whether the
  // host memory is.
  virtual Status Start(Lane lane, std::span<const DeviceCopy> copies, bool pinned, Ticket* ticket) = 0;
  // Returns when these copies no longer read sources or write to host memory, even on an error, unless the device is
  // lost. Once for each ticket.
  virtual Status Finish(Lane lane, Ticket ticket) = 0;

  // The calls of the driver that Start takes for so many copies, if the memory is pinned.
  virtual size_t CallsFor(size_t copies) const = 0;
  // Why copies are not batched although the driver has the function; OK if none was refused.
  virtual Status unbatched() const = 0;

  // Pins host memory for every device of the process. Copies from and to unpinned memory run at a third of the speed
  // or less.
  virtual Status Pin(std::span<std::byte> memory) = 0;
  virtual void Unpin(std::span<std::byte> memory) = 0;
  // Allocates pinned host memory, which may work where Pin is refused.
  virtual Status AllocatePinned(size_t bytes, std::byte** memory) = 0;
  virtual void FreePinned(std::byte* memory) = 0;
};

// Retains the primary context of a CUDA device, which torch uses, too, until the device is destroyed. Many small copies
// become one call of the driver where it supports that, unless LAZYCKPT_CUDA_BATCHES=0.
std::unique_ptr<Device> OpenCudaDevice(std::shared_ptr<const cuda::Driver> driver, int ordinal, Status* status);

}  // namespace lazyckpt
