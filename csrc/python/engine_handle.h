// Who owns an engine in Python, and how calls into it release the GIL.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>

#include "engine/engine.h"
#include "python/arguments.h"

namespace lazyckpt {

// Releases the GIL while it lives. If the interpreter has ended, Python unwinds the stack of a thread that asks for the
// GIL, and an exception out of a destructor (as in pybind11's own class) ends the process. So the thread sleeps
// forever, as Python 3.14 makes it do.
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

  bool alive() const { return getpid() == pid_; }
  Engine& get() const;

 private:
  Engine* engine_ = nullptr;
  const pid_t pid_ = getpid();
};

using EngineClass = py::class_<EngineHandle, std::shared_ptr<EngineHandle>>;

void DefineJob(py::module_& m, EngineClass& engine);  // and Engine.begin()
void DefineRangeReader(py::module_& m);
void DefineVersions(py::module_& m);

}  // namespace lazyckpt
