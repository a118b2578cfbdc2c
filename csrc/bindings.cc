// The Python face of the engine; _engine.pyi describes it. The only file that knows pybind11.
#include <fcntl.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "checksum.h"
#include "engine.h"
#include "probe.h"
#include "reader.h"
#include "tensors.h"

namespace py = pybind11;

namespace lazyckpt {
namespace {

py::object Returned(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

// Not by pybind11, as of an argument: if that lacks memory, it says so without any, and the process ends.
std::string PathOf(const py::object& path) {
  PyObject* bytes = nullptr;
  if (PyUnicode_FSConverter(path.ptr(), &bytes) == 0) throw py::error_already_set();
  return std::string(py::reinterpret_steal<py::bytes>(bytes));
}

// The one place where a Status becomes an exception: OSError, so that errno and file name reach the user.
void Raise(const Status& status) {
  if (status.ok()) return;
  const auto path = Returned(PyUnicode_DecodeFSDefault(status.path().c_str()));  // it need not be UTF-8
  py::object error = py::module_::import("builtins").attr("OSError")(status.error(), status.message(), path);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw py::error_already_set();
}

template <class T>
std::span<const T> Flat(const py::buffer_info& info, const char* name) {
  if (info.ndim != 1 || info.itemsize != static_cast<py::ssize_t>(sizeof(T)) ||
      (info.size > 1 && info.strides[0] != info.itemsize))
    throw py::value_error(std::string(name) + ": expected a flat array of " + std::to_string(sizeof(T)) +
                          "-byte items");
  return {static_cast<const T*>(info.ptr), static_cast<size_t>(info.size)};
}

template <class T>
std::vector<T> ToVector(const py::buffer& buffer, const char* name) {
  const py::buffer_info info = buffer.request();
  const auto flat = Flat<T>(info, name);
  return {flat.begin(), flat.end()};
}

// Flat pairs of device and handle.
std::vector<StreamRef> ToStreams(const std::optional<py::buffer>& streams) {
  std::vector<StreamRef> refs;
  if (!streams) return refs;
  const auto flat = ToVector<uint64_t>(*streams, "streams");
  if (flat.size() % 2 != 0) throw py::value_error("streams: expected pairs");
  for (size_t i = 0; i < flat.size(); i += 2) refs.push_back({static_cast<int>(flat[i]), flat[i + 1]});
  return refs;
}

// Lets go of the GIL while it lives. If the interpreter ends meanwhile, Python ends a thread that asks for the GIL by
// unwinding its stack, which a destructor does not survive (pybind11's would end the process): it sleeps, as it would
// from Python 3.14 on.
class NoGil {
 public:
  NoGil() : state_(PyEval_SaveThread()) {}
  ~NoGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) pause();
    }
  }
  NoGil(const NoGil&) = delete;

 private:
  PyThreadState* state_;
};

class JobHandle;

// An engine belongs to the process that made it. A forked child inherits the memory but none of the threads:
// there it refuses to work and leaks rather than waits for threads that do not exist.
class EngineHandle {
 public:
  explicit EngineHandle(const EngineOptions& options) {
    Status status;
    {
      NoGil no_gil;
      engine_ = Engine::Create(options, &status).release();
    }
    Raise(status);
  }
  ~EngineHandle() {
    if (getpid() != pid_) return;
    NoGil no_gil;  // it may have to wait for the disk
    delete engine_;
  }
  EngineHandle(const EngineHandle&) = delete;

  bool alive() const { return getpid() == pid_; }
  Engine& get() const {
    if (!alive()) throw std::runtime_error("this engine belongs to the parent of this process");
    return *engine_;
  }

 private:
  Engine* engine_ = nullptr;
  const pid_t pid_ = getpid();
};

