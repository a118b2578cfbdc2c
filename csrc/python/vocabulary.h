// The opcodes that the pickles of plain tensors share: of functions, classes and texts, by number.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "python/engine_handle.h"

namespace lazyckpt {

// Words that the pickles of tensors share.
class Words {
 public:
  int Number(const py::bytes& word) {
    const std::string_view text(word);
    for (size_t i = 0; i < words_.size(); ++i)
      if (words_[i] == text) return static_cast<int>(i);
    words_.emplace_back(text);
    return static_cast<int>(words_.size()) - 1;
  }
  const std::string& operator[](int number) const { return words_[static_cast<size_t>(number)]; }
  size_t size() const { return words_.size(); }

 private:
  std::vector<std::string> words_{};
};

struct DtypeWords {
  py::handle dtype{};
  bool is_plain = false;
  int rebuild = -1, storage_type = -1, own = -1;
  PyObject* storage_dtype = nullptr;
  int64_t storage_itemsize = 1;
};

// The words for each dtype and device, as Python tells them.
class Vocabulary {
 public:
  // See _engine.pyi.
  Vocabulary(py::object of_dtype, py::object of_device, const py::bytes& for_storage, const py::bytes& for_ordered_dict,
             uint32_t for_words)
      : storage(words.Number(for_storage)),
        ordered_dict(words.Number(for_ordered_dict)),
        places(for_words),
        of_dtype_(std::move(of_dtype)),
        of_device_(std::move(of_device)) {}

  const DtypeWords& Of(py::handle dtype) {
    for (const DtypeWords& known : dtypes_)
      if (known.dtype.is(dtype)) return known;
    DtypeWords made{.dtype = dtype};
    if (const py::object told = of_dtype_(dtype); !told.is_none()) {
      const auto parts = told.cast<py::tuple>();
      made.is_plain = true;
      made.rebuild = words.Number(parts[0]);
      made.storage_type = words.Number(parts[1]);
      if (!parts[2].is_none()) made.own = words.Number(parts[2]);
      made.storage_dtype = py::object(parts[3]).ptr();
      made.storage_itemsize = parts[3].attr("itemsize").cast<int64_t>();
    }
    return dtypes_.emplace_back(made);
  }

  int OfDevice(int device) {
    for (const auto& [known, word] : devices_)
      if (known == device) return word;
    return devices_.emplace_back(device, words.Number(of_device_(device))).second;
  }

  Words words{};
  const int storage, ordered_dict;
  const uint32_t places;  // of a memo that words may take; texts and containers follow behind

 private:
  py::object of_dtype_, of_device_;
  std::vector<DtypeWords> dtypes_{};
  std::vector<std::pair<int, int>> devices_{};
};

}  // namespace lazyckpt
