#include "daemon/peer/agent_rank.h"

#include <utility>

#include "daemon/rpc/encode.h"

namespace gradsync::daemon {
namespace {

class AgentSink final : public SessionSink {
 public:
  AgentSink(std::shared_ptr<NodeLink> link, std::uint64_t incarnation)
      : link_(std::move(link)), incarnation_(incarnation) {}

  void Queue(SessionMessage message) override {
    v1::AttachResponse response;
    auto* out = response.mutable_rank_response();
    out->set_incarnation(incarnation_);
    Encode(message, out->mutable_response());
    link_->Queue(std::move(response));
  }
  void Flush() override { link_->Flush(); }

 private:
  const std::shared_ptr<NodeLink> link_;
  const std::uint64_t incarnation_;
};

}  // namespace

std::shared_ptr<SessionSink> MakeAgentSink(std::shared_ptr<NodeLink> link,
                                           std::uint64_t incarnation) {
  return std::make_shared<AgentSink>(std::move(link), incarnation);
}

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
  Encode(registration->plan, assigned);
  assigned->clear_placements();  // the agent makes its own plan, and compares the buckets
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
