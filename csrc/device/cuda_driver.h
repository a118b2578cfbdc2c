// The functions of the CUDA driver that the engine uses, looked up at run time: nothing links to CUDA, so one build
// serves machines with and without it. The declarations repeat those of the Toolkit's cuda.h (12.8), under the same
// names.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>

#include "status.h"

namespace lazyckpt::cuda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;

inline constexpr CUresult CUDA_SUCCESS = 0;
inline constexpr CUresult CUDA_ERROR_INVALID_VALUE = 1;
inline constexpr CUresult CUDA_ERROR_DEINITIALIZED = 4;
inline constexpr CUresult CUDA_ERROR_NOT_SUPPORTED = 801;
inline constexpr CUresult CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906;

inline constexpr unsigned CU_STREAM_NON_BLOCKING = 1;
inline constexpr unsigned CU_EVENT_BLOCKING_SYNC = 1;
inline constexpr unsigned CU_EVENT_DISABLE_TIMING = 2;
inline constexpr unsigned CU_EVENT_WAIT_DEFAULT = 0;
inline constexpr unsigned CU_MEMHOSTREGISTER_PORTABLE = 1;
inline constexpr unsigned CU_MEMHOSTALLOC_PORTABLE = 1;

enum CUdevice_attribute : int {
  CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91,
  CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED = 99,
};
enum CUstreamCaptureMode : int { CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1, CU_STREAM_CAPTURE_MODE_RELAXED = 2 };
enum CUstreamCaptureStatus : int { CU_STREAM_CAPTURE_STATUS_NONE = 0 };
enum CUmemcpySrcAccessOrder : int { CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1 };
enum CUmemLocationType : int { CU_MEM_LOCATION_TYPE_INVALID = 0 };

struct CUmemLocation {
  CUmemLocationType type;
  int id;
};

struct CUmemcpyAttributes {
  CUmemcpySrcAccessOrder srcAccessOrder;
  CUmemLocation srcLocHint;
  CUmemLocation dstLocHint;
  unsigned flags;
};

template <class... Parameters>
struct Function {
  const char* name;
  CUresult (*address)(Parameters...);
};

// A table of the driver's functions. Thread-safe. After the driver reports that it is shut down, at the end of the
// process, no function is called any more. The library is never closed, since torch uses it, too.
class Driver {
 private:
  void* library_;
  std::string missing_;  // the first required function that this driver lacks
  mutable std::atomic<bool> gone_ = false;

  void* Find(const char* name) const;
  struct Find_ {  // converts to the Function of that name
    Driver* driver;
    const char* name;
    bool required = true;
    template <class... Parameters>
    operator Function<Parameters...>() const {
      void* address = driver->Find(name);
      if (address == nullptr && required && driver->missing_.empty()) driver->missing_ = name;
      return {name, reinterpret_cast<CUresult (*)(Parameters...)>(address)};
    }
  };

  explicit Driver(void* library);

 public:
  // Returns nullptr, with the reason, if there is no driver or it is too old.
  static std::shared_ptr<const Driver> Load(Status* status);
  Driver(const Driver&) = delete;

  template <class... Parameters, class... Arguments>
  CUresult Result(const Function<Parameters...>& function, Arguments... arguments) const {
    if (gone_) return CUDA_ERROR_DEINITIALIZED;
    const CUresult result = function.address(arguments...);
    if (result == CUDA_ERROR_DEINITIALIZED) gone_ = true;
    return result;
  }

  // EIO with the name of the function and the driver's name for the error.
  template <class... Parameters, class... Arguments>
  Status Call(const Function<Parameters...>& function, Arguments... arguments) const {
    return Check(function.name, Result(function, arguments...));
  }
  Status Check(const char* name, CUresult result) const;

  int version() const { return version_; }  // 1000 * major + 10 * minor, of CUDA
  bool has_batches() const { return cuMemcpyBatchAsync.address != nullptr && version_ >= 12080; }

  // Exact names: some without a suffix take 32-bit pointers or have older semantics than cuda.h describes.
  const Function<unsigned> cuInit = Find_{this, "cuInit"};
  const Function<int*> cuDriverGetVersion = Find_{this, "cuDriverGetVersion"};
  const Function<CUresult, const char**> cuGetErrorName = Find_{this, "cuGetErrorName"};
  const Function<int*> cuDeviceGetCount = Find_{this, "cuDeviceGetCount"};
  const Function<CUdevice*, int> cuDeviceGet = Find_{this, "cuDeviceGet"};
  const Function<int*, CUdevice_attribute, CUdevice> cuDeviceGetAttribute = Find_{this, "cuDeviceGetAttribute"};
  const Function<CUcontext*, CUdevice> cuDevicePrimaryCtxRetain = Find_{this, "cuDevicePrimaryCtxRetain"};
  const Function<CUdevice> cuDevicePrimaryCtxRelease = Find_{this, "cuDevicePrimaryCtxRelease_v2"};
  const Function<CUcontext*> cuCtxGetCurrent = Find_{this, "cuCtxGetCurrent"};
  const Function<CUcontext> cuCtxSetCurrent = Find_{this, "cuCtxSetCurrent"};
  const Function<CUstreamCaptureMode*> cuThreadExchangeStreamCaptureMode =
      Find_{this, "cuThreadExchangeStreamCaptureMode"};
  const Function<CUstream*, unsigned> cuStreamCreate = Find_{this, "cuStreamCreate"};
  const Function<CUstream> cuStreamDestroy = Find_{this, "cuStreamDestroy_v2"};
  const Function<CUstream, CUevent, unsigned> cuStreamWaitEvent = Find_{this, "cuStreamWaitEvent"};
  const Function<CUstream, CUstreamCaptureStatus*> cuStreamIsCapturing = Find_{this, "cuStreamIsCapturing"};
  const Function<CUevent*, unsigned> cuEventCreate = Find_{this, "cuEventCreate"};
  const Function<CUevent> cuEventDestroy = Find_{this, "cuEventDestroy_v2"};
  const Function<CUevent, CUstream> cuEventRecord = Find_{this, "cuEventRecord"};
  const Function<CUevent> cuEventSynchronize = Find_{this, "cuEventSynchronize"};
  const Function<void*, CUdeviceptr, size_t, CUstream> cuMemcpyDtoHAsync = Find_{this, "cuMemcpyDtoHAsync_v2"};
  const Function<CUdeviceptr, const void*, size_t, CUstream> cuMemcpyHtoDAsync = Find_{this, "cuMemcpyHtoDAsync_v2"};
  const Function<void*, size_t, unsigned> cuMemHostRegister = Find_{this, "cuMemHostRegister_v2"};
  const Function<void*> cuMemHostUnregister = Find_{this, "cuMemHostUnregister"};
  const Function<void**, size_t, unsigned> cuMemHostAlloc = Find_{this, "cuMemHostAlloc"};
  const Function<void*> cuMemFreeHost = Find_{this, "cuMemFreeHost"};
  // CUDA 12.8's, with failIdx. CUDA 13 declares another function under this name, exported with _v2.
  const Function<CUdeviceptr*, CUdeviceptr*, size_t*, size_t, CUmemcpyAttributes*, size_t*, size_t, size_t*, CUstream>
      cuMemcpyBatchAsync = Find_{this, "cuMemcpyBatchAsync", false};

 private:
  int version_ = 0;
};

}  // namespace lazyckpt::cuda
