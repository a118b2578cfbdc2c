// The opcodes of a pickle, as Python's pickler writes them.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <string>

namespace lazyckpt {

// Opcodes of protocol 2. tests/capture/test_planned_again.py compares them with Python's.
constexpr char kMark = '(', kEmptyTuple = ')', kTuple = 't', kTuple1 = '\x85', kTuple2 = '\x86', kTuple3 = '\x87',
               kEmptyDict = '}', kSetItem = 's', kSetItems = 'u', kEmptyList = ']', kAppend = 'a', kAppends = 'e',
               kNone = 'N', kTrue = '\x88', kFalse = '\x89', kInt1 = 'K', kInt2 = 'M', kInt4 = 'J', kLong1 = '\x8a',
               kFloat = 'G', kGet1 = 'h', kGet4 = 'j', kPut1 = 'q', kPut4 = 'r', kReduce = 'R', kBuild = 'b',
               kPersistentId = 'Q', kUnicode = 'X';

static_assert(std::endian::native == std::endian::little);

// Appends to a text, which must live as long. The functions return true, so that calls can be chained.
class Opcodes {
 public:
  explicit Opcodes(std::string* text) : text_(*text) {}

  bool Put(char opcode) {
    text_.push_back(opcode);
    return true;
  }
  template <class T>
  bool Put(char opcode, T argument) {
    text_.push_back(opcode);
    text_.append(reinterpret_cast<const char*>(&argument), sizeof argument);
    return true;
  }
  bool PutPlace(uint32_t place, char opcode1, char opcode4) {
    return place < 256 ? Put(opcode1, static_cast<uint8_t>(place)) : Put(opcode4, place);
  }
  bool PutInteger(int64_t value) {
    if (0 <= value && value < 1 << 8) return Put(kInt1, static_cast<uint8_t>(value));
    if (0 <= value && value < 1 << 16) return Put(kInt2, static_cast<uint16_t>(value));
    if (value == static_cast<int32_t>(value)) return Put(kInt4, static_cast<int32_t>(value));
    int size = sizeof value;  // as few bytes as hold it with its sign
    const auto byte = [value](int at) { return static_cast<uint8_t>(value >> 8 * at); };
    while (byte(size - 1) == (value < 0 ? 0xFF : 0) && (byte(size - 2) >> 7 != 0) == (value < 0)) --size;
    Put(kLong1, static_cast<uint8_t>(size));
    for (int at = 0; at < size; ++at) Put(static_cast<char>(byte(at)));
    return true;
  }
  bool PutFloat(double value) { return Put(kFloat, __builtin_bswap64(std::bit_cast<uint64_t>(value))); }
  bool PutIntegers(std::span<const int64_t> tuple) {
    if (tuple.empty()) return Put(kEmptyTuple);
    if (tuple.size() > 3) Put(kMark);
    for (const int64_t n : tuple) PutInteger(n);
    constexpr char kOpcodes[] = {kTuple1, kTuple2, kTuple3};
    return Put(tuple.size() > 3 ? kTuple : kOpcodes[tuple.size() - 1]);
  }

 private:
  std::string& text_;
};

}  // namespace lazyckpt
