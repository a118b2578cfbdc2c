// Conversion of float32 to bfloat16.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace lazyckpt {

// Rounds to nearest, ties to even; a NaN becomes the quiet NaN 0x7fc0. `to` holds from.size() / 2 bytes.
inline void ToBfloat16(std::byte* to, std::span<const std::byte> from) {
  const size_t count = from.size() / sizeof(uint32_t);
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from.data() + i * sizeof bits, sizeof bits);
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const auto half = static_cast<uint16_t>(is_nan ? 0x7fc0 : rounded);
    std::memcpy(to + i * sizeof half, &half, sizeof half);
  }
}

}  // namespace lazyckpt
