// RangeReader in Python.
#include <algorithm>
#include <cerrno>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "engine/range_reader.h"
#include "python/engine_handle.h"

namespace lazyckpt {
namespace {

class RangeReaderHandle {
 public:
  RangeReaderHandle(std::shared_ptr<EngineHandle> engine, const py::object& path, const py::buffer& offsets,
                    const py::buffer& sizes, unsigned threads, unsigned io_depth, py::object fetch, uint64_t size)
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
    options.upload = [&e](int device, std::span<const DeviceCopy> copies) { return e.Upload(device, copies); };
    const std::string name = ToPath(path);
    options.staging = staging_ = e.Borrow(options.io_depth * kReadBytes);
    if (!fetch.is_none()) {
      fetcher_ = std::make_shared<Fetcher>(Fetcher{name, std::move(fetch), nullptr});
      options.fetch = [fetcher = fetcher_](uint64_t begin, size_t size, const Landing& land) {
        return fetcher->Fetch(begin, size, land);
      };
      options.size = size;
    }
    Status status;
    {
      NoGil no_gil;
      reader_ = RangeReader::Start(name, options, std::move(ranges), &status);
    }
    if (!status.ok()) Close();
    Raise(status);
  }
  ~RangeReaderHandle() { Close(); }

  void Cancel() {
    const std::shared_ptr<RangeReader> reader = reader_;  // which another thread may be about to drop
    NoGil no_gil;
    if (reader != nullptr) reader->Cancel();
  }

  py::list ReadInto(const py::buffer& pointers, const std::optional<py::buffer>& devices,
                    const std::optional<py::buffer>& streams) {
    const auto p = ToVector<uint64_t>(pointers, "pointers");
    const auto d = devices ? ToVector<int64_t>(*devices, "devices") : std::vector<int64_t>(p.size(), -1);
    const auto current = ToStreams(streams);
    Engine& e = engine_->get();
    if (d.size() != p.size()) throw py::value_error("pointers and devices differ in length");
    for (const int64_t device : d)
      if (device >= 0 && std::none_of(current.begin(), current.end(), [&](auto& s) { return s.device == device; }))
        throw py::value_error("a place on a device without a stream");
    if (reader_ == nullptr) throw std::runtime_error("a RangeReader reads once");
    if (p.size() != reader_->ranges().size()) throw py::value_error("pointers and offsets differ in length");
    std::vector<std::byte*> to;
    for (const uint64_t pointer : p) to.push_back(reinterpret_cast<std::byte*>(pointer));
    Status status;
    {
      NoGil no_gil;
      status = e.CopyAfter(current);
      if (status.ok()) reader_->Land(to, {d.begin(), d.end()});
    }
    if (status.ok()) {
      try {
        (void)Interruptible(std::nullopt, [&](Clock::time_point until) { return reader_->AwaitEnd(until); });
      } catch (...) {
        Close();
        throw;
      }
      NoGil no_gil;
      status = reader_->End();
    }
    py::list crcs;
    for (const ReadRange& r : reader_->ranges()) crcs.append(r.crc);
    const std::exception_ptr raised = fetcher_ == nullptr ? nullptr : fetcher_->raised;
    Close();
    if (!status.ok() && raised != nullptr) std::rethrow_exception(raised);
    Raise(status);
    return crcs;
  }

 private:
  // Shared with the reader's threads, of which some may end later than the handle. Close() takes the objects of Python
  // away, so that the last owner needs no GIL.
  struct Fetcher {
    // On a reader thread. The first error of Python's is raised by ReadInto.
    Status Fetch(uint64_t begin, size_t size, const Landing& land) {
      const py::gil_scoped_acquire gil;
      const py::object fetch = call;
      if (!fetch) return Status(ECANCELED, "read", name);
      try {
        bool goes_on = true;
        for (const py::handle part : py::iter(fetch(begin, begin + size))) {
          const py::buffer_info bytes = py::reinterpret_borrow<py::buffer>(part).request();
          NoGil no_gil;
          goes_on = land(static_cast<const std::byte*>(bytes.ptr), static_cast<size_t>(bytes.size * bytes.itemsize));
          if (!goes_on) break;
        }
        return Status::Ok();
      } catch (const std::bad_alloc&) {
        throw;
      } catch (const std::exception&) {  // Python's, or that of an object without bytes
        if (call && raised == nullptr) raised = std::current_exception();
        return Status(EIO, "read", name);
      }
    }

    const std::string name;
    py::object call;  // with the first byte and the end of a request; returns the bytes
    std::exception_ptr raised;
  };

  void Close() {
    if (!engine_->alive()) {  // a forked child has none of its threads
      (void)new auto(std::move(reader_));
      (void)new auto(std::move(fetcher_));
      return;
    }
    if (fetcher_ != nullptr) {
      fetcher_->call = py::object();
      fetcher_->raised = nullptr;
    }
    // Taken out with the GIL: Cancel() on another thread looks at it.
    if (std::shared_ptr<RangeReader> reader = std::move(reader_); reader != nullptr) {
      NoGil no_gil;
      reader->GiveUp();
      reader.reset();
    }
    engine_->get().GiveBack(std::exchange(staging_, {}));
  }

  const std::shared_ptr<EngineHandle> engine_;
  std::shared_ptr<Fetcher> fetcher_;  // nullptr: a file is read
  std::span<std::byte> staging_;
  std::shared_ptr<RangeReader> reader_;
};

}  // namespace

void DefineRangeReader(py::module_& m) {
  using namespace pybind11::literals;
  py::class_<RangeReaderHandle>(m, "RangeReader")
      .def(py::init<std::shared_ptr<EngineHandle>, const py::object&, const py::buffer&, const py::buffer&, unsigned,
                    unsigned, py::object, uint64_t>(),
           "engine"_a, "path"_a, "offsets"_a, "sizes"_a, py::kw_only(), "threads"_a = 0, "io_depth"_a = 0,
           "fetch"_a = py::none(), "size"_a = 0)
      .def("cancel", &RangeReaderHandle::Cancel)
      .def("read_into", &RangeReaderHandle::ReadInto, "pointers"_a, "devices"_a = py::none(), "streams"_a = py::none());
}

}  // namespace lazyckpt
