// CRC-32 as zip defines it (the IEEE 802.3 polynomial, reflected).
#pragma once

#include <cstddef>
#include <cstdint>

namespace lazyckpt {

// Continues `crc` (0 to begin) over `size` bytes.
uint32_t Crc32(uint32_t crc, const void* data, size_t size);

// The CRC of A followed by B, from the CRC of each and the length of B.
uint32_t Crc32Combine(uint32_t crc_a, uint32_t crc_b, uint64_t size_b);

// memcpy and Crc32 in one pass over memory. The copy bypasses the cache, since it goes to the disk or exceeds the
// cache. The checksum is that of the copy, even if `from` changes meanwhile.
uint32_t CopyCrc32(uint32_t crc, void* to, const void* from, size_t size);

}  // namespace lazyckpt
