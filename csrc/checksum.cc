#include "checksum.h"

#include <zlib.h>

#include <algorithm>
#include <cstring>

#ifdef LAZYCKPT_HAVE_LIBDEFLATE
#include <libdeflate.h>
#endif

namespace lazyckpt {

uint32_t Crc32(uint32_t crc, const void* data, size_t size) {
#ifdef LAZYCKPT_HAVE_LIBDEFLATE
  return libdeflate_crc32(crc, data, size);
#else
  return static_cast<uint32_t>(crc32_z(crc, static_cast<const Bytef*>(data), size));
#endif
}

uint32_t Crc32Combine(uint32_t crc_a, uint32_t crc_b, uint64_t size_b) {
  return static_cast<uint32_t>(crc32_combine64(crc_a, crc_b, static_cast<z_off64_t>(size_b)));
}

uint32_t CopyCrc32(uint32_t crc, void* to, const void* from, size_t size) {
  auto* out = static_cast<std::byte*>(to);
  const auto* in = static_cast<const std::byte*>(from);
  while (size > 0) {
    const size_t n = std::min(size, kFusedBlockBytes);
    std::memcpy(out, in, n);
    crc = Crc32(crc, out, n);
    out += n;
    in += n;
    size -= n;
  }
  return crc;
}

}  // namespace lazyckpt
