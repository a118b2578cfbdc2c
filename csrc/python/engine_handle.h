// Between Python and the engine: arguments, errors, the GIL, and who owns an engine. Only the files that include this
// one know pybind11.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace lazyckpt {

namespace py = pybind11;

// What a function of Python's C API has returned; nullptr is the error that is set.
py::object Returned(PyObject* result);

// Of a str, bytes or os.PathLike.
std::string PathOf(const py::object& path);

// The one place where a Status becomes an exception: OSError, so that errno and file name reach the user.
void Raise(const Status& status);

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
std::vector<StreamRef> ToStreams(const std::optional<py::buffer>& streams);

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

// An engine belongs to the process that made it. A forked child inherits the memory but none of the threads:
// there it refuses to work and leaks rather than waits for threads that do not exist.
class EngineHandle {
 public:
  explicit EngineHandle(const EngineOptions& options);
  ~EngineHandle();
  EngineHandle(const EngineHandle&) = delete;

  bool alive() const { return getpid() == pid_; }
  Engine& get() const;

 private:
  Engine* engine_ = nullptr;
  const pid_t pid_ = getpid();
};

using EngineClass = py::class_<EngineHandle, std::shared_ptr<EngineHandle>>;

// Job, and what makes one: the engine's begin().
void DefineJob(py::module_& m, EngineClass& engine);
void DefineReader(py::module_& m);

}  // namespace lazyckpt
