// Finds the pickle of a small archive of torch.save that lies in memory, and compares every checksum in it.
//
// A folder of torch.distributed.checkpoint holds thousands of them, one for each number and text of the state. This
// accepts only what torch and lazyckpt write for an object without storages; lazyckpt/formats/torch_zip_reader.py reads
// every other archive, and names the damage of a broken one. It accepts every archive that this accepts.
#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

#include "engine/checksum.h"
#include "python/ask.h"
#include "python/engine_handle.h"

namespace lazyckpt {
namespace {

using Place = std::pair<size_t, size_t>;  // offset and length

constexpr size_t kEnd = 22, kEnd64 = 56, kLocator = 20, kEntry = 46, kLocal = 30;
constexpr uint64_t kDeferred = 1 << 3, kUtf8 = 1 << 11;
constexpr std::string_view kFolder = "archive/";
constexpr std::array<std::string_view, 6> kNames = {"data.pkl",  ".format_version", ".storage_alignment",
                                                    "byteorder", "version",         ".data/serialization_id"};

struct Archive {
  std::string_view data;

  bool Has(size_t at, size_t size) const { return at <= data.size() && size <= data.size() - at; }
  bool Is(size_t at, std::string_view text) const {
    return Has(at, text.size()) && data.substr(at, text.size()) == text;
  }
  // Little-endian; the bytes are there.
  uint64_t Number(size_t at, size_t width) const {
    uint64_t n = 0;
    for (size_t i = width; i-- > 0;) n = n << 8 | static_cast<unsigned char>(data[at + i]);
    return n;
  }
};

// Where the zip directory lies, and how many entries it has.
std::optional<std::pair<Place, uint64_t>> FindDirectory(const Archive& a) {
  if (a.data.size() < kEnd) return {};
  size_t end = a.data.size() - kEnd;
  if (!a.Is(end, std::string_view("PK\5\6\0\0\0\0", 8)) || a.Number(end + 20, 2) != 0) return {};
  const uint64_t count = a.Number(end + 10, 2), size = a.Number(end + 12, 4), offset = a.Number(end + 16, 4);
  if (a.Number(end + 8, 2) != count || count > kNames.size()) return {};
  if (end >= kLocator + kEnd64 && a.Is(end - kLocator, "PK\6\7")) {
    const size_t locator = end - kLocator;
    end = locator - kEnd64;
    const bool points =
        a.Number(locator + 4, 4) == 0 && a.Number(locator + 8, 8) == end && a.Number(locator + 16, 4) == 1;
    if (!points || !a.Is(end, "PK\6\6") || a.Number(end + 4, 8) != kEnd64 - 12 || a.Number(end + 16, 8) != 0) return {};
    for (const auto& [at, told] : {std::pair{24, count}, {32, count}, {40, size}, {48, offset}})
      if (a.Number(end + at, 8) != told) return {};
  }
  if (offset + size != end) return {};
  return {{{offset, size}, count}};
}

// Where the data of the record at `at` lies, which the directory's entry describes, and where the next record begins.
std::optional<std::pair<Place, size_t>> ReadRecord(const Archive& a, size_t at, size_t entry, std::string_view name) {
  const uint64_t flags = a.Number(entry + 8, 2), crc = a.Number(entry + 16, 4), size = a.Number(entry + 24, 4);
  if (!a.Has(at, kLocal) || !a.Is(at, "PK\3\4") || a.Number(at + 6, 2) != flags || a.Number(at + 8, 2) != 0) return {};
  if (a.Number(at + 26, 2) != name.size() || !a.Is(at + kLocal, name)) return {};
  const bool deferred = (flags & kDeferred) != 0;
  for (const auto& [field, told] : {std::pair{14, crc}, {18, size}, {22, size}}) {
    const uint64_t found = a.Number(at + field, 4);
    if (found != told && !(deferred && found == 0)) return {};
  }
  const size_t data = at + kLocal + name.size() + a.Number(at + 28, 2);
  if (size == 0 || crc == 0 || !a.Has(data, size) || Crc32(0, a.data.data() + data, size) != crc) return {};
  size_t next = data + size;
  if (deferred) {
    if (!a.Has(next, 16) || !a.Is(next, "PK\7\x08") || a.Number(next + 4, 4) != crc) return {};
    if (a.Number(next + 8, 4) != size || a.Number(next + 12, 4) != size) return {};
    next += 16;
  }
  return {{{data, size}, next}};
}

std::optional<Place> FindPickle(std::string_view bytes) {
  const Archive a{bytes};
  const auto found = FindDirectory(a);
  if (!found) return {};
  const auto [directory, count] = *found;
  size_t entry = directory.first, next = 0;
  const size_t end = directory.first + directory.second;
  unsigned seen = 0;
  std::optional<Place> pickle;
  for (uint64_t i = 0; i < count; ++i) {
    if (entry + kEntry > end || !a.Is(entry, "PK\1\2")) return {};
    const size_t name_size = a.Number(entry + 28, 2);
    if (entry + kEntry + name_size > end) return {};
    const std::string_view name = bytes.substr(entry + kEntry, name_size);
    const uint64_t attributes = a.Number(entry + 38, 4);
    const bool plain = (a.Number(entry + 8, 2) & ~(kDeferred | kUtf8)) == 0 && a.Number(entry + 10, 2) == 0 &&
                       a.Number(entry + 20, 4) == a.Number(entry + 24, 4) && a.Number(entry + 30, 6) == 0 &&
                       attributes == 0 && a.Number(entry + 42, 4) == next;
    if (!plain || !name.starts_with(kFolder)) return {};
    unsigned number = 0;
    while (number < kNames.size() && name.substr(kFolder.size()) != kNames[number]) ++number;
    if (number == kNames.size() || (seen & 1u << number) != 0) return {};
    seen |= 1u << number;
    const auto record = ReadRecord(a, next, entry, name);
    if (!record) return {};
    if (number == 0) pickle = record->first;
    next = record->second;
    entry += kEntry + name_size;
  }
  if (entry != end || next != directory.first) return {};
  return pickle;
}

}  // namespace

void DefineSmallArchive(py::module_& m) {
  m.def("pickle_in", [](const py::bytes& archive) -> py::object {
    const std::string_view data(archive);
    const auto place = FindPickle(data);
    if (!place) return py::none();
    return py::bytes(data.data() + place->first, place->second);
  });
}

}  // namespace lazyckpt
