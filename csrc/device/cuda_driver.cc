#include "device/cuda_driver.h"

#include <dlfcn.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>

namespace lazyckpt::cuda {
namespace {

const char* LibraryName() {
#ifdef LAZYCKPT_FAULTS
  if (const char* path = std::getenv("LAZYCKPT_CUDA_LIBRARY")) return path;
#endif
  return "libcuda.so.1";
}

}  // namespace

std::shared_ptr<const Driver> Driver::Load(Status* status) {
  void* library = dlopen(LibraryName(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    *status = Status(ENOENT, std::string("no CUDA driver: ") + LibraryName(), "");
    return nullptr;
  }
  std::shared_ptr<Driver> driver(new Driver(library));
  if (!driver->missing_.empty()) {
    *status = Status(ENOSYS, "the CUDA driver is too old: it has no " + driver->missing_, "");
    return nullptr;
  }
  *status = driver->Call(driver->cuInit, 0u);
  if (status->ok()) *status = driver->Call(driver->cuDriverGetVersion, &driver->version_);
  return status->ok() ? driver : nullptr;
}

Driver::Driver(void* library) : library_(library) {}

void* Driver::Find(const char* name) const { return dlsym(library_, name); }

Status Driver::Check(const char* name, CUresult result) const {
  if (result == CUDA_SUCCESS) return Status::Ok();
  const char* error = nullptr;
  if (gone_ || cuGetErrorName.address(result, &error) != CUDA_SUCCESS || error == nullptr) error = "CUDA error";
  char text[128];
  std::snprintf(text, sizeof text, "%s: %s (%d)", name, error, static_cast<int>(result));
  return Status(EIO, text, "");
}

}  // namespace lazyckpt::cuda
