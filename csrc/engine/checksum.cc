#include "engine/checksum.h"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <cstring>

#ifdef LAZYCKPT_HAVE_LIBDEFLATE
#include <libdeflate.h>
#endif
#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace lazyckpt {
namespace {

uint32_t CopyBlock(uint32_t crc, std::byte* to, const std::byte* from, size_t size) {
  std::memcpy(to, from, size);
  return Crc32(crc, to, size);
}

constexpr size_t kLineBytes = 64;

#ifdef __SSE2__
constexpr size_t kStrideBytes = 2 << 10;  // with its copy well within the L1 cache

// Copies one stride past the cache: lines of `to` are neither loaded before they are written nor kept. The checksum is
// computed from a second copy of the same loads, so it fits the copy even if `from` changes.
uint32_t StreamBlock(uint32_t crc, std::byte* to, const std::byte* from) {
  constexpr size_t kAheadBytes = 4096;  // the processor prefetches only up to the end of a page
  alignas(kLineBytes) std::array<std::byte, kStrideBytes> copy;
  for (size_t at = 0; at < kStrideBytes; at += kLineBytes) {
    __builtin_prefetch(from + at + kAheadBytes, 0, 2);
    for (size_t i = at; i < at + kLineBytes; i += sizeof(__m128i)) {
      const __m128i word = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
      _mm_store_si128(reinterpret_cast<__m128i*>(copy.data() + i), word);
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), word);
    }
  }
  return Crc32(crc, copy.data(), kStrideBytes);
}

void FinishStream() { _mm_sfence(); }  // orders streaming stores before a later release
#else
constexpr size_t kStrideBytes = 256 << 10;  // with its copy within the L2 cache of a core

uint32_t StreamBlock(uint32_t crc, std::byte* to, const std::byte* from) {
  return CopyBlock(crc, to, from, kStrideBytes);
}

void FinishStream() {}
#endif

}  // namespace

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
  if (size < kStrideBytes) return CopyBlock(crc, out, in, size);
  size_t n = std::min(size, -reinterpret_cast<uintptr_t>(to) % kLineBytes);
  while (size > 0) {
    crc = n == kStrideBytes ? StreamBlock(crc, out, in) : CopyBlock(crc, out, in, n);
    out += n;
    in += n;
    size -= n;
    n = std::min(size, kStrideBytes);
  }
  FinishStream();
  return crc;
}

}  // namespace lazyckpt
