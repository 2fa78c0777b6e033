// A node that has attached itself for one job, on the coordinator: its ranks' messages become calls
// of the job, and what the job says to them goes back.

#ifndef DAEMON_PEER_ATTACHED_NODE_H_
#define DAEMON_PEER_ATTACHED_NODE_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"
#include "daemon/job/job_table.h"
#include "daemon/peer/attached_worker.h"
#include "daemon/peer/cluster.h"
#include "daemon/peer/message_stream.h"
#include "daemon/rpc/decode.h"
#include "gradsync/v1/peer.grpc.pb.h"

namespace gradsync {

// Ranks of one node in one job; 8 GPUs are common.
inline constexpr std::size_t kMaxRanksPerNode = 1024;
// A node that answers no ping for so long is lost.
inline constexpr std::uint64_t kPeerSilenceNs = 5'000'000'000;
inline constexpr std::uint64_t kPingPeriodNs = 1'000'000'000;

struct AttachedContext {
  std::string instance;
  std::string node_name;
  std::uint64_t staging_bytes = 0;
  DecodeLimits limits;
  const Clock* clock = nullptr;
  JobTable* jobs = nullptr;
  // The cluster of a job key, or why this node has none for it.
  std::function<absl::StatusOr<std::shared_ptr<Cluster>>(const JobKey&)> find_cluster;
  // How long other nodes' workers are kept for the trainers that come next.
  std::uint64_t worker_idle_limit_ns = 60'000'000'000;
};

class AttachedNode final : public MessageStream<v1::AttachRequest, v1::AttachResponse>,
                           public NodeLink {
 public:
  using Stream = MessageStream<v1::AttachRequest, v1::AttachResponse>;
  using Accepted = std::function<void(std::shared_ptr<AttachedNode>, bool ok)>;

  explicit AttachedNode(const AttachedContext& context)
      : context_(context), workers_(context.clock, context.worker_idle_limit_ns) {}

  // Takes the next call; `accepted` is told when it has come, or that none will.
  void Accept(v1::Peer::AsyncService* service, grpc::ServerCompletionQueue* queue,
              Accepted accepted);
  // Asks whether it is there, and ends it if it is not.
  void Tick(std::uint64_t now_ns);

  // ---- NodeLink
  void Queue(v1::AttachResponse message) override { Stream::Queue(std::move(message)); }
  void Flush() override { Stream::Flush(); }
  void Close(const absl::Status& status) override { Stream::Close(status); }
  const std::string& node_name() const override { return node_name_; }
  const std::string& address() const override { return address_; }
  std::uint64_t heard_ns() const override { return heard_ns_.load(); }

  void Cancel() override { call_.TryCancel(); }

 private:
  class RankSink;
  class AcceptStep final : public PeerCompletion {
   public:
    explicit AcceptStep(AttachedNode* node) : node_(node) {}
    void Run(bool ok) override { node_->OnAccept(ok); }

   private:
    AttachedNode* const node_;
  };
  struct Member {
    std::uint32_t rank = 0;
    std::shared_ptr<Job> job;
    std::uint64_t incarnation = 0;  // in the job
  };

  void OnAccept(bool ok);
  void OnMessage(const v1::AttachRequest& message) override;
  void OnEnd() override;
  void StartRead(v1::AttachRequest* message, void* tag) override { stream_.Read(message, tag); }
  void StartWrite(const v1::AttachResponse& message, void* tag) override {
    stream_.Write(message, tag);
  }
  void StartFinish(const absl::Status& status, void* tag) override;
  bool CanFinish() const override { return true; }

  absl::Status Take(const v1::AttachRequest& message);
  absl::Status OnHello(const v1::Hello& hello);
  absl::Status OnRankRequest(const v1::RankRequest& request);
  absl::Status Open(const v1::RankRequest& request);
  // Not OK: a breach by the rank, whose session ends with it.
  absl::Status Dispatch(const Member& member, std::uint64_t incarnation,
                        const v1::SessionRequest& request);
  absl::Status Register(const Member& member, std::uint64_t incarnation,
                        const v1::RegisterLayout& message);
  absl::Status OnGpuArenaMapped(const v1::GpuArenaMapped& mapped);
  // The rank has broken the protocol: its session ends with `why`.
  void Refuse(const Member& member, const absl::Status& why);
  absl::Status Operate(const Member& member, const absl::StatusOr<OperationRequest>& request);
  void Respond(std::uint64_t incarnation, v1::SessionResponse response);
  // Null: refused, or gone; its messages may still be on their way.
  const Member* Find(std::uint64_t incarnation) const;
  void LoseAll(const absl::Status& why);
  absl::Status Malformed(absl::string_view what) const;

  const AttachedContext& context_;
  grpc::ServerContext call_;
  grpc::ServerAsyncReaderWriter<v1::AttachResponse, v1::AttachRequest> stream_{&call_};
  AcceptStep on_accept_{this};
  Accepted accepted_;
  std::shared_ptr<AttachedNode> accepting_;

  // Written by Hello, before others know this node.
  std::string node_name_ = "(unknown)";
  std::string address_;
  JobKey key_;
  std::shared_ptr<Cluster> cluster_;

  std::map<std::uint64_t, Member> members_;  // by incarnation; the read side's own
  bool detaching_ = false;                   // the read side's own
  AttachedWorkers workers_;
  std::atomic<std::uint64_t> heard_ns_{0};
  std::atomic<std::uint64_t> pinged_ns_{0};
  std::atomic<std::uint64_t> asked_ns_{0};  // the first ping that is not answered
  std::atomic<bool> greeted_{false};
  std::atomic<bool> silent_{false};
};

}  // namespace gradsync

#endif  // DAEMON_PEER_ATTACHED_NODE_H_
