// One local rank of a job that another node coordinates. To the rank's session it is the job; it
// forwards the rank's messages to the coordinator, and the answers to the session.

#ifndef DAEMON_PEER_FORWARDING_JOB_H_
#define DAEMON_PEER_FORWARDING_JOB_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "daemon/base/mutex.h"
#include "daemon/base/user_executor.h"
#include "daemon/job/job_port.h"
#include "daemon/peer/agent_layouts.h"
#include "daemon/peer/worker_proxy_server.h"
#include "gradsync/v1/gradsync.pb.h"
#include "gradsync/v1/peer.pb.h"
#include "proto/gradsync/limits.h"

namespace gradsync::daemon {

// Thread-safe. It calls no one with its lock held. It keeps the rank's memory until the coordinator
// says that the session has ended: until then the coordinator may launch on it.
class ForwardingJob final : public JobPort, public std::enable_shared_from_this<ForwardingJob> {
 public:
  // How long a coordinator may take to end a lost rank's session: it waits for what is in flight. A
  // sound coordinator is far faster.
  static constexpr std::uint64_t kEndLimitNs = 30'000'000'000;
  // Excused time (see EndIsOverdue()) is divided by this. So a coordinator that is always excused
  // has 5 minutes.
  static constexpr std::uint64_t kExcusedPart = 10;
  // The most time that counts from one call of EndIsOverdue() to the next. In a longer pause this
  // daemon itself was stopped.
  static constexpr std::uint64_t kLongestTickNs = 1'000'000'000;

  struct Context {
    std::function<void(v1::AttachRequest)> send;
    UserExecutor* executor = nullptr;  // frees memory, and writes done words of void steps
    std::size_t max_buckets = kDefaultMaxBuckets;
    std::string coordinator;                     // its address
    std::shared_ptr<WorkerProxyServer> workers;  // the workers that the coordinator may call
  };
  ForwardingJob(const JoinRequest& request, Context context, std::shared_ptr<SessionSink> sink,
                std::function<void(absl::StatusOr<Joined>)> joined);

  std::uint32_t rank() const { return request_.rank; }
  std::uint64_t incarnation() const { return request_.incarnation; }
  RankSession session() const { return {rank(), incarnation()}; }

  // ---- For the link
  // Asks the coordinator to join the rank to the job.
  void SendOpen();
  // Takes the coordinator's next message. True: it was the last one, and the link forgets this
  // rank. INVALID_ARGUMENT MALFORMED: the message is not valid, and the link ends.
  absl::StatusOr<bool> Take(const v1::SessionResponse& response);
  // The coordinator is lost, or has refused or ended the rank. Nothing touches its memory any more.
  void End(const absl::Status& why);
  // Call it before Lose(), with the same status. If the coordinator ends the rank first, because of
  // another rank's loss, the session still gets `why`.
  void WillBeLost(const absl::Status& why);
  // True if the coordinator has owed the answer to the rank's end for more than kEndLimitNs. Call
  // it often. `excused`: since the last call the coordinator had a reason not to answer. Only a
  // tenth of this time counts (kExcusedPart).
  bool EndIsOverdue(std::uint64_t now_ns, bool excused);
  // True if the trainer's stream has ended before the coordinator has opened the session. Then call
  // Lose(): no session exists yet that would. False before SendOpen(): the coordinator does not
  // know the rank.
  bool IsAbandoned() const;
  // The memory on which the coordinator launches, until End().
  AgentLayouts& layouts() { return *layouts_; }

  // ---- JobPort
  const std::string& job_id() const override { return request_.key.job_id; }
  std::string coordinator() const override { return context_.coordinator; }
  void RegisterLayout(RankSession session, LayoutRequest request, Registered answer) override;
  void KeepMemory(RankSession session, std::uint32_t channel,
                  std::shared_ptr<void> memory) override;
  UserQueue releases() const override { return {context_.executor, user()}; }
  void RefuseLayout(RankSession session, std::uint32_t channel, const absl::Status& why) override;
  absl::Status CheckReplaces(RankSession session, std::uint32_t channel) const override;
  absl::Status ArenaMapped(RankSession session, std::uint32_t channel, RankMemory memory) override;
  absl::Status Deliver(const RankMessage& message) override;
  void Lose(RankSession session, const absl::Status& why) override;
  RankState StateOf(RankSession session) const override;

 private:
  static constexpr std::size_t kMaxPending = 1024;

  struct Pending {
    LayoutSpec spec;
    std::uint32_t replaces = 0;
    Registered answer;
    std::shared_ptr<ArenaQuota::Reservation> charge;  // for `spec`, then for its plan
  };

  Tenant user() const { return Tenant(request_.key.uid, request_.pod); }
  void Forward(v1::SessionRequest request) const;
  // `bytes`: what the message takes in memory.
  void ForwardToSession(const v1::SessionResponse& response, std::size_t bytes);
  void SendEnded(const absl::Status& why) const;
  void OnOpened(const v1::SessionOpened& opened);
  // As AgentLayouts::Assign().
  absl::Status OnAssigned(const v1::LayoutAssigned& assigned);
  // Tells the coordinator that the rank gets no memory for the channel.
  void SendRefused(std::uint32_t channel, const absl::Status& why) const;
  // True: it was the answer to a registration, and has been delivered.
  bool OnLayoutFailed(std::uint64_t request_id, const absl::Status& why);

  const JoinRequest request_;
  const Context context_;
  const std::shared_ptr<AgentLayouts> layouts_;  // shared with the executor's work

  mutable Mutex mutex_;
  std::shared_ptr<SessionSink> sink_ ABSL_GUARDED_BY(mutex_);  // null once the session has ended
  std::function<void(absl::StatusOr<Joined>)> joined_ ABSL_GUARDED_BY(mutex_);
  RankState state_ ABSL_GUARDED_BY(mutex_) = RankState::kAbsent;
  bool open_sent_ ABSL_GUARDED_BY(mutex_) = false;  // OpenSession was sent
  bool end_sent_ ABSL_GUARDED_BY(mutex_) = false;   // RankEnded was sent
  // For how long the coordinator has owed the end, as EndIsOverdue() counts.
  std::uint64_t end_owed_ns_ ABSL_GUARDED_BY(mutex_) = 0;
  // The last call of EndIsOverdue(); 0: none since RankEnded was sent.
  std::uint64_t end_asked_ns_ ABSL_GUARDED_BY(mutex_) = 0;
  // Why the rank was lost here. The coordinator's reason may be another rank, lost with this one.
  absl::Status own_end_ ABSL_GUARDED_BY(mutex_);
  std::map<std::uint64_t, Pending> pending_ ABSL_GUARDED_BY(mutex_);  // by request_id
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_FORWARDING_JOB_H_