// Waits in short steps, so that Ctrl-C works. `wait` is called without the GIL.
template <class F>
bool Interruptible(std::optional<double> timeout_s, F wait) {
  const auto end = timeout_s ? Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                  std::chrono::duration<double>(std::min(*timeout_s, 1e9)))
                             : Clock::time_point::max();
  for (;;) {
    bool done;
    {
      NoGil no_gil;
      done = wait(std::min(end, Clock::now() + std::chrono::milliseconds(100)));
    }
    if (done) return true;
    if (Clock::now() >= end) return false;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

class JobHandle {
 public:
  JobHandle() = default;
  JobHandle(const JobHandle&) = delete;

  void Begin(const std::shared_ptr<EngineHandle>& engine, const py::buffer& pointers, const py::buffer& sizes,
             const py::buffer& owners, size_t files, bool eager_by_caller, const std::optional<py::buffer>& devices,
             const std::optional<py::buffer>& streams) {
    engine_ = engine;
    const auto p = ToVector<uint64_t>(pointers, "pointers");
    const auto s = ToVector<uint64_t>(sizes, "sizes");
    const auto o = ToVector<uint64_t>(owners, "owners");
    if (p.size() != s.size() || p.size() != o.size())
      throw py::value_error("pointers, sizes and owners differ in length");
    std::vector<Source> sources(p.size());
    for (size_t i = 0; i < p.size(); ++i) {
      sources[i].data = reinterpret_cast<const std::byte*>(p[i]);
      sources[i].size = s[i];
      sources[i].owners = o[i];
    }
    if (devices) {
      const auto d = ToVector<int64_t>(*devices, "devices");
      if (d.size() != p.size()) throw py::value_error("pointers and devices differ in length");
      for (size_t i = 0; i < d.size(); ++i) sources[i].device = static_cast<int>(d[i]);
    }
    const auto current = ToStreams(streams);
    Status status;
    {
      NoGil no_gil;
      job_ = engine_->get().Begin(std::move(sources), files, eager_by_caller, current, &status);
    }
    Raise(status);
  }
  ~JobHandle() {
    if (job_ == nullptr) return;
    if (!engine_->alive()) {
      // Some thread of the parent may have been changing it at the fork: not even fit to be destroyed.
      new std::shared_ptr<Job>(std::move(job_));
      return;
    }
    // A job that nobody holds any more cannot be committed. Its sources are about to be freed.
    NoGil no_gil;
    Engine& e = engine_->get();
    e.Fail(*job_, Status(ECANCELED, "checkpoint abandoned", ""));
    e.WaitReleased(*job_, Clock::time_point::max());
  }

  // The rows of a file count its sources from 0; first_source is where they begin among those of the checkpoint.
  void Append(size_t file, uint64_t offset, const py::buffer& rows, const py::bytes& blob, size_t first_source) {
    const py::buffer_info info = rows.request();  // nobody resizes it meanwhile
    const auto flat = Flat<int64_t>(info, "rows");
    if (flat.size() % 3 != 0) throw py::value_error("rows: expected triples");
    static_assert(sizeof(Row) == 3 * sizeof(int64_t));
    const std::span parsed(reinterpret_cast<const Row*>(flat.data()), flat.size() / 3);
    const std::string_view literals = blobs_.emplace_back(blob);
    Status status;
    {
      NoGil no_gil;
      status = engine_->get().Append(*job_, file, offset, parsed, literals, first_source);
    }
    Raise(status);
  }

  void Seal() {
    Status status;
    {
      NoGil no_gil;
      status = engine_->get().Seal(*job_);
    }
    Raise(status);
  }

  void Go() { engine_->get().Go(*job_); }  // with the GIL: who lets go of it here may wait for it

  void Open(size_t file, const py::object& name, uint64_t size) {
    const std::string path = PathOf(name);
    Status status;
    {
      NoGil no_gil;
      status = engine_->get().Open(*job_, file, path, size);
    }
    Raise(status);
  }

  bool WaitEager(std::optional<double> timeout_s) {
    return Interruptible(timeout_s, [this](auto end) { return engine_->get().WaitEager(*job_, end); });
  }
  bool WaitCaptured(uint64_t owners, std::optional<double> timeout_s) {
    return Interruptible(timeout_s, [&](auto end) { return engine_->get().WaitCaptured(*job_, owners, end); });
  }
  bool WaitEnqueued(uint64_t owners, const py::buffer& streams, std::optional<double> timeout_s) {
    const auto refs = ToStreams(streams);
    return Interruptible(timeout_s, [&](auto end) { return engine_->get().WaitEnqueued(*job_, owners, refs, end); });
  }
  bool WaitReleased(std::optional<double> timeout_s) {
    return Interruptible(timeout_s, [&](auto end) { return engine_->get().WaitReleased(*job_, end); });
  }
  bool WaitSettled(std::optional<double> timeout_s) {
    return Interruptible(timeout_s, [&](auto end) { return engine_->get().WaitSettled(*job_, end); });
  }

  void Fail(int error, const py::str& why) {
    const char* text = PyUnicode_AsUTF8(why.ptr());
    if (text == nullptr) PyErr_Clear();
    Status status(error, text == nullptr ? "failed" : text, "");
    NoGil no_gil;
    engine_->get().Fail(*job_, std::move(status));
  }

  void RaiseError() const {
    Raise(engine_->get().Locked([this] { return job_->error; }));
  }

  size_t PendingChunks(uint64_t owners) const {
    return engine_->get().Locked([&] {
      size_t n = 0;
      for (const auto& c : job_->chunks)
        if ((c->owners & owners) != 0 && c->state <= Chunk::State::kCopying) ++n;
      return n;
    });
  }

  std::vector<uint32_t> SourceCrcs() const {
    return engine_->get().Locked([this] {
      std::vector<uint32_t> crcs;
      for (const Source& s : job_->sources) crcs.push_back(s.crc);
      return crcs;
    });
  }

  // (bytes, CRC-32) of each file, from its chunks in file order. Valid when durable.
  std::vector<std::pair<uint64_t, uint32_t>> Files() const {
    return engine_->get().Locked([this] {
      if (!job_->durable()) throw std::runtime_error("the files are not durable yet");
      std::vector<std::vector<const Chunk*>> chunks(job_->files.size());
      for (const auto& c : job_->chunks) chunks[c->file].push_back(c.get());
      std::vector<std::pair<uint64_t, uint32_t>> files;
      for (size_t i = 0; i < chunks.size(); ++i) {
        std::sort(chunks[i].begin(), chunks[i].end(),
                  [](const Chunk* a, const Chunk* b) { return a->offset < b->offset; });
        uint32_t crc = 0;
        for (const Chunk* c : chunks[i]) crc = Crc32Combine(crc, c->crc, c->size);
        files.emplace_back(job_->files[i].size, crc);
      }
      return files;
    });
  }

  py::dict Stats() const {
    const Job& j = *job_;
    std::unordered_map<std::string, double> out;
    engine_->get().Locked([&] {
      const auto since = [&j](Clock::time_point t) {
        return t < j.begin ? 0.0 : std::chrono::duration<double>(t - j.begin).count();
      };
      Clock::time_point first_write = Clock::time_point::max();
      uint64_t bytes = 0;
      size_t eager = 0;
      for (const auto& c : j.chunks) {
        if (c->write_begin > j.begin) first_write = std::min(first_write, c->write_begin);
        bytes += c->size;
      }
      for (const Source& s : j.sources) eager += s.owners == 0 ? s.size : 0;
      const bool wrote = first_write != Clock::time_point::max();
      out = {{"begin", std::chrono::duration<double>(j.begin.time_since_epoch()).count()},
             {"bytes", static_cast<double>(bytes)},
             {"eager_bytes", static_cast<double>(eager)},
             {"chunks", static_cast<double>(j.chunks.size())},
             {"copy_s", j.copy_s},
             {"ring_wait_s", j.ring_wait_s},
             {"captured_s", since(j.captured_at)},
             {"first_write_s", wrote ? since(first_write) : 0.0},
             {"written_s", since(j.written)},
             {"synced_s", since(j.synced)}};
    });
    return py::cast(out);
  }

  // (file, offset, bytes, copy begin, copy end, write begin, write end, waited for the ring); seconds since the job
  // began.
  py::list Timeline() const {
    using Event = std::tuple<size_t, uint64_t, size_t, double, double, double, double, double>;
    const Job& j = *job_;
    std::vector<Event> events = engine_->get().Locked([&] {
      std::vector<Event> all;
      const auto since = [&j](Clock::time_point t) {
        return t < j.begin ? 0.0 : std::chrono::duration<double>(t - j.begin).count();
      };
      for (const auto& c : j.chunks)
        all.emplace_back(c->file, c->offset, c->size, since(c->copy_begin), since(c->copy_end), since(c->write_begin),
                         since(c->write_end), c->ring_wait_s);
      return all;
    });
    return py::cast(events);
  }

 private:
  std::shared_ptr<EngineHandle> engine_;
  std::shared_ptr<Job> job_;
  std::vector<py::bytes> blobs_;  // the engine reads them until its sources are released
};

class ReaderHandle {
 public:
  ReaderHandle(std::shared_ptr<EngineHandle> engine, const std::filesystem::path& path, const py::buffer& offsets,
               const py::buffer& sizes, unsigned threads, unsigned io_depth)
      : engine_(std::move(engine)) {
    const auto o = ToVector<uint64_t>(offsets, "offsets");
    const auto s = ToVector<uint64_t>(sizes, "sizes");
    if (o.size() != s.size()) throw py::value_error("offsets and sizes differ in length");
    std::vector<ReadRange> ranges;
    for (size_t i = 0; i < o.size(); ++i) ranges.push_back({o[i], s[i]});
    Engine& e = engine_->get();
    ReadOptions options;
    options.threads = threads;
    if (io_depth > 0) options.io_depth = io_depth;
    options.backend = e.options().backend;
    options.direct = e.options().direct;
    options.fault = e.options().fault;
    options.upload = [&e](int device, std::byte* to, std::span<std::byte> from) { return e.Upload(device, to, from); };
    options.staging = staging_ = e.Borrow(options.io_depth * kReadBytes);
    Status status;
    {
      NoGil no_gil;
      reader_ = Reader::Start(path.string(), options, std::move(ranges), &status);
    }
    if (!status.ok()) Close();
    Raise(status);
  }
  ~ReaderHandle() { Close(); }

  py::list ReadInto(const py::buffer& pointers, const std::optional<py::buffer>& devices,
                    const std::optional<py::buffer>& streams) {
    const auto p = ToVector<uint64_t>(pointers, "pointers");
    std::vector<int> d(p.size(), -1);
    if (devices) {
      const auto given = ToVector<int64_t>(*devices, "devices");
      d.assign(given.begin(), given.end());
    }
    const auto current = ToStreams(streams);
    Engine& e = engine_->get();
    if (d.size() != p.size()) throw py::value_error("pointers and devices differ in length");
    for (const int device : d)
      if (device >= 0 && std::none_of(current.begin(), current.end(), [&](auto& s) { return s.device == device; }))
        throw py::value_error("a place on a device without a stream");
    if (reader_ == nullptr) throw std::runtime_error("a Reader reads once");
    if (p.size() != reader_->ranges().size()) throw py::value_error("pointers and offsets differ in length");
    std::vector<std::byte*> to;
    for (const uint64_t pointer : p) to.push_back(reinterpret_cast<std::byte*>(pointer));
    Status status;
    {
      NoGil no_gil;
      status = e.CopyAfter(current);
      if (status.ok()) status = reader_->ReadInto(to, d);
    }
    py::list crcs;
    for (const ReadRange& r : reader_->ranges()) crcs.append(r.crc);
    Close();
    Raise(status);
    return crcs;
  }

 private:
  void Close() {
    if (!engine_->alive()) return (void)reader_.release();  // its threads did not survive the fork
    {
      NoGil no_gil;
      reader_.reset();
    }
    engine_->get().GiveBack(std::exchange(staging_, {}));
  }

  const std::shared_ptr<EngineHandle> engine_;
  std::span<std::byte> staging_;
  std::unique_ptr<Reader> reader_;
};

// Swaps two names in one step; os.rename cannot.
void RenameExchange(const py::object& one, const py::object& other) {
  constexpr unsigned kRenameExchange = 2;
  const std::string a = PathOf(one), b = PathOf(other);
  if (syscall(SYS_renameat2, AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), kRenameExchange) != 0)
    Raise(Status(errno, "renameat2", b));
}

