#include "daemon/rpc/gradsync_service.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {
namespace {

// One thread can take the next message while the other reduces a small bucket.
constexpr int kThreads = 2;

}  // namespace

GradsyncService::GradsyncService(SessionContext context, const Connections* connections)
    : context_(std::move(context)), connections_(connections) {}

void GradsyncService::Register(grpc::ServerBuilder* builder) {
  builder->RegisterService(&service_);
  dispatcher_ = std::make_unique<CompletionDispatcher>(builder->AddCompletionQueue());
}

void GradsyncService::Start() {
  StreamAcceptor<SessionStream>::Hooks hooks;
  hooks.make = [this] {
    return std::make_shared<SessionStream>(context_, *connections_, streams_.Add());
  };
  hooks.request = [this](auto* call, auto* stream, auto* queue, void* tag) {
    service_.RequestSession(call, stream, queue, queue, tag);
  };
  hooks.accepted = [this](SessionStream* stream, const auto& open) { Admit(stream, open); };
  dispatcher_->Start(kThreads);  // first, because it may fail
  acceptor_.Start(std::move(hooks), dispatcher_->queue());
}

void GradsyncService::Admit(SessionStream* stream,
                            const std::vector<std::shared_ptr<SessionStream>>& open) {
  const auto user = stream->user();
  if (!user.has_value()) return;
  const auto count = static_cast<std::size_t>(std::count_if(
      open.begin(), open.end(), [&](const auto& one) { return one->WithoutSession(*user); }));
  const std::size_t most = 2 * context_.sessions->policy().quota_sessions_per_user;
  if (count <= most) return;
  stream->Queue(SessionEndMessage{MakeError(
      absl::StatusCode::kResourceExhausted, reason::kQuota,
      absl::StrCat("user ", user->Text(), " has ", most,
                   " streams without a session, twice as many as ",
                   "quota_sessions_per_user allows sessions: open sessions on them, or close "
                   "them"))});
}

void GradsyncService::Tick(std::uint64_t now_ns) {
  for (const auto& stream : acceptor_.Open()) stream->Tick(now_ns);
}

bool GradsyncService::Idle() { return acceptor_.Open().empty(); }

void GradsyncService::Stop(std::chrono::steady_clock::time_point deadline) {
  acceptor_.Stop();
  streams_.WaitForNone(deadline);
  dispatcher_->Stop();
}

}  // namespace gradsync::daemon
