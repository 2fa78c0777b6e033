// What has come of a rank's requests that are longer than one message.

#ifndef DAEMON_RPC_REQUEST_PARTS_H_
#define DAEMON_RPC_REQUEST_PARTS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/job/layout_agreement.h"
#include "daemon/job/state_healing.h"
#include "daemon/rpc/decode.h"
#include "gradsync/v1/gradsync.pb.h"

namespace gradsync::daemon {

// Checks each part when it comes, so that what it keeps is bounded.
//
//   ( LayoutPart* RegisterLayout | StateDigests{more}* StateDigests )*
//
// Used by one thread at a time.
class RequestParts {
 public:
  // The most digests of one rank: names and hashes, in bytes.
  static constexpr std::size_t kMaxDigestBytes = std::size_t{16} << 20;

  // Adds a LayoutPart. TakeLayout() returns its error.
  // `forward`: another node coordinates the job, and gets the messages as they came.
  void AddLayoutPart(const v1::SessionRequest& request, const DecodeLimits& limits, bool forward);
  // `request` is a RegisterLayout. Returns the whole layout, and forgets its parts. Statuses as
  // DecodeLayout().
  absl::StatusOr<LayoutRequest> TakeLayout(const v1::SessionRequest& request,
                                           const DecodeLimits& limits, bool forward,
                                           std::uint64_t now_ns);
  // Returns the digests of all parts, and forgets them; nullopt: more parts follow. Those of
  // another transfer are dropped.
  absl::StatusOr<std::optional<std::vector<StateDigest>>> TakeDigests(
      const v1::StateDigests& message);

 private:
  LayoutItems items_;
  absl::Status wrong_;  // the first error of a layout's parts
  std::vector<std::shared_ptr<const v1::SessionRequest>> messages_;  // if they are forwarded

  std::uint64_t transfer_ = 0;  // of the digests
  std::vector<StateDigest> digests_;
  std::size_t digest_bytes_ = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_REQUEST_PARTS_H_
