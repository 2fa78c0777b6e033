// A trainer's session from OpenSession to the end of its stream, with the answers that carry its
// memory. Knows nothing of gRPC.

#ifndef DAEMON_RPC_SESSION_HANDLER_H_
#define DAEMON_RPC_SESSION_HANDLER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"
#include "daemon/job/session_message.h"
#include "daemon/rpc/decode.h"
#include "daemon/rpc/rank_dispatch.h"
#include "daemon/session/session_table.h"
#include "gradsync/v1/gradsync.pb.h"

namespace gradsync::daemon {

// Constant. Its objects outlive the handlers.
struct SessionContext {
  SessionTable* sessions = nullptr;
  const Clock* clock = nullptr;
  DecodeLimits limits;
  std::string daemon_version;
  ArenaQuota* memory = nullptr;  // charged for what users make the daemon keep; null: nothing is
};

// Sends a session the messages of its job and the answers to its own requests.
class SessionReplies : public SessionSink {
 public:
  // Sends an answer unless the session has ended. Callers hold no lock.
  virtual void Respond(v1::SessionResponse response) = 0;
  // The same. But if the user's quota has no place for the answer, sends nothing, and the session
  // goes on: RESOURCE_EXHAUSTED QUOTA.
  virtual absl::Status TryRespond(v1::SessionResponse response) = 0;
};

// Handles the requests of one trainer, from OpenSession to the end of its stream.
//
// One thread at a time calls Handle() and StreamEnded(); everything else is thread-safe. The stream
// and the callbacks of calls under way own it.
class SessionHandler final : public std::enable_shared_from_this<SessionHandler>, private RankPort {
 public:
  SessionHandler(const SessionContext& context, ClientProcess process,
                 std::weak_ptr<SessionReplies> replies);

  // Handles the next request. A bad request ends the session.
  void Handle(const v1::SessionRequest& request);
  // The last request has come. `end` is the status with which the daemon has ended the stream, or
  // OK if it has not. `disconnected` says why the daemon disconnected the client; empty if it did
  // not.
  void StreamEnded(const absl::Status& end, const std::string& disconnected);

  const ClientProcess& process() const { return process_; }
  // True once a valid OpenSession has come.
  bool opened() const { return opened_.load(); }
  // Logs a void step before its StepDone is sent, so that the log shows which ranks know of it.
  void LogIfVoid(const v1::StepDone& done) const;

 private:
  // ---- RankPort, once the session is open
  RankSession session() const override { return session_->identity().session(); }
  JobPort& job() const override { return session_->job(); }
  absl::Status ArenaMapped(std::uint32_t channel) override {
    return session_->ArenaMapped(channel);
  }
  absl::StatusOr<StagingMemory> Staging() override { return session_->Staging(); }
  absl::Status RegisterLayout(LayoutRequest request) override;
  void Respond(v1::SessionResponse response) override;

  void TakeArrived();
  absl::Status Take(const v1::SessionRequest& request, std::uint64_t now_ns);
  absl::Status Open(const v1::OpenSession& message);
  void Opened(std::uint32_t protocol, std::uint32_t world_size,
              absl::StatusOr<std::shared_ptr<Session>> opened);
  absl::Status LayoutRegistered(const std::shared_ptr<Session>& session, std::uint64_t request_id,
                                const absl::StatusOr<Session::Registration>& registration);
  // Sends LayoutAssigned. If it does not fit the user's quota, refuses the layout instead.
  void Assign(const std::shared_ptr<Session>& session, v1::SessionResponse response);
  absl::Status ClosedError(int patience_ms, const std::string& disconnected) const;
  void LogRefusal(const absl::Status& why) const;
  // Ends the stream of a client that has no session.
  void Refuse(const absl::Status& why);

  const SessionContext context_;  // a copy: a session may open after the service has ended
  const ClientProcess process_;
  const std::weak_ptr<SessionReplies> replies_;

  // Constant once opened_ is set.
  std::string job_id_;
  std::uint32_t rank_ = 0;
  std::atomic<bool> opened_{false};

  std::shared_ptr<Session> session_;  // used by Handle() and StreamEnded() alone

  Mutex mutex_;
  std::shared_ptr<Session> arrived_ ABSL_GUARDED_BY(mutex_);  // until it becomes session_
  bool stream_ended_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_SESSION_HANDLER_H_