// For tests: the bookkeeping of a ring without its memory being used.
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
  int NodeOf(size_t offset) { return ring_.NodeOf(offset); }
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

  py::class_<EngineHandle, std::shared_ptr<EngineHandle>>(m, "Engine")
      .def(py::init([](size_t ring_bytes, size_t chunk_bytes, unsigned io_depth, unsigned copy_threads,
                       const std::string& backend, bool direct, bool register_buffers, bool pin_ring,
                       size_t copies_in_flight, const std::string& fault) {
             EngineOptions o;
             o.max_ring_bytes = ring_bytes;
             o.chunk_bytes = chunk_bytes;
             o.io_depth = io_depth;
             o.copy_threads = copy_threads;
             o.backend = backend;
             o.direct = direct;
             o.register_buffers = register_buffers;
             o.pin_ring = pin_ring;
             o.copies_in_flight = copies_in_flight;
             o.fault = fault;
             return new EngineHandle(o);
           }),
           py::kw_only(), "ring_bytes"_a, "chunk_bytes"_a, "io_depth"_a, "copy_threads"_a, "backend"_a = "auto",
           "direct"_a = true, "register_buffers"_a = true, "pin_ring"_a = true, "copies_in_flight"_a = 4,
           "fault"_a = "")
      .def("reserve", [](EngineHandle& e, size_t bytes) { return e.get().Reserve(bytes); })
      .def(
          "begin",
          [](const std::shared_ptr<EngineHandle>& e, const py::buffer& pointers, const py::buffer& sizes,
             const py::buffer& owners, size_t files, bool eager_by_caller, const std::optional<py::buffer>& devices,
             const std::optional<py::buffer>& streams) {
            // Empty until Python has it: where pybind11 lacks memory for that, it frees a job without its destructor.
            auto* job = new JobHandle;
            py::object made = py::cast(job, py::return_value_policy::take_ownership);
            job->Begin(e, pointers, sizes, owners, files, eager_by_caller, devices, streams);
            return made;
          },
          "pointers"_a, "sizes"_a, "owners"_a, "files"_a, "eager_by_caller"_a = false, "devices"_a = py::none(),
          "streams"_a = py::none())
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
      .def_property_readonly("unpinned",
                             [](EngineHandle& e) {
                               const Status why = e.get().Locked([&] { return e.get().unpinned(); });
                               return why.ok() ? "" : why.operation();
                             })
      .def_property_readonly("bounces",
                             [](EngineHandle& e) { return e.get().Locked([&] { return e.get().bounces(); }); })
      .def_property_readonly("ring_bytes",
                             [](EngineHandle& e) { return e.get().Locked([&] { return e.get().ring().capacity(); }); })
      .def_property_readonly("ring_used_bytes",
                             [](EngineHandle& e) { return e.get().Locked([&] { return e.get().ring().used(); }); })
      .def_property_readonly("backend", [](EngineHandle& e) { return e.get().backend_name(); })
      .def_property_readonly(
          "fallback", [](EngineHandle& e) { return e.get().fallback().ok() ? "" : e.get().fallback().message(); });

  // pybind11 3.1 does not ask whether there was memory for the object.
  const auto allocate = [](PyTypeObject* type, Py_ssize_t n) {
    PyObject* made = PyType_GenericAlloc(type, n);
    if (made == nullptr) throw py::error_already_set();
    return made;
  };
  py::class_<JobHandle>(
      m, "Job", py::custom_type_setup([allocate](PyHeapTypeObject* type) { type->ht_type.tp_alloc = allocate; }))
      .def("append", &JobHandle::Append, "file"_a, "offset"_a, "rows"_a, "blob"_a, "first_source"_a = 0)
      .def("go", &JobHandle::Go)
      .def("seal", &JobHandle::Seal)
      .def("open", &JobHandle::Open)
      .def("wait_eager", &JobHandle::WaitEager, "timeout_s"_a = py::none())
      .def("wait_captured", &JobHandle::WaitCaptured, "owners"_a, "timeout_s"_a = py::none())
      .def("wait_enqueued", &JobHandle::WaitEnqueued, "owners"_a, "streams"_a, "timeout_s"_a = py::none())
      .def("wait_released", &JobHandle::WaitReleased, "timeout_s"_a = py::none())
      .def("wait_settled", &JobHandle::WaitSettled, "timeout_s"_a = py::none())
      .def("fail", &JobHandle::Fail)
      .def("raise_error", &JobHandle::RaiseError)
      .def("pending_chunks", &JobHandle::PendingChunks)
      .def("source_crcs", &JobHandle::SourceCrcs)
      .def("files", &JobHandle::Files)
      .def("stats", &JobHandle::Stats)
      .def("timeline", &JobHandle::Timeline);

  py::class_<RingHandle>(m, "Ring")
      .def(py::init<size_t, size_t>(), "capacity"_a, "slice_bytes"_a)
      .def("allocate", &RingHandle::Allocate)
      .def("free", &RingHandle::Free)
      .def("node_of", &RingHandle::NodeOf)
      .def_property_readonly("used", &RingHandle::used);

  py::class_<ReaderHandle>(m, "Reader")
      .def(py::init<std::shared_ptr<EngineHandle>, const std::filesystem::path&, const py::buffer&, const py::buffer&,
                    unsigned, unsigned>(),
           "engine"_a, "path"_a, "offsets"_a, "sizes"_a, py::kw_only(), "threads"_a = 0, "io_depth"_a = 0)
      .def("read_into", &ReaderHandle::ReadInto, "pointers"_a, "devices"_a = py::none(), "streams"_a = py::none());

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
  m.def("look_at_tensors", [](const py::object& tensors) { return Returned(LookAtTensors(tensors.ptr())); });
  m.def("storages_in", [](const py::object& tree) { return Returned(StoragesIn(tree.ptr())); });
  m.def("rename_exchange", &RenameExchange);
  m.def("probe", [](const std::filesystem::path& folder) { return Probe(folder.string()); });
}
