#include "daemon/rpc/session_stream.h"

#include <optional>
#include <utility>

#include "daemon/base/error.h"
#include "daemon/rpc/encode.h"

namespace gradsync::daemon {
namespace {

// Time that a client has to open a session.
constexpr std::uint64_t kOpenPatienceNs = 30'000'000'000;
// Time that a client has to read the end of its session.
constexpr std::uint64_t kEndPatienceNs = 1'000'000'000;
// A queue of so many bytes costs its user nothing. A longer one is charged in steps.
constexpr std::size_t kFreeQueueBytes = 64 << 10;
constexpr std::size_t kQueueStepBytes = 256 << 10;

}  // namespace

SessionStream::SessionStream(const SessionContext& context, const Connections& connections,
                             std::shared_ptr<void> counted)
    : ServerStream(kTrainerUnread),
      context_(context),
      connections_(connections),
      counted_(std::move(counted)) {}

void SessionStream::Queue(SessionMessage message) {
  const auto* const end = std::get_if<SessionEndMessage>(&message);
  if (end == nullptr) return MessageStream::Queue(std::move(message));
  std::uint64_t not_yet = 0;
  ended_ns_.compare_exchange_strong(not_yet, context_.clock->NowNs());
  const absl::Status status = end->status;
  if (status.ok()) {
    QueueEnd(status);  // the stream's own OK says it
  } else {
    QueueEnd(status, std::move(message));
  }
}

absl::Status SessionStream::TryRespond(v1::SessionResponse response) {
  absl::Status granted = QueueIfGranted(std::move(response));
  Flush();
  return granted;
}

void SessionStream::Tick(std::uint64_t now_ns) {
  const std::uint64_t ended_ns = ended_ns_.load();
  const bool end_overdue = ended_ns != 0 && now_ns > ended_ns + kEndPatienceNs;
  const bool open_overdue =
      handler_ != nullptr && !handler_->opened() && now_ns > accepted_ns_ + kOpenPatienceNs;
  if (end_overdue || open_overdue) Cancel();
}

std::optional<Tenant> SessionStream::user() const {
  if (handler_ == nullptr) return std::nullopt;
  return handler_->process().tenant();
}

bool SessionStream::WithoutSession(const Tenant& of) const {
  return user() == of && (!handler_->opened() || ended_ns_.load() != 0);
}

void SessionStream::OnAccepted() {
  accepted_ns_ = context_.clock->NowNs();
  const auto process = connections_.Find(caller());
  if (process.has_value()) {
    const auto self = std::static_pointer_cast<SessionStream>(shared_from_this());
    handler_ = std::make_shared<SessionHandler>(context_, *process, self);
  } else {
    Queue(SessionEndMessage{
        MakeError(absl::StatusCode::kUnavailable, reason::kCredentials,
                  "the connection has closed, or did not come through the daemon's socket")});
  }
}

void SessionStream::OnMessage(const v1::SessionRequest& request) {
  if (!Ended()) handler_->Handle(request);
}

void SessionStream::OnEnd(const absl::Status& end) {
  if (handler_ != nullptr) handler_->StreamEnded(end, WhyDisconnected());
  Queue(SessionEndMessage{MakeError(absl::StatusCode::kCancelled, reason::kStreamEnded,
                                    "the client closed the stream")});
}

std::size_t SessionStream::BytesOf(const SessionItem& item) const {
  if (const auto* message = std::get_if<SessionMessage>(&item)) return QueuedBytes(*message);
  return sizeof(SessionItem) + QueuedBytes(std::get<v1::SessionResponse>(item));
}

// A queue that is read stays below kFreeQueueBytes, so that no message of a step waits for the
// ledger.
absl::Status SessionStream::Grant(std::size_t bytes, std::size_t* granted) {
  if (bytes <= kFreeQueueBytes || handler_ == nullptr) {
    *granted = kFreeQueueBytes;
    return absl::OkStatus();
  }
  const std::size_t charged = bytes + kQueueStepBytes;
  if (charge_.bytes() == 0) {
    auto charge = MemoryAccount{context_.memory, handler_->process().tenant()}.Reserve(charged);
    if (!charge.ok()) return charge.status();
    charge_ = *std::move(charge);
  } else if (absl::Status resized = charge_.Resize(charged); !resized.ok()) {
    return resized;
  }
  *granted = charged;
  return absl::OkStatus();
}

void SessionStream::Drained(std::size_t* granted) {
  if (*granted <= kFreeQueueBytes) return;
  charge_ = ArenaQuota::Reservation();
  *granted = kFreeQueueBytes;
}

void SessionStream::ToWire(SessionItem item, v1::SessionResponse* response) {
  if (auto* answer = std::get_if<v1::SessionResponse>(&item)) {
    *response = std::move(*answer);
    return;
  }
  Encode(std::get<SessionMessage>(item), response);
  if (response->has_step_done()) handler_->LogIfVoid(response->step_done());
}

}  // namespace gradsync::daemon
