// This node's part in one job that another node coordinates: the stream to the coordinator, the
// local ranks that use it, this node's engine, and its workers.

#ifndef DAEMON_PEER_COORDINATOR_LINK_H_
#define DAEMON_PEER_COORDINATOR_LINK_H_

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/async_stream.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "daemon/arena/arena_quota.h"
#include "daemon/base/clock.h"
#include "daemon/base/executor.h"
#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"
#include "daemon/base/user_executor.h"
#include "daemon/engine/engine_settings.h"
#include "daemon/job/job_port.h"
#include "daemon/peer/agent_engine.h"
#include "daemon/peer/dialed_sockets.h"
#include "daemon/peer/forwarded_ranks.h"
#include "daemon/peer/forwarding_job.h"
#include "daemon/peer/lazy_message.h"
#include "daemon/peer/peer_protocol.h"
#include "daemon/peer/peer_turns.h"
#include "daemon/peer/stepped_charge.h"
#include "daemon/peer/user_rate.h"
#include "daemon/peer/worker_proxy_server.h"
#include "daemon/rpc/message_stream.h"
#include "daemon/rpc/node_status_source.h"
#include "gradsync/v1/peer.pb.h"
#include "proto/gradsync/limits.h"

namespace gradsync::daemon {

struct LinkContext {
  std::shared_ptr<void> counted;           // counts the link in a StreamCount
  std::shared_ptr<DialedSockets> sockets;  // of the link's channel
  Tenant payer;                  // of the rank for which it is made: the job counts for this user
  ArenaQuota* memory = nullptr;  // is charged for what waits for the coordinator; null: nothing is
  std::string instance;
  std::string node_name;
  // Where this node's engines listen; empty: the address that the coordinator sees.
  std::string address;
  std::uint64_t staging_bytes = 0;
  // How long a link without ranks stays, with its engine, in case the job starts again.
  std::uint64_t idle_ns = 300'000'000'000;
  std::size_t max_buckets = kDefaultMaxBuckets;
  EngineLimits engine_limits;
  std::shared_ptr<UserRate> engine_rate;  // of the engines that coordinators connect
  EngineMaker make_engine;
  PeerTurns* turns = nullptr;
  UserExecutor* executor = nullptr;  // as in ForwardingJob::Context
  Executor* reaper = nullptr;        // destroys engines, each on a thread of its own
  const Clock* clock = nullptr;
  bool tls = false;           // the coordinator has shown a certificate
  JobFinder* here = nullptr;  // this node's jobs, in case the coordinator is this daemon itself
  // Joins a rank by another link when this one's connection is lost before the Welcome. It outlives
  // the link's stream. Null: the rank does not join.
  JobFinder* anew = nullptr;
};

// Thread-safe. Lock order: CoordinatorLink::mutex_, then those of ForwardingJob, WorkerProxyServer,
// AgentEngine and MessageStream. The stream keeps the link alive until the stream has ended,
// and the link then keeps itself alive until its ranks know of that end (unended_).
class CoordinatorLink final
    : public MessageStream<LazyMessage<v1::AttachResponse>, v1::AttachRequest> {
 public:
  using Stream = MessageStream<LazyMessage<v1::AttachResponse>, v1::AttachRequest>;

  static std::shared_ptr<CoordinatorLink> Create(const LinkContext& context, std::string address,
                                                 JobKey key);
  // For Create().
  CoordinatorLink(const LinkContext& context, std::string address, JobKey key);

  const Tenant& payer() const { return context_.payer; }

  // Connects. Everything that follows happens on the threads of the queue and of the turns.
  void Dial(const std::shared_ptr<grpc::Channel>& channel, grpc::CompletionQueue* queue);

  // Joins the rank to the job. False if this link has ended: the caller makes another one.
  bool Join(const JoinRequest& request, const std::shared_ptr<SessionSink>& sink,
            const std::function<void(absl::StatusOr<Joined>)>& joined);

  void Tick(std::uint64_t now_ns);
  // The bytes that were read in vain from the coordinator.
  std::uint64_t LookAtConnection() { return context_.sockets->Look(); }
  // Ends the link if what the coordinator sends does harm. `vain`: the sum of LookAtConnection()
  // over the user's links, of which `most` is allowed. Returns HasHarmed().
  bool EndIfHarmful(std::uint64_t vain, std::uint64_t most);
  // True if what the coordinator sent did harm: its connection has ended, or will.
  bool HasHarmed() { return context_.sockets->HasHarmed(); }
  // Ends the link and returns true, unless a rank uses it or is about to.
  bool Drop(const std::string& why);
  // Ends the ranks' sessions with `why`, including ranks that still wait for the coordinator. For a
  // daemon that stops.
  void EndRanks(const absl::Status& why);
  // The same, unless a rank has begun a step whose verdict is unknown. When no rank is left, it
  // asks the coordinator to continue without this node; the coordinator then ends the stream. Call
  // it until it returns true: the link has ended.
  bool EndIdle(const absl::Status& why);
  bool ended();
  // The coordinator answered that it is this daemon.
  bool is_self();
  std::uint64_t engines_made() const { return engine_->engines_made(); }
  // For status; nullopt if no rank uses the link, or the job is not wanted.
  std::optional<RemoteJobSnapshot> Snapshot(RemoteJobFilter wanted);

  // Ends the stream and its connection.
  void Cancel() override {
    call_.TryCancel();
    CloseConnection();
  }
  // Closes the connection for good. Call it only when the link has ended, or is about to.
  void CloseConnection() { context_.sockets->Close(); }

  // ---- For the stream
  void InTurn(const LazyMessage<v1::AttachResponse>* message, UserTurns::Take take) override;
  void OnMessage(const LazyMessage<v1::AttachResponse>& received) override;
  void OnEnd(const absl::Status& end) override;
  void OnFinished() override;

 private:
  enum class State : std::uint8_t { kDialing, kUp, kSelf, kEnded };
  enum class Unless : std::uint8_t { kNever, kNeeded };
  using Waiting = ForwardedRanks::Waiting;

  MemoryAccount Account() const { return {context_.memory, context_.payer}; }
  void OnStarted(bool ok);
  // A trainer's message can take many times its size in memory.
  std::size_t BytesOf(const v1::AttachRequest& message) const override {
    return message.SpaceUsedLong();
  }
  absl::Status Grant(std::size_t bytes, std::size_t* granted) override {
    absl::Status held = charge_.Hold(Account(), bytes);
    *granted = charge_.granted();
    return held;
  }
  void Drained(std::size_t* granted) override {
    charge_.Release();
    *granted = charge_.granted();
  }
  void ToWire(v1::AttachRequest message, v1::AttachRequest* out) override {
    *out = std::move(message);
  }
  void StartRead(LazyMessage<v1::AttachResponse>* message, void* tag) override {
    stream_->Read(message, tag);
  }
  void StartWrite(const v1::AttachRequest& message, void* tag) override {
    stream_->Write(message, tag);
  }
  void StartFinish(const absl::Status&, void* tag) override { stream_->Finish(&finish_, tag); }
  // A client finishes after the server. Cancel() ends the call at once.
  bool CanFinish() const override { return false; }

  void Take(const v1::AttachResponse& message);
  void OnWelcome(const v1::Welcome& welcome);
  bool Welcomed();
  // Ends the dialing: the ranks that wait get COORDINATOR_REFUSED.
  void Refuse(const std::string& why);
  absl::Status Refused(const std::string& why) const;
  // Ends the link, whose coordinator has broken the protocol.
  void Break(const std::string& why);
  // The same, at any time, and the table connects to no coordinator for this user for a while.
  void EndForHarm(const std::string& why);
  // What harm the coordinator has done, if HasHarmed().
  std::string WhyHarmful();
  // Ends the ranks whose trainers have given up before the coordinator has answered.
  void EndAbandoned();
  // Fails the ranks that have waited long enough for the coordinator. `why` is what ReachProbe
  // found.
  void OnProbed(const std::string& why);
  absl::Status Unreachable(const std::string& why) const;
  // False: the rank has waited long enough, or has lost too many connections.
  bool JoinAnew(const Waiting& waiting);
  void StartRank(Waiting waiting) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnRankResponse(const v1::RankResponse& response);
  // Notes that the coordinator has just used this node. It launches here even if this node's ranks
  // have all exited.
  void NoteUse();
  std::shared_ptr<ForwardingJob> FindRank(std::uint64_t incarnation);
  absl::StatusOr<ProxiedBucket> FindBucket(std::uint64_t arena, std::uint32_t bucket,
                                           std::uint64_t step);
  // Marks the link as ended; OnEnd() does the rest. `cause` counts if there is none yet. False if
  // it has ended already or, with kNeeded, if a rank uses it or is about to.
  bool MarkEnded(const std::string& cause, Unless unless);
  // Ends the ranks' sessions, once the coordinator is lost and nothing touches their memory.
  void MaybeEndRanks();
  std::shared_ptr<CoordinatorLink> Self() {
    return std::static_pointer_cast<CoordinatorLink>(shared_from_this());
  }

  const LinkContext context_;
  const std::string address_;
  const JobKey key_;

  grpc::ClientContext call_;
  std::unique_ptr<grpc::ClientAsyncReaderWriter<v1::AttachRequest, LazyMessage<v1::AttachResponse>>>
      stream_;
  MethodCompletion<CoordinatorLink, &CoordinatorLink::OnStarted> on_started_{this};
  std::shared_ptr<CoordinatorLink> starting_;
  grpc::Status finish_;
  SteppedCharge charge_{kFreeUnreadBytes};  // for what waits; the queue's lock guards it
  std::shared_ptr<UserTurns> turns_;        // the payer's; null before the first message
  // Constant after Create().
  std::shared_ptr<AgentEngine> engine_;
  std::shared_ptr<WorkerProxyServer> workers_;
  std::atomic<std::uint64_t> heard_ns_;

  Mutex mutex_;
  State state_ ABSL_GUARDED_BY(mutex_) = State::kDialing;
  bool welcomed_ ABSL_GUARDED_BY(mutex_) = false;    // its Welcome was accepted
  std::string coordinator_ ABSL_GUARDED_BY(mutex_);  // its node's name
  // Why the link ends: the first cause that was noticed. Empty: none so far.
  std::string cause_ ABSL_GUARDED_BY(mutex_);
  ForwardedRanks ranks_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<grpc::Channel> channel_ ABSL_GUARDED_BY(mutex_);  // null until Dial()
  grpc::CompletionQueue* queue_ ABSL_GUARDED_BY(mutex_) = nullptr;  // null until Dial()
  bool probing_ ABSL_GUARDED_BY(mutex_) = false;                    // a ReachProbe is under way
  absl::Status detaching_ ABSL_GUARDED_BY(mutex_);                  // not OK: why Detach was sent
  // Keeps this object alive from the link's end until its ranks have ended, because others drop
  // their references at once.
  std::shared_ptr<CoordinatorLink> unended_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t idle_since_ns_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t ticked_ns_ ABSL_GUARDED_BY(mutex_) = 0;
  // When Tick() has last told the coordinator that this node lives.
  std::uint64_t told_ns_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_COORDINATOR_LINK_H_
