#include "daemon/rpc/gradsync_service.h"

#include <grpcpp/grpcpp.h>

#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace gradsync::daemon {
namespace {

// One thread can take the next message while the other reduces a small bucket.
constexpr int kThreads = 2;
// Time that streams have to end in Stop(), after the server has cancelled them.
constexpr absl::Duration kStopPatience = absl::Seconds(5);

}  // namespace

GradsyncService::GradsyncService(SessionContext context, const Connections* connections)
    : context_(std::move(context)), connections_(connections) {}

void GradsyncService::Register(grpc::ServerBuilder* builder) {
  builder->RegisterService(&service_);
  dispatcher_ = std::make_unique<CompletionDispatcher>(builder->AddCompletionQueue());
}

void GradsyncService::Start() {
  StreamAcceptor<SessionStream>::Hooks hooks;
  hooks.make = [this] { return std::make_shared<SessionStream>(context_, *connections_); };
  hooks.request = [this](auto* call, auto* stream, auto* queue, void* tag) {
    service_.RequestSession(call, stream, queue, queue, tag);
  };
  acceptor_.Start(std::move(hooks), dispatcher_->queue());
  dispatcher_->Start(kThreads);
}

void GradsyncService::Tick(std::uint64_t now_ns) {
  for (const auto& stream : acceptor_.Open()) stream->Tick(now_ns);
}

bool GradsyncService::Idle() { return acceptor_.Open().empty(); }

void GradsyncService::Stop() {
  acceptor_.Stop();
  const absl::Time deadline = absl::Now() + kStopPatience;
  // Polls, because streams end without a notification. This happens once, at the daemon's end.
  while (!Idle() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
  dispatcher_->Stop();
}

}  // namespace gradsync::daemon
