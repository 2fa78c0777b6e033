#include "daemon/peer/agent_rank.h"

#include <utility>

#include "daemon/rpc/encode.h"

namespace gradsync::daemon {

absl::Status AgentRank::RegisterLayout(LayoutRequest request) {
  const std::uint64_t request_id = request.request_id;
  const auto registration = job_->RegisterLayout(session(), std::move(request));
  if (!registration.ok()) {
    RefuseLayout(request_id, registration.status());
    return absl::OkStatus();
  }
  v1::SessionResponse response;
  auto* assigned = response.mutable_layout_assigned();
  assigned->set_request_id(request_id);
  assigned->set_channel(registration->channel);
  // Without placements: the agent makes its own plan, and compares the buckets.
  EncodeBuckets(registration->plan, assigned);
  Respond(std::move(response));
  return absl::OkStatus();
}

void AgentRank::Respond(v1::SessionResponse response) {
  v1::AttachResponse message;
  message.mutable_rank_response()->set_incarnation(place_.incarnation);
  *message.mutable_rank_response()->mutable_response() = std::move(response);
  link_->Queue(std::move(message));
  link_->Flush();
}

}  // namespace gradsync::daemon
