// Charges a user for memory that grows and shrinks all the time, such as a queue.

#ifndef DAEMON_PEER_STEPPED_CHARGE_H_
#define DAEMON_PEER_STEPPED_CHARGE_H_

#include <cstddef>

#include "absl/status/status.h"
#include "daemon/arena/arena_quota.h"

namespace gradsync::daemon {

// A small amount is free, and more is charged in steps. So the usual case never waits for the
// quota's lock.
//
// Externally synchronized. The account's quota outlives it.
class SteppedCharge {
 public:
  // Up to `free_bytes` bytes are not charged.
  explicit SteppedCharge(std::size_t free_bytes) : free_bytes_(free_bytes), granted_(free_bytes) {}

  // The most that may be held without another Hold().
  std::size_t granted() const { return granted_; }
  // The user is about to hold `bytes` in all; always name the same account. RESOURCE_EXHAUSTED as
  // ArenaQuota::Reserve(); then nothing changes.
  absl::Status Hold(const MemoryAccount& account, std::size_t bytes);
  // The user now holds no more than what is free. Gives back the rest.
  void Release();

 private:
  const std::size_t free_bytes_;
  std::size_t granted_;
  ArenaQuota::Reservation charge_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_STEPPED_CHARGE_H_
