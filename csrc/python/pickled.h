// What the native pickler has written: a pickle whose storages have no keys yet.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "python/opcodes.h"
#include "python/tensor_facts.h"

namespace lazyckpt {

// Holds no object of the state.
struct PlainPickle {
  // All of a storage, or a span of it.
  struct Storage {
    int64_t nbytes;
    PyObject* dtype;  // lives forever
    int64_t device;
    int64_t offset;  // of its first byte
    bool operator==(const Storage&) const = default;
  };
  struct Gap {
    size_t at;  // in the opcodes
    uint32_t storage;
    bool operator==(const Gap&) const = default;
  };

  std::string opcodes{};
  std::vector<Gap> gaps{};  // where the keys go
  std::vector<Storage> storages{};
  std::vector<Addresses> tensors{};
  size_t objects = 0;  // in the memo
  // Where the storages are now.
  std::vector<uint64_t> identities{}, pointers{};

  // Whether both become the same pickle with the same keys.
  bool IsSame(const PlainPickle& other) const { return opcodes == other.opcodes && gaps == other.gaps; }
  // Whether there are as many storages, of the same kinds.
  bool HasSameStorages(const PlainPickle& other) const { return storages == other.storages; }
  bool HasSameMemory(const PlainPickle& other) const {
    return identities == other.identities && pointers == other.pointers;
  }

  py::bytes With(const std::vector<std::string>& keys) const {
    if (keys.size() != storages.size()) throw py::value_error("expected a key for each storage");
    std::string whole;
    whole.reserve(opcodes.size() + 8 * gaps.size());
    size_t done = 0;
    for (const Gap& gap : gaps) {
      whole.append(opcodes, done, gap.at - done);
      done = gap.at;
      const std::string& key = keys[gap.storage];
      const auto size = static_cast<uint32_t>(key.size());
      whole.push_back(kUnicode);
      whole.append(reinterpret_cast<const char*>(&size), sizeof size);
      whole += key;
    }
    whole.append(opcodes, done);
    return whole;
  }

  template <class T, T Storage::* kField>
  std::vector<T> Column() const {
    std::vector<T> column;
    column.reserve(storages.size());
    for (const Storage& s : storages) column.push_back(s.*kField);
    return column;
  }

  py::list Dtypes() const {
    py::list dtypes;
    for (const Storage& s : storages) dtypes.append(py::handle(s.dtype));
    return dtypes;
  }
};

}  // namespace lazyckpt
