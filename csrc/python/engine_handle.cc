#include "python/engine_handle.h"

namespace lazyckpt {

EngineHandle::EngineHandle(const EngineOptions& options) {
  CallWithoutGil([&] {
    Status status;
    engine_ = Engine::Create(options, &status).release();
    return status;
  });
}

EngineHandle::~EngineHandle() {
  if (!alive()) return;
  NoGil no_gil;  // it may wait for the disk
  delete engine_;
}

Engine& EngineHandle::get() const {
  if (!alive()) throw std::runtime_error("this engine belongs to the parent of this process");
  return *engine_;
}

}  // namespace lazyckpt
