// What this machine offers to the engine.
#pragma once

#include <map>
#include <string>

namespace lazyckpt {

// Facts as text for people, by name ("io_uring", "o_direct", "alignment_bytes", "memlock_bytes", …), about the machine
// and the folder `dir`.
std::map<std::string, std::string> Probe(const std::string& dir);

}  // namespace lazyckpt
