// Job in Python: one checkpoint under way. One file because it is one class, most of whose methods are a line or two.
#include <algorithm>
#include <cerrno>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/checksum.h"
#include "engine/range_reader.h"
#include "python/engine_handle.h"

namespace lazyckpt {
namespace {

// 0 for a moment that has not come.
double SecondsSince(const Job& job, Clock::time_point t) {
  return t < job.begin ? 0.0 : std::chrono::duration<double>(t - job.begin).count();
}

constexpr unsigned kReadBackDepth = 4;  // reads in flight, 2 MiB each, besides the writes of the next checkpoint

std::span<const Row> ToRows(const py::buffer_info& info) {
  const auto flat = Flat<int64_t>(info, "rows");
  if (flat.size() % 3 != 0) throw py::value_error("rows: expected triples");
  static_assert(sizeof(Row) == 3 * sizeof(int64_t));
  return {reinterpret_cast<const Row*>(flat.data()), flat.size() / 3};
}

class JobHandle {
 public:
  JobHandle(std::shared_ptr<EngineHandle> engine, std::shared_ptr<Job> job)
      : engine_(std::move(engine)), job_(std::move(job)) {}
  JobHandle(const JobHandle&) = delete;
  ~JobHandle() {
    if (!engine_->alive()) {
      // A thread of the parent may have been changing it at the fork, so it cannot even be destroyed.
      new std::shared_ptr<Job>(std::move(job_));
      return;
    }
    // No caller can commit the job any more, and its sources are about to be freed.
    NoGil no_gil;
    Engine& e = engine_->get();
    e.Fail(*job_, Status(ECANCELED, "checkpoint abandoned", ""));
    e.WaitReleased(*job_, Clock::time_point::max());
  }

  void Keep(std::vector<py::bytes> blobs) { blobs_ = std::move(blobs); }

  void Append(size_t file, uint64_t offset, const py::buffer& rows, const py::bytes& blob, size_t first_source) {
    const py::buffer_info info = rows.request();  // keeps the array from being resized
    const std::span parsed = ToRows(info);
    const std::string_view literals = blobs_.emplace_back(blob);
    CallWithoutGil([&] { return engine_->get().Append(*job_, file, offset, parsed, literals, first_source); });
  }

  void Seal() {
    CallWithoutGil([&] { return engine_->get().Seal(*job_); });
  }

  // Only the calls that made the job have set them.
  double WatchSeconds() const { return job_->watch_s; }
  double EagerCopySeconds() const { return job_->eager_copy_s; }

  void Go() { engine_->get().Go(*job_); }  // keeps the GIL: this thread might wait to get it back

  void Open(size_t file, const py::object& path, uint64_t size) {
    const std::string name = ToPath(path);
    CallWithoutGil([&] { return engine_->get().Open(*job_, file, name, size); });
  }

  void OpenExisting(size_t file, const py::object& path, int64_t shift) {
    const std::string name = ToPath(path);
    CallWithoutGil([&] { return engine_->get().OpenExisting(*job_, file, name, shift); });
  }

  void Drop(size_t file) {
    CallWithoutGil([&] { return engine_->get().Drop(*job_, file); });
  }

  template <bool (Engine::*kWait)(Job&, Clock::time_point)>
  bool Wait(std::optional<double> timeout_s) {
    return Interruptible(timeout_s, [&](auto end) { return (engine_->get().*kWait)(*job_, end); });
  }
  bool WaitCaptured(uint64_t owners, std::optional<double> timeout_s) {
    return Interruptible(timeout_s, [&](auto end) { return engine_->get().WaitCaptured(*job_, owners, end); });
  }
  bool WaitEnqueued(uint64_t owners, const py::buffer& streams, std::optional<double> timeout_s) {
    const auto refs = ToStreams(streams);
    return Interruptible(timeout_s, [&](auto end) { return engine_->get().WaitEnqueued(*job_, owners, refs, end); });
  }
  void Fail(int error, const py::str& why) {
    const char* text = PyUnicode_AsUTF8(why.ptr());  // nullptr: the name of a tensor may be no UTF-8
    if (text == nullptr) PyErr_Clear();
    Status status(error, text == nullptr ? "failed" : text, "");
    NoGil no_gil;
    engine_->get().Fail(*job_, std::move(status));
  }

