// The stream of one trainer. It passes requests to a SessionHandler, and sends the messages of the
// job and the answers of the handler.

#ifndef DAEMON_RPC_SESSION_STREAM_H_
#define DAEMON_RPC_SESSION_STREAM_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <variant>

#include "daemon/base/tenant.h"
#include "daemon/rpc/connections.h"
#include "daemon/rpc/server_stream.h"
#include "daemon/rpc/session_handler.h"
#include "gradsync/v1/gradsync.grpc.pb.h"

namespace gradsync::daemon {

// The most that a trainer may leave unread. The protocol never needs more than a few hundred
// messages. A large one, a StepDone or the answer to RegisterLayout, takes some megabytes.
inline constexpr UnreadLimits kTrainerUnread{16384, std::size_t{64} << 20};

// A job's message is encoded when it is sent, not under the job's lock.
using SessionItem = std::variant<SessionMessage, v1::SessionResponse>;

// Thread-safe. Owns itself while gRPC uses it; jobs and sessions own it as their sink.
class SessionStream final
    : public ServerStream<v1::SessionRequest, v1::SessionResponse, SessionItem>,
      public SessionReplies {
 public:
  // The context's objects and `connections` outlive the stream. It holds `counted` as long as it
  // exists.
  SessionStream(const SessionContext& context, const Connections& connections,
                std::shared_ptr<void> counted);

  // ---- SessionReplies
  void Queue(SessionMessage message) override;
  void Flush() override { MessageStream::Flush(); }
  bool IsAbandoned() const override { return ended_ns_.load() != 0; }
  void Respond(v1::SessionResponse response) override { Send(std::move(response)); }
  absl::Status TryRespond(v1::SessionResponse response) override;

  // Cancels the stream if the client opens no session, or does not read the end, in time.
  void Tick(std::uint64_t now_ns);

  // True for a stream of this user that has no session yet, or no longer has one.
  bool WithoutSession(const Tenant& of) const;
  // The caller's user; nullopt if the caller is unknown. Constant after OnAccepted().
  std::optional<Tenant> user() const;

 private:
  std::shared_ptr<ClientInput> CallersInput() const override {
    return connections_.Input(caller());
  }
  void OnAccepted() override;
  void OnMessage(const v1::SessionRequest& request) override;
  void OnEnd(const absl::Status& end) override;
  std::size_t BytesOf(const SessionItem& item) const override;
  absl::Status Grant(std::size_t bytes, std::size_t* granted) override;
  void Drained(std::size_t* granted) override;
  void ToWire(SessionItem item, v1::SessionResponse* response) override;

  const SessionContext context_;  // a copy: jobs may own the stream after the service has ended
  const Connections& connections_;
  const std::shared_ptr<void> counted_;
  // Constant after OnAccepted(). Null if the caller is unknown; then the stream has ended.
  std::shared_ptr<SessionHandler> handler_;
  std::uint64_t accepted_ns_ = 0;
  ArenaQuota::Reservation charge_;  // for a queue that is not read; the queue's lock guards it

  std::atomic<std::uint64_t> ended_ns_{0};  // 0: not yet
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_SESSION_STREAM_H_
