#include "daemon/peer/stepped_charge.h"

#include <utility>

namespace gradsync::daemon {
namespace {

constexpr std::size_t kStepBytes = 256 << 10;

}  // namespace

absl::Status SteppedCharge::Hold(const MemoryAccount& account, std::size_t bytes) {
  if (bytes <= granted_) return absl::OkStatus();
  const std::size_t charged = bytes + kStepBytes;
  if (charge_.bytes() == 0) {
    auto charge = account.Reserve(charged);
    if (!charge.ok()) return charge.status();
    charge_ = *std::move(charge);
  } else if (absl::Status resized = charge_.Resize(charged); !resized.ok()) {
    return resized;
  }
  granted_ = charged;
  return absl::OkStatus();
}

void SteppedCharge::Release() {
  if (granted_ == free_bytes_) return;
  charge_ = ArenaQuota::Reservation();
  granted_ = free_bytes_;
}

}  // namespace gradsync::daemon