  void RaiseError() const {
    Raise(engine_->get().Locked([this] { return job_->error; }));
  }

  std::vector<size_t> Torn() const {
    return engine_->get().Locked([this] { return job_->torn; });
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
    std::vector<uint32_t> crcs;
    engine_->get().Locked([&] {
      for (const Source& s : job_->sources) crcs.push_back(s.crc);
    });
    return crcs;
  }

  std::vector<std::pair<uint64_t, uint32_t>> Files() const {
    return engine_->get().Locked([this] {
      RequireDurable();
      std::vector<std::pair<uint64_t, uint32_t>> files;
      for (size_t i = 0; i < job_->files.size(); ++i) {
        uint32_t crc = 0;
        for (const Chunk* c : job_->ChunksInFileOrder(i)) crc = Crc32Combine(crc, c->crc, c->size);
        files.emplace_back(job_->files[i].size, crc);
      }
      return files;
    });
  }

  // Runs of chunks without a gap, where they lie in the file.
  std::vector<std::tuple<uint64_t, uint64_t, uint32_t>> Runs(size_t file) const {
    return engine_->get().Locked([&] {
      RequireDurable();
      std::vector<std::tuple<uint64_t, uint64_t, uint32_t>> runs;
      const auto shift = static_cast<uint64_t>(job_->files.at(file).shift);
      for (const Chunk* c : job_->ChunksInFileOrder(file)) {
        const uint64_t at = c->offset + shift;
        if (runs.empty() || std::get<0>(runs.back()) + std::get<1>(runs.back()) != at) runs.emplace_back(at, 0, 0);
        auto& [begin, size, crc] = runs.back();
        crc = Crc32Combine(crc, c->crc, c->size);
        size += c->size;
      }
      return runs;
    });
  }

  std::vector<std::pair<uint64_t, size_t>> ReadBack(size_t file) const {
    Engine& e = engine_->get();
    std::vector<ReadRange> ranges;
    std::vector<uint32_t> copied;
    std::string path;
    e.Locked([&] {
      RequireDurable();
      path = job_->files.at(file).path;
      for (const auto& c : job_->chunks) {
        if (c->file != file || job_->files[file].drops) continue;
        ranges.push_back({c->offset + static_cast<uint64_t>(job_->files[file].shift), c->size});
        copied.push_back(c->crc);
      }
    });
    ReadOptions options;
    options.threads = 1;  // leaves the other cores to training
    options.io_depth = kReadBackDepth;
    options.backend = e.options().backend;
    options.direct = e.options().direct;
    options.fault = e.options().fault;
    options.past_cache = true;
    if (ranges.empty()) return {};
    const size_t n = ranges.size();
    std::vector<std::pair<uint64_t, size_t>> differ;
    CallWithoutGil([&] {
      Status status;
      const auto reader = RangeReader::Start(path, options, std::move(ranges), &status);
      if (status.ok()) status = reader->ReadInto(std::vector<std::byte*>(n), std::vector<int>(n, -1));
      for (size_t i = 0; i < n && status.ok(); ++i) {
        const ReadRange& r = reader->ranges()[i];
        if (r.crc != copied[i]) differ.emplace_back(r.offset, r.size);
      }
      return status;
    });
    return differ;
  }

