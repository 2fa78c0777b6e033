// This node's end of a job that another node coordinates: the stream there, the ranks that speak
// over it, this node's part in the engine, and its workers.

#ifndef DAEMON_PEER_COORDINATOR_LINK_H_
#define DAEMON_PEER_COORDINATOR_LINK_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "daemon/base/clock.h"
#include "daemon/base/executor.h"
#include "daemon/base/mutex.h"
#include "daemon/job/job_port.h"
#include "daemon/peer/cluster.h"
#include "daemon/peer/lent_workers.h"
#include "daemon/peer/message_stream.h"
#include "daemon/peer/node_exchange.h"
#include "daemon/peer/remote_rank.h"
#include "daemon/peer/rendezvous.h"
#include "daemon/rpc/other_nodes.h"
#include "gradsync/v1/peer.grpc.pb.h"

namespace gradsync {

struct LinkContext {
  std::string instance;
  std::string node_name;
  std::string address;  // where this node's engines listen; empty: as the coordinator sees it
  std::uint64_t staging_bytes = 0;
  std::uint64_t reach_patience_ns = 20'000'000'000;
  // A link without ranks is kept so long, and with it the engine, for a job that starts again.
  std::uint64_t idle_ns = 300'000'000'000;
  std::size_t max_buckets = 4096;
  EngineMaker make_engine;
  Executor* executor = nullptr;  // lets go of ranks' memory
  Executor* reaper = nullptr;    // destroys engines, each at once
  const Clock* clock = nullptr;
  JobFinder* here = nullptr;  // jobs of this node, should the coordinator be this daemon itself
};

// Thread-safe. Lock order: CoordinatorLink::mutex_, then RemoteRank's, LentWorkers',
// NodeExchange's and the stream's queue.
class CoordinatorLink final : public MessageStream<v1::AttachResponse, v1::AttachRequest> {
 public:
  using Stream = MessageStream<v1::AttachResponse, v1::AttachRequest>;

  CoordinatorLink(const LinkContext& context, std::string address, JobKey key);

  // Calls; what follows comes on the queue's threads.
  void Dial(const std::shared_ptr<grpc::Channel>& channel, grpc::CompletionQueue* queue);

  // False if this link has ended: the caller makes another one.
  bool Join(const JoinRequest& request, const std::shared_ptr<SessionSink>& sink,
            const std::function<void(absl::StatusOr<Joined>)>& joined);

  void Tick(std::uint64_t now_ns);
  // Hangs up, unless some rank speaks over it or is about to: then false.
  bool Drop(const std::string& why);
  // Ranks' sessions must end with `why`, those that still wait for the coordinator too: the daemon
  // stops.
  void EndRanks(const absl::Status& why);
  // The same, unless some of its ranks has begun a step whose verdict it does not know; once no
  // rank is left, the coordinator is asked to do without this node, and the stream ends. To be
  // called until that is all done: true.
  bool EndIdle(const absl::Status& why);
  bool ended();
  // The coordinator answered that it is this daemon.
  bool is_self();
  std::uint64_t epochs() const { return epochs_.load(); }
  // For status; none if no rank needs it.
  std::optional<RemoteJobSnapshot> Snapshot();

  void Cancel() override { call_.TryCancel(); }

 private:
  enum class State : std::uint8_t { kDialing, kUp, kSelf, kDown };
  enum class Unless : std::uint8_t { kNever, kNeeded };
  class StartStep final : public PeerCompletion {
   public:
    explicit StartStep(CoordinatorLink* link) : link_(link) {}
    void Run(bool ok) override { link_->OnStarted(ok); }

   private:
    CoordinatorLink* const link_;
  };
  struct Waiting {
    JoinRequest request;
    std::shared_ptr<SessionSink> sink;
    std::function<void(absl::StatusOr<Joined>)> joined;
  };
  // This node's part in one engine. The exchange is destroyed on the reaper alone.
  struct Epoch {
    std::uint64_t number = 0;
    std::uint32_t nodes = 0;
    std::uint64_t sequence = 0;  // of the last launch
    std::vector<std::string> node_names;
    EngineSettings settings;
    std::shared_ptr<Rendezvous> store;
    std::unique_ptr<NodeExchange> exchange;
  };

  void OnStarted(bool ok);
  void OnMessage(const v1::AttachResponse& message) override;
  void OnEnd() override;
  void OnFinished() override;
  void StartRead(v1::AttachResponse* message, void* tag) override { stream_->Read(message, tag); }
  void StartWrite(const v1::AttachRequest& message, void* tag) override {
    stream_->Write(message, tag);
  }
  void StartFinish(const absl::Status&, void* tag) override { stream_->Finish(&finish_, tag); }
  // A client waits for the server's last word; Cancel() brings it at once.
  bool CanFinish() const override { return false; }

  void OnWelcome(const v1::Welcome& welcome);
  void StartRank(Waiting waiting) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnRankResponse(const v1::RankResponse& response);
  void OnConnectEngine(const v1::ConnectEngine& connect);
  void OnLaunch(const v1::Launch& launch);
  absl::StatusOr<LentBucket> FindBucket(std::uint64_t arena, std::uint32_t bucket,
                                        std::uint64_t step);
  void LaunchDone(const v1::Launch& launch, const absl::Status& status,
                  const BucketNumbers& numbers);
  void EndEpoch(const absl::Status& why);
  // What is left to do comes with OnEnd. False: it is down already, or some rank speaks over it, or
  // is about to.
  bool GoDown(const std::string& how, Unless unless);
  // Ends the ranks, once the coordinator is lost and nothing touches their memory.
  void MaybeEndRanks();
  std::shared_ptr<CoordinatorLink> Self() {
    return std::static_pointer_cast<CoordinatorLink>(shared_from_this());
  }

  const LinkContext context_;
  const std::string address_;
  const JobKey key_;
  const std::uint64_t dialed_ns_;

  grpc::ClientContext call_;
  std::unique_ptr<v1::Peer::Stub> stub_;
  std::unique_ptr<grpc::ClientAsyncReaderWriter<v1::AttachRequest, v1::AttachResponse>> stream_;
  StartStep on_started_{this};
  std::shared_ptr<CoordinatorLink> starting_;
  grpc::Status finish_;
  std::shared_ptr<LentWorkers> workers_;  // set before the stream starts
  std::atomic<std::uint64_t> heard_ns_;
  std::atomic<std::uint64_t> epochs_{0};

  Mutex mutex_;
  State state_ ABSL_GUARDED_BY(mutex_) = State::kDialing;
  std::string coordinator_ ABSL_GUARDED_BY(mutex_);  // its node's name
  std::string how_down_ ABSL_GUARDED_BY(mutex_);
  bool silent_ ABSL_GUARDED_BY(mutex_) = false;
  bool overdue_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Waiting> waiting_ ABSL_GUARDED_BY(mutex_);
  std::map<std::uint64_t, std::shared_ptr<RemoteRank>> ranks_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Epoch> epoch_ ABSL_GUARDED_BY(mutex_);
  std::size_t in_flight_ ABSL_GUARDED_BY(mutex_) = 0;
  std::size_t joining_ ABSL_GUARDED_BY(mutex_) = 0;  // on their way into ranks_
  absl::Status detaching_ ABSL_GUARDED_BY(mutex_);   // why the coordinator was asked to; or OK
  // Itself, from its end until its ranks have been told of it: all others forget it at once.
  std::shared_ptr<CoordinatorLink> untold_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t idle_since_ns_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t ticked_ns_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace gradsync

#endif  // DAEMON_PEER_COORDINATOR_LINK_H_
