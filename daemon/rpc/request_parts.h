// Collects a rank's requests that come in several messages.

#ifndef DAEMON_RPC_REQUEST_PARTS_H_
#define DAEMON_RPC_REQUEST_PARTS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/arena/arena_quota.h"
#include "daemon/job/layout_agreement.h"
#include "daemon/job/state_healing.h"
#include "daemon/rpc/decode.h"
#include "gradsync/v1/gradsync.pb.h"

namespace gradsync::daemon {

// The digests of a rank's state, and what the user is charged for them.
struct ChargedDigests {
  std::vector<StateDigest> items;
  ArenaQuota::Reservation charge;
};

// Checks each part when it comes, and charges the user for what it keeps.
//
//   ( LayoutPart* RegisterLayout | StateDigests{more}* StateDigests )*
//
// Used by one thread at a time.
class RequestParts {
 public:
  // The most digests of one rank, in bytes.
  static constexpr std::size_t kMaxDigestBytes = std::size_t{16} << 20;

  // `account` is charged.
  explicit RequestParts(const MemoryAccount& account = {}) : account_(account) {}

  // Adds a LayoutPart. TakeLayout() returns its error.
  // `forward`: another node coordinates the job, and gets the messages as they came.
  void AddLayoutPart(const v1::SessionRequest& request, const DecodeLimits& limits, bool forward);
  // `request` is a RegisterLayout. Returns the whole layout, with its charge, and forgets its
  // parts. Statuses as DecodeLayout(); RESOURCE_EXHAUSTED QUOTA.
  absl::StatusOr<LayoutRequest> TakeLayout(const v1::SessionRequest& request,
                                           const DecodeLimits& limits, bool forward,
                                           std::uint64_t now_ns);
  // Returns the digests of all parts; nullopt: more parts follow. Digests of another transfer are
  // dropped. RESOURCE_EXHAUSTED QUOTA.
  absl::StatusOr<std::optional<ChargedDigests>> TakeDigests(const v1::StateDigests& message);

 private:
  // Charges for items_ and messages_.
  absl::Status ChargeLayout();

  const MemoryAccount account_;

  LayoutItems items_;
  std::shared_ptr<ArenaQuota::Reservation> layout_charge_;  // null: nothing has come
  std::uint64_t item_bytes_ = 0;                            // of items_
  std::uint64_t message_bytes_ = 0;                         // of messages_, parsed
  absl::Status wrong_;                                      // the first error of a layout's parts
  std::vector<std::shared_ptr<const v1::SessionRequest>> messages_;  // if they are forwarded

  std::uint64_t transfer_ = 0;  // of the digests
  ChargedDigests digests_;
  std::uint64_t digest_bytes_ = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_REQUEST_PARTS_H_