  std::unordered_map<std::string, double> Stats() const {
    return engine_->get().Locked([this] {
      const Job& j = *job_;
      const auto since = [&j](Clock::time_point t) { return SecondsSince(j, t); };
      Clock::time_point first_write = Clock::time_point::max();
      double bytes = 0, eager = 0;
      for (const auto& c : j.chunks) {
        if (j.files[c->file].drops) continue;
        if (c->write_begin > j.begin) first_write = std::min(first_write, c->write_begin);
        bytes += static_cast<double>(c->size);
      }
      for (const Source& s : j.sources) eager += s.owners == 0 ? static_cast<double>(s.size) : 0;
      const bool wrote = first_write != Clock::time_point::max();
      return std::unordered_map<std::string, double>{
          {"begin", std::chrono::duration<double>(j.begin.time_since_epoch()).count()},
          {"bytes", bytes},
          {"eager_bytes", eager},
          {"chunks", static_cast<double>(j.chunks.size())},
          {"copy_s", j.copy_s},
          {"ring_wait_s", j.ring_wait_s},
          {"captured_s", since(j.captured_at)},
          {"first_write_s", wrote ? since(first_write) : 0.0},
          {"written_s", since(j.written)},
          {"synced_s", since(j.synced)}};
    });
  }

  using Event = std::tuple<size_t, uint64_t, size_t, double, double, double, double, double>;
  std::vector<Event> Timeline() const {
    return engine_->get().Locked([this] {
      std::vector<Event> all;
      const auto since = [this](Clock::time_point t) { return SecondsSince(*job_, t); };
      for (const auto& c : job_->chunks)
        all.emplace_back(c->file, c->offset, c->size, since(c->copy_begin), since(c->copy_end), since(c->write_begin),
                         since(c->write_end), c->ring_wait_s);
      return all;
    });
  }

 private:
  void RequireDurable() const {  // under the lock
    if (!job_->durable()) throw std::runtime_error("the files are not durable yet");
  }

