// The version counters of tensors, as they are at a point of program order of the main thread.
#pragma once

#include "python/engine_handle.h"

namespace lazyckpt {

void DefineVersions(py::module_& m);

}  // namespace lazyckpt
