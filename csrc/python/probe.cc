// What this machine offers to the engine.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <string>

#include "device/cuda_driver.h"
#include "io/backend.h"
#include "python/engine_handle.h"
#include "witness/page_witness.h"

namespace lazyckpt {
namespace {

// Opens a new file with O_DIRECT and asks for its alignment.
void ProbeDirect(const std::string& dir, std::map<std::string, std::string>* facts) {
  std::string path = dir + "/.lazyckpt-probe-XXXXXX";
  const int made = mkstemp(path.data());
  if (made < 0) {
    (*facts)["o_direct"] = std::string("unknown: ") + std::strerror(errno);
    return;
  }
  const int fd = open(path.c_str(), O_WRONLY | O_DIRECT | O_CLOEXEC);
  (*facts)["o_direct"] = fd >= 0 ? "yes" : std::string("no: ") + std::strerror(errno);
  if (fd >= 0) close(fd);
#ifdef STATX_DIOALIGN
  struct statx info{};
  if (statx(made, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 && (info.stx_mask & STATX_DIOALIGN) != 0)
    (*facts)["alignment_bytes"] = std::to_string(info.stx_dio_offset_align);
#endif
  close(made);
  unlink(path.c_str());
}

// Creates no context, which would take memory on the device.
void ProbeCuda(std::map<std::string, std::string>* facts) {
  Status status;
  const auto driver = cuda::Driver::Load(&status);
  int devices = 0;
  if (driver != nullptr) status = driver->Call(driver->cuDeviceGetCount, &devices);
  (*facts)["cuda_driver"] = status.ok() ? "yes" : "no: " + status.operation();
  if (!status.ok()) return;
  const int version = driver->version();
  (*facts)["cuda_version"] = std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  (*facts)["cuda_devices"] = std::to_string(devices);
  (*facts)["cuda_batches"] = driver->has_batches() ? "yes" : "no";
  (*facts)["cuda_pinning"] = "yes";
  for (int ordinal = 0; ordinal < devices; ++ordinal) {
    cuda::CUdevice device = 0;
    int supported = 0;
    status = driver->Call(driver->cuDeviceGet, &device, ordinal);
    constexpr auto kPinning = cuda::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED;
    if (status.ok()) status = driver->Call(driver->cuDeviceGetAttribute, &supported, kPinning, device);
    if (!status.ok()) (*facts)["cuda_pinning"] = "no: " + status.operation();
    if (status.ok() && supported == 0) (*facts)["cuda_pinning"] = "no: device " + std::to_string(ordinal) + " cannot";
  }
}

}  // namespace

std::map<std::string, std::string> Probe(const py::object& folder) {
  const std::string dir = ToPath(folder);
  std::map<std::string, std::string> facts;
  Status status;
  facts["io_uring"] = MakeUringBackend(1, &status) != nullptr ? "yes" : "no: " + status.message();
#ifdef LAZYCKPT_HAVE_LIBDEFLATE
  facts["crc32"] = "libdeflate";
#else
  facts["crc32"] = "zlib";
#endif
  ProbeDirect(dir, &facts);
  facts["fuse"] = IsOnFuse(dir) ? "yes" : "no";
  facts["page_witness"] = PageWitness::OfProcess(&status) != nullptr ? "yes" : "no: " + status.message();
  status = PageWitness::TryCollapse();
  facts["huge_pages"] = status.ok() ? "yes" : "no: " + status.message();
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0)
    facts["memlock_bytes"] = limit.rlim_cur == RLIM_INFINITY ? "unlimited" : std::to_string(limit.rlim_cur);
  ProbeCuda(&facts);
  return facts;
}

}  // namespace lazyckpt
