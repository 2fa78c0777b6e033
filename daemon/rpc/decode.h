// The boundary: checks every message of a client once, and makes it a plain value that the other
// rooms trust. An error is INVALID_ARGUMENT MALFORMED, or what gradsync.proto lists, and names the
// field that is wrong.

#ifndef DAEMON_RPC_DECODE_H_
#define DAEMON_RPC_DECODE_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/job/layout_agreement.h"
#include "daemon/job/operation_channel.h"
#include "daemon/job/position.h"
#include "daemon/job/state_healing.h"
#include "daemon/session/session_table.h"
#include "gradsync/v1/gradsync.pb.h"
#include "proto/gradsync/limits.h"

namespace gradsync::daemon {

// The most that one message may ask for.
struct DecodeLimits {
  std::size_t parameters = 100'000;          // of one layout
  std::size_t buckets = kDefaultMaxBuckets;  // of one layout
  std::uint64_t staging_bytes = 32u << 20;   // of a rank: the largest all-reduce
};

// Also chooses the protocol version. FAILED_PRECONDITION VERSION, UNIMPLEMENTED LOSS_POLICY.
absl::StatusOr<OpenRequest> DecodeOpen(const v1::OpenSession& message, std::uint32_t* protocol);

// The parameters and buckets of a layout, which may come in several messages.
struct LayoutItems {
  std::vector<Parameter> parameters;
  std::vector<std::pair<DataType, std::uint64_t>> buckets;  // dtype, elements
};
// Adds the message's items to `items`. Checks each item by itself, and how many there are.
absl::Status DecodeLayoutItems(const v1::LayoutPart& message, const DecodeLimits& limits,
                               LayoutItems* items);
// `before`: the items of the parts that came before the message.
absl::StatusOr<LayoutRequest> DecodeLayout(const v1::RegisterLayout& message, LayoutItems before,
                                           const DecodeLimits& limits, std::uint64_t now_ns);

struct OperationRequest {
  std::uint64_t sequence = 0;
  OperationSpec spec;
  bool uses_staging = false;
  std::uint64_t deadline_ns = 0;
};
absl::StatusOr<OperationRequest> DecodeBroadcast(const v1::Broadcast& message,
                                                 std::uint64_t now_ns);
absl::StatusOr<OperationRequest> DecodeBarrier(const v1::Barrier& message, std::uint64_t now_ns);
// How long a replacement waits for the state of the model; 0: for as long as its job goes on.
std::uint64_t DecodeStateTimeoutNs(const v1::FetchState& message);
// Checks that the size is possible.
absl::Status CheckStateOffer(const v1::StateOffer& message);
// Adds the message's digests to `items`.
absl::Status DecodeStateDigests(const v1::StateDigests& message, std::vector<StateDigest>* items);
std::optional<Position> DecodePosition(const v1::BucketReady& message);
std::optional<Position> DecodePosition(const v1::EndStep& message);
absl::StatusOr<OperationRequest> DecodeAllReduce(const v1::AllReduce& message,
                                                 std::uint64_t staging_bytes, std::uint64_t now_ns);

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_DECODE_H_