  std::shared_ptr<EngineHandle> engine_;
  std::shared_ptr<Job> job_;
  std::vector<py::bytes> blobs_;  // the engine reads them until the sources are released
};

std::vector<Source> ToSources(const py::buffer& pointers, const py::buffer& sizes, const py::buffer& owners,
                              const std::optional<py::buffer>& devices) {
  const auto p = ToVector<uint64_t>(pointers, "pointers");
  const auto s = ToVector<uint64_t>(sizes, "sizes");
  const auto o = ToVector<uint64_t>(owners, "owners");
  const auto d = devices ? ToVector<int64_t>(*devices, "devices") : std::vector<int64_t>(p.size(), -1);
  if (p.size() != s.size() || p.size() != o.size() || p.size() != d.size())
    throw py::value_error("pointers, sizes, owners and devices differ in length");
  std::vector<Source> sources;
  sources.reserve(p.size());
  for (size_t i = 0; i < p.size(); ++i)
    sources.push_back({.data = reinterpret_cast<const std::byte*>(p[i]),
                       .size = s[i],
                       .owners = o[i],
                       .device = static_cast<int>(d[i])});
  return sources;
}

using FileParts = std::vector<std::tuple<size_t, uint64_t, uint64_t>>;

std::vector<Engine::FilePart> ToParts(const FileParts& parts) {
  std::vector<Engine::FilePart> found;
  found.reserve(parts.size());
  for (const auto& [file, begin, end] : parts) found.push_back({file, begin, end});
  return found;
}

std::unique_ptr<JobHandle> Begin(const std::shared_ptr<EngineHandle>& engine, const py::buffer& pointers,
                                 const py::buffer& sizes, const py::buffer& owners, size_t files, bool eager_by_caller,
                                 const std::optional<py::buffer>& devices, const std::optional<py::buffer>& streams,
                                 const FileParts& parts) {
  auto sources = ToSources(pointers, sizes, owners, devices);
  const auto current = ToStreams(streams);
  const auto file_parts = ToParts(parts);
  std::shared_ptr<Job> job;
  CallWithoutGil([&] {
    Status status;
    job = engine->get().Begin(std::move(sources), files, eager_by_caller, current, file_parts, &status);
    return status;
  });
  return std::make_unique<JobHandle>(engine, std::move(job));
}

// Runs no Python code from the first look at a source to the last.
std::unique_ptr<JobHandle> Capture(
    const std::shared_ptr<EngineHandle>& engine, const py::buffer& pointers, const py::buffer& sizes,
    const py::buffer& owners, size_t files,
    const std::vector<std::tuple<size_t, uint64_t, py::buffer, py::bytes, size_t>>& program,
    const std::optional<py::buffer>& devices, const std::optional<py::buffer>& streams, const FileParts& parts) {
  auto sources = ToSources(pointers, sizes, owners, devices);
  const auto current = ToStreams(streams);
  const auto file_parts = ToParts(parts);
  std::vector<py::buffer_info> rows;  // keep the arrays from being resized
  std::vector<py::bytes> blobs;
  std::vector<Engine::Extent> extents;
  rows.reserve(program.size());
  for (const auto& [file, offset, buffer, blob, first_source] : program) {
    rows.push_back(buffer.request());
    extents.push_back({file, offset, ToRows(rows.back()), std::string_view(blobs.emplace_back(blob)), first_source});
  }
  std::shared_ptr<Job> job;
  Status status;
  {
    NoGil no_gil;
    job = engine->get().Capture(std::move(sources), files, current, extents, file_parts, &status);
  }
  std::unique_ptr<JobHandle> handle;
  if (job != nullptr) {
    handle = std::make_unique<JobHandle>(engine, std::move(job));
    handle->Keep(std::move(blobs));  // also of a job that failed: a copy may be under way
  }
  Raise(status);
  return handle;
}

}  // namespace

void DefineJob(py::module_& m, EngineClass& engine) {
  using namespace pybind11::literals;
  engine.def("begin", &Begin, "pointers"_a, "sizes"_a, "owners"_a, "files"_a, "eager_by_caller"_a = false,
             "devices"_a = py::none(), "streams"_a = py::none(), "parts"_a = FileParts());

  engine.def("capture", &Capture, "pointers"_a, "sizes"_a, "owners"_a, "files"_a, "program"_a, "devices"_a = py::none(),
             "streams"_a = py::none(), "parts"_a = FileParts());

  py::class_<JobHandle>(m, "Job")
      .def("append", &JobHandle::Append, "file"_a, "offset"_a, "rows"_a, "blob"_a, "first_source"_a = 0)
      .def_property_readonly("watch_s", &JobHandle::WatchSeconds)
      .def_property_readonly("eager_copy_s", &JobHandle::EagerCopySeconds)
      .def("go", &JobHandle::Go)
      .def("seal", &JobHandle::Seal)
      .def("open", &JobHandle::Open)
      .def("drop", &JobHandle::Drop, "file"_a)
      .def("open_existing", &JobHandle::OpenExisting, "file"_a, "path"_a, "shift"_a = 0)
      .def("wait_eager", &JobHandle::Wait<&Engine::WaitEager>, "timeout_s"_a = py::none())
      .def("wait_captured", &JobHandle::WaitCaptured, "owners"_a, "timeout_s"_a = py::none())
      .def("wait_enqueued", &JobHandle::WaitEnqueued, "owners"_a, "streams"_a, "timeout_s"_a = py::none())
      .def("wait_released", &JobHandle::Wait<&Engine::WaitReleased>, "timeout_s"_a = py::none())
      .def("wait_settled", &JobHandle::Wait<&Engine::WaitSettled>, "timeout_s"_a = py::none())
      .def("fail", &JobHandle::Fail)
      .def("raise_error", &JobHandle::RaiseError)
      .def("torn", &JobHandle::Torn)
      .def("pending_chunks", &JobHandle::PendingChunks)
      .def("source_crcs", &JobHandle::SourceCrcs)
      .def("files", &JobHandle::Files)
      .def("runs", &JobHandle::Runs, "file"_a)
      .def("read_back", &JobHandle::ReadBack, "file"_a)
      .def("stats", &JobHandle::Stats)
      .def("timeline", &JobHandle::Timeline);
}

}  // namespace lazyckpt
