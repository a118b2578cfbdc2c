// Where a source's bytes live, and how they reach the staging ring.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "status.h"

namespace lazyckpt {

struct CopyPiece {
  std::byte* to;          // in the ring; valid until Finish returns
  const std::byte* from;  // on the device; its owner keeps it alive until Finish returns
  size_t size;
  uint32_t crc;  // out: the CRC-32 of the piece, set when Finish returns
};

// Two steps, so that a device with its own copy engine works while the calling thread does something else:
// a GPU enqueues copies and an event in Start and waits for the event in Finish; the host copies in Start.
// Any number of threads may call, each with pieces of its own.
class Device {
 public:
  using Ticket = uint64_t;

  virtual ~Device() = default;
  virtual Status Start(std::span<CopyPiece> pieces, Ticket* ticket) = 0;
  virtual Status Finish(std::span<CopyPiece> pieces, Ticket ticket) = 0;
};

Device& HostDevice();

}  // namespace lazyckpt
