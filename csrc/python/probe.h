// What this machine offers to the engine.
#pragma once

#include <map>
#include <string>

namespace lazyckpt {

// Facts as text, for people: "io_uring", "o_direct", "alignment_bytes", "memlock_bytes", ... of the folder `dir`.
std::map<std::string, std::string> Probe(const std::string& dir);

}  // namespace lazyckpt
