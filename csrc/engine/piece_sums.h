// Checksums the pieces of a chunk, and their cuts where the file holds the checksums of segments.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "engine/checksum.h"
#include "engine/job.h"

namespace lazyckpt {

// Call Begin for each kSource piece of the chunk, in their order, then Copy or Add for its bytes from the first to the
// last, or neither. Allocates nothing.
class PieceSums {
 public:
  explicit PieceSums(Chunk* chunk) : chunk_(chunk), next_(chunk->cut_crcs.data()) {}

  void Begin(const Piece& piece) {
    const Source& source = chunk_->job->sources[piece.source];
    cuts_ = source.segmented ? next_ : nullptr;
    left_ =
        source.segmented ? kSegmentBytes - piece.source_offset % kSegmentBytes : std::numeric_limits<uint64_t>::max();
    whole_ = cut_crc_ = 0;
    cut_bytes_ = 0;
    any_whole_ = false;
    next_ += source.CutsIn(piece.source_offset, piece.size);
  }

  void Copy(std::byte* to, const std::byte* from, size_t size) {
    Each(size, [&](uint32_t crc, size_t at, size_t n) { return CopyCrc32(crc, to + at, from + at, n); });
  }
  void Add(const std::byte* data, size_t size) {
    Each(size, [&](uint32_t crc, size_t at, size_t n) { return Crc32(crc, data + at, n); });
  }

  // Of all bytes of the piece so far.
  uint32_t crc() const {
    if (!any_whole_) return cut_crc_;
    return cut_bytes_ == 0 ? whole_ : Crc32Combine(whole_, cut_crc_, cut_bytes_);
  }

 private:
  template <class F>
  void Each(size_t size, F sum) {
    for (size_t at = 0; at < size;) {
      const size_t n = std::min<uint64_t>(size - at, left_);
      cut_crc_ = sum(cut_crc_, at, n);
      at += n;
      cut_bytes_ += n;
      left_ -= n;
      if (cuts_ != nullptr) *cuts_ = cut_crc_;
      if (left_ > 0) continue;
      whole_ = crc();
      any_whole_ = true;
      cut_crc_ = 0;
      cut_bytes_ = 0;
      left_ = kSegmentBytes;
      ++cuts_;
    }
  }

  Chunk* const chunk_;
  uint32_t* next_;  // of the next piece
  uint32_t* cuts_ = nullptr;
  bool any_whole_ = false;
  uint32_t whole_ = 0;    // of the cuts that are whole
  uint32_t cut_crc_ = 0;  // of the one after them
  uint64_t cut_bytes_ = 0, left_ = 0;
};

}  // namespace lazyckpt
