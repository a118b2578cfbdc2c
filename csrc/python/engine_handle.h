// The engine in Python: which object owns it, how calls release the GIL, and how arguments and errors are converted.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace lazyckpt {

namespace py = pybind11;

// Owns the result of a function of Python's C API; throws the Python error that is set if it is nullptr.
inline py::object Returned(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

// Throws an OSError with errno, message and file name, unless the status is OK. Only here a Status becomes an
// exception.
void Raise(const Status& status);

// The items of a flat buffer, which must stay alive; ValueError otherwise.
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

// Pairs of device and handle.
std::vector<StreamRef> ToStreams(const std::optional<py::buffer>& streams);

// A str, bytes or os.PathLike. pybind11's own conversion turns every error into a TypeError.
std::string ToPath(const py::object& path);

// The object of a type that serves the process, made by the first caller. A static object would have a lock of its own:
// a thread that imports torch would hold it, release the GIL, and deadlock with a thread that has the GIL and waits.
template <class T>
const T& TheOnly() {
  static const T* all = nullptr;
  if (all == nullptr) {
    const auto* made = new T;
    if (all == nullptr) all = made;  // otherwise another thread was faster
  }
  return *all;
}

// Releases the GIL while it lives. If the interpreter has ended, Python unwinds the stack of a thread that asks for the
// GIL, and an exception out of a destructor (as in pybind11's own class) ends the process. So the thread sleeps
// forever, as Python 3.14 makes it do.
class NoGil {
 public:
  NoGil() : state_(PyEval_SaveThread()) {}
  ~NoGil();
  NoGil(const NoGil&) = delete;

 private:
  PyThreadState* state_;
};

// Calls `work` without the GIL and raises the Status that it returns.
template <class F>
void CallWithoutGil(F work) {
  Status status;
  {
    NoGil no_gil;
    status = work();
  }
  Raise(status);
}

// Calls `wait` without the GIL, in steps of 100 ms, so that Ctrl-C works. Returns false at the timeout.
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

// Owns an engine. A forked child inherits its memory but none of its threads, so there every call raises RuntimeError,
// and the engine is leaked instead of destroyed.
class EngineHandle {
 public:
  explicit EngineHandle(const EngineOptions& options);
  ~EngineHandle();
  EngineHandle(const EngineHandle&) = delete;

  bool alive() const;
  Engine& get() const;

 private:
  Engine* engine_ = nullptr;
  const int pid_;
};

using EngineClass = py::class_<EngineHandle, std::shared_ptr<EngineHandle>>;

void DefineJob(py::module_& m, EngineClass& engine);  // and Engine.begin()
void DefinePlainPickle(py::module_& m);
void DefineModuleWalk(py::module_& m);
void DefinePlainPickler(py::module_& m);
void DefineRangeReader(py::module_& m);
void DefineSmallArchive(py::module_& m);
void DefineLeaves(py::module_& m);
void DefineTensors(py::module_& m);
void DefineVersions(py::module_& m);

// Facts about the machine and a folder, as text for people, by name ("io_uring", "o_direct", "memlock_bytes", …).
std::map<std::string, std::string> Probe(const py::object& folder);

}  // namespace lazyckpt
