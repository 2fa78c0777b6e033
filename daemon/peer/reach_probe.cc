#include "daemon/peer/reach_probe.h"

#include <chrono>
#include <cstddef>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {
namespace {

constexpr std::chrono::milliseconds kLimit{200};
constexpr std::size_t kMaxWhyBytes = 4096;

}  // namespace

void ReachProbe::Start(const std::shared_ptr<grpc::Channel>& channel, grpc::CompletionQueue* queue,
                       Answer answer) {
  auto* const probe = new ReachProbe(std::move(answer));
  probe->call_.set_deadline(std::chrono::system_clock::now() + kLimit);
  probe->stub_ = v1::Peer::NewStub(channel);
  probe->stream_ = probe->stub_->PrepareAsyncAttach(&probe->call_, queue);
  probe->stream_->StartCall(&probe->on_started_);
}

void ReachProbe::OnStarted(bool ok) {
  // Connected after all: the call that waits goes on.
  if (ok) call_.TryCancel();
  stream_->Finish(&status_, &on_finished_);
}

void ReachProbe::OnFinished(bool) {
  const bool unavailable = status_.error_code() == grpc::StatusCode::UNAVAILABLE;
  // If it is not gRPC's own, the text may be any bytes.
  answer_(unavailable ? ValidText(status_.error_message(), kMaxWhyBytes) : "");
  delete this;
}

std::string ExplainUnreachable(const std::string& why) {
  if (why.empty()) {
    return "nothing answers. Check that gradsyncd runs there and is not stopped, and that its port "
           "is open between the nodes.";
  }
  if (absl::StrContains(why, "DNS resolution failed")) {
    return "its name cannot be resolved. Check that coordinator or MASTER_ADDR is the name or "
           "address of rank 0's node.";
  }
  if (absl::StrContains(why, "Connection refused")) {
    return "nothing listens there (connection refused). Start gradsyncd on that node with "
           "peer_listen, or give its port: coordinator is HOST:PORT.";
  }
  return absl::StrCat(
      why,
      ". Check that coordinator or MASTER_ADDR names rank 0's node, that its port "
      "is open between the nodes, and that both daemons have peer_tls_* or neither.");
}

}  // namespace gradsync::daemon
