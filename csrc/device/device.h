// A device with memory and copy engines of its own, and how its bytes reach the staging ring.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "device/cuda_driver.h"
#include "status.h"

namespace lazyckpt {

struct DeviceCopy {
  std::byte* host;  // no copy leaves the pinned range that it begins in
  uint64_t device;  // an address there
  size_t size;      // not 0
};

// A stream for each. Two lead to the host: training waits for eager copies at once, and for lazy ones at its next step.
enum class Lane : size_t { kEager, kLazy, kRestore };
inline constexpr size_t kLanes = 3;

// Any thread may call; what is current in that thread, a device or a context, stays as it was. `stream` is the
// caller's, by its handle; 0 is the default stream of the device.
class Device {
 public:
  using Ticket = void*;

  virtual ~Device() = default;  // every copy must have been finished

  virtual int numa_node() const = 0;  // of the host memory next to it; negative if the driver knows none

  // What is copied from now on is what it will be when all that `stream` holds by now is done.
  virtual Status CopyAfter(uint64_t stream) = 0;
  // What is put into `stream` from now on waits for the copies started so far in `lane`; the caller does not.
  virtual Status RunAfterCopies(Lane lane, uint64_t stream) = 0;
  // Whether `stream` is being captured into a graph. May be called even then, as nothing else may.
  virtual Status IsCapturing(uint64_t stream, bool* capturing) = 0;

  // Puts copies into the lane and returns. On an error none of them is under way any more.
  // pinned: so is the host memory.
  virtual Status Start(Lane lane, std::span<const DeviceCopy> copies, bool pinned, Ticket* ticket) = 0;
  // Returns when these copies are complete: nothing reads the sources or writes to the ring any more. So it is on an
  // error, too, unless the device is lost.
  virtual Status Finish(Lane lane, Ticket ticket) = 0;

  // Pins host memory for every device of the process; without, copies work, but at a third of the speed or less.
  virtual Status Pin(std::span<std::byte> memory) = 0;
  virtual void Unpin(std::span<std::byte> memory) = 0;
  // Makes host memory that is pinned so; a device may take this where it refuses to pin what is there already.
  virtual Status AllocatePinned(size_t bytes, std::byte** memory) = 0;
  virtual void FreePinned(std::byte* memory) = 0;
};

// Retains the primary context of a CUDA device, the one that torch uses, until it is destroyed.
// Many small copies are one call of the driver, where it can do that, unless LAZYCKPT_CUDA_BATCHES=0.
std::unique_ptr<Device> OpenCudaDevice(std::shared_ptr<const cuda::Driver> driver, int ordinal, Status* status);

}  // namespace lazyckpt
