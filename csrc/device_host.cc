#include "checksum.h"
#include "device.h"

namespace lazyckpt {
namespace {

class Host final : public Device {
 public:
  Status Start(std::span<CopyPiece> pieces, Ticket* ticket) override {
    for (CopyPiece& p : pieces) p.crc = CopyCrc32(0, p.to, p.from, p.size);
    *ticket = 0;
    return Status::Ok();
  }
  Status Finish(std::span<CopyPiece>, Ticket) override { return Status::Ok(); }
};

}  // namespace

Device& HostDevice() {
  static Host host;
  return host;
}

}  // namespace lazyckpt
