// The Python module of the engine; lazyckpt/_engine.pyi describes it.
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <string>

#include "engine/checksum.h"
#include "engine/ring.h"
#include "python/engine_handle.h"
#include "witness/page_witness.h"

namespace lazyckpt {
namespace {

// Swaps two names atomically, which os.rename cannot do.
void RenameExchange(const py::object& a, const py::object& b) {
  constexpr unsigned kRenameExchange = 2;
  const std::string from = ToPath(a), to = ToPath(b);
  if (syscall(SYS_renameat2, AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), kRenameExchange) != 0)
    Raise(Status(errno, "renameat2", to));
}

// A getter that reads the bookkeeping of an engine.
template <class F>
auto Locked(F read) {
  return [read](EngineHandle& e) { return e.get().Locked([&] { return read(e.get()); }); };
}

// The bookkeeping of a ring, for tests. Uses none of its memory.
class RingHandle {
 public:
  RingHandle(size_t capacity, size_t slice) {
    Raise(ring_.Map(capacity, slice));
    ring_.Grow(capacity);
  }
  std::optional<size_t> Allocate(size_t n) {
    std::byte* region = ring_.Allocate(n, ring_.capacity());
    if (region == nullptr) return std::nullopt;
    return static_cast<size_t>(region - ring_.base());
  }
  void Free(size_t offset) { ring_.Free(ring_.base() + offset); }
  size_t used() const { return ring_.used(); }

 private:
  Ring ring_;
};

}  // namespace
}  // namespace lazyckpt

PYBIND11_MODULE(_engine, m) {
  using namespace lazyckpt;
  using namespace pybind11::literals;
  m.doc() = "The native engine of lazyckpt: copies bytes, writes files.";
#ifdef LAZYCKPT_FAULTS
  m.attr("FAULTS") = true;
#else
  m.attr("FAULTS") = false;
#endif

  EngineClass engine_class(m, "Engine");
  engine_class
      .def(py::init([](size_t ring_bytes, size_t chunk_bytes, unsigned io_depth, unsigned copy_threads,
                       const std::string& backend, std::optional<bool> direct, bool pin_ring, size_t copies_in_flight,
                       size_t copies_ahead, bool watch_pages, bool huge_pages, const std::string& fault) {
             return new EngineHandle({ring_bytes, chunk_bytes, io_depth, copy_threads, backend, direct, pin_ring,
                                      copies_in_flight, copies_ahead, watch_pages, huge_pages, fault});
           }),
           py::kw_only(), "ring_bytes"_a, "chunk_bytes"_a, "io_depth"_a, "copy_threads"_a, "backend"_a = "auto",
           "direct"_a = py::none(), "pin_ring"_a = true, "copies_in_flight"_a = 4, "copies_ahead"_a = 64,
           "watch_pages"_a = false, "huge_pages"_a = false, "fault"_a = "")
      .def("reserve", [](EngineHandle& e, size_t bytes) { return e.get().Reserve(bytes); })
      .def("attach",
           [](EngineHandle& e, int ordinal) {
             Engine& engine = e.get();
             Status status;
             bool attached;
             {
               NoGil no_gil;
               attached = engine.Attach(ordinal, &status);
             }
             if (status.error() != ENOENT && status.error() != ENOSYS) Raise(status);
             return attached;
           })
      .def_property_readonly("unpinned", Locked([](Engine& e) { return e.unpinned().operation(); }))
      .def_property_readonly("unbatched", Locked([](Engine& e) { return e.unbatched().operation(); }))
      .def_property_readonly("bounces", Locked([](Engine& e) { return e.bounces(); }))
      .def_property_readonly("ring_bytes", Locked([](Engine& e) { return e.ring().capacity(); }))
      .def_property_readonly("ring_used_bytes", Locked([](Engine& e) { return e.ring().used(); }))
      .def_property_readonly("backend", [](EngineHandle& e) { return e.get().backend_name(); })
      .def_property_readonly(
          "fallback", [](EngineHandle& e) { return e.get().fallback().ok() ? "" : e.get().fallback().message(); });

  py::class_<RingHandle>(m, "Ring")
      .def(py::init<size_t, size_t>(), "capacity"_a, "slice_bytes"_a)
      .def("allocate", &RingHandle::Allocate)
      .def("free", &RingHandle::Free)
      .def_property_readonly("used", &RingHandle::used);

  DefineJob(m, engine_class);
  DefinePlainPickle(m);
  DefineModuleWalk(m);
  DefinePlainPickler(m);
  DefineRangeReader(m);
  DefineSmallArchive(m);
  DefineLeaves(m);
  DefineTensors(m);
  DefineVersions(m);

  m.def(
      "crc32",
      [](const py::buffer& data, uint32_t value) {
        const py::buffer_info info = data.request();
        const auto size = static_cast<size_t>(info.size * info.itemsize);
        if (!PyBuffer_IsContiguous(info.view(), 'C')) throw py::value_error("data: expected contiguous bytes");
        NoGil no_gil;
        return Crc32(value, info.ptr, size);
      },
      "data"_a, "value"_a = 0);
  m.def(
      "crc32_at",
      [](uint64_t pointer, uint64_t size) {
        NoGil no_gil;
        return Crc32(0, reinterpret_cast<const void*>(pointer), size);
      },
      "pointer"_a, "size"_a);
  m.def("crc32_combine", &Crc32Combine);
  m.def("page_witness", [] {
    Status why;
    (void)PageWitness::OfProcess(&why);
    return why.ok() ? std::string() : why.message();
  });
  m.def("huge_pages", [] {
    const Status why = PageWitness::TryCollapse();
    return why.ok() ? std::string() : why.message();
  });
  m.def("rename_exchange", &RenameExchange);
  m.def("probe", &Probe);
}
