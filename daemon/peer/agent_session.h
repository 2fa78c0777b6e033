// One agent: another node's daemon with ranks in a job that is coordinated here. Passes the
// node's messages to its ranks, its engine and its workers, and notices when the node is lost.

#ifndef DAEMON_PEER_AGENT_SESSION_H_
#define DAEMON_PEER_AGENT_SESSION_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "daemon/arena/arena_quota.h"
#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"
#include "daemon/engine/caller.h"
#include "daemon/engine/engine_settings.h"
#include "daemon/engine/socket_owner.h"
#include "daemon/job/job_table.h"
#include "daemon/job/session_message.h"
#include "daemon/peer/address_memory.h"
#include "daemon/peer/agent_rank.h"
#include "daemon/peer/lazy_message.h"
#include "daemon/peer/node_group.h"
#include "daemon/peer/peer_protocol.h"
#include "daemon/peer/peer_turns.h"
#include "daemon/peer/remote_worker.h"
#include "daemon/peer/socket_table.h"
#include "daemon/peer/stepped_charge.h"
#include "daemon/rpc/client_input.h"
#include "daemon/rpc/decode.h"
#include "daemon/rpc/server_stream.h"
#include "gradsync/v1/peer.pb.h"

namespace gradsync::daemon {

// A node that has not answered a ping for this long is lost.
inline constexpr std::uint64_t kPeerSilenceNs = 5'000'000'000;
// The same, if bytes wait in its socket: the answer may be among them while gRPC's threads are
// slow.
inline constexpr std::uint64_t kUnreadSilenceNs = 15'000'000'000;
inline constexpr std::uint64_t kPingPeriodNs = 1'000'000'000;

struct AgentSessionContext {
  std::string instance;
  std::string node_name;
  DecodeLimits limits;
  const Clock* clock = nullptr;
  JobTable* jobs = nullptr;
  PeerTurns* turns = nullptr;
  // As JobEnvironment::memory. Is also charged for what waits for the agents.
  ArenaQuota* memory = nullptr;
  AddressMemory* addresses = nullptr;  // null: addresses have no limits
  bool tls = false;                    // agents have shown certificates
  // This process's ends of its connections with a caller, as gRPC names it.
  std::function<std::vector<TcpEnd>(const std::string& caller)> own_ends;
  // The CallerKey of a caller, from gRPC's name for it.
  std::function<CallerKey(const std::string& caller)> caller_key;
  // The input of a caller's connection, from gRPC's name for the caller. May return null.
  std::function<std::shared_ptr<ClientInput>(const std::string& caller)> callers_input;
  // The bytes that have come on a caller's connection and that gRPC has not read. Null: not known.
  std::function<std::size_t(const std::string& caller)> unread_bytes;
  // Finds the user of a connection without TLS, if the kernel does not name it (CanFindOwners()).
  SocketTable* sockets = nullptr;
  // The node group of a job key, or why this node has none.
  std::function<absl::StatusOr<std::shared_ptr<NodeGroup>>(const JobKey&)> find_node_group;
  // How long other nodes' workers are kept for the next trainers.
  std::uint64_t worker_idle_limit_ns = 60'000'000'000;
};

// A job's message to the rank whose session has this incarnation on the node.
struct JobMessage {
  std::uint64_t incarnation = 0;
  SessionMessage message;
};
// A job's message is encoded when it is sent, not under the job's lock.
using AgentItem = std::variant<v1::AttachResponse, JobMessage>;

// Thread-safe. The stream's threads and those of the turns call OnAccepted(), InTurn(), OnMessage()
// and OnEnd() one at a time: that is the read side. Tick() and NodeLink's calls come from any
// thread. Owns itself until its stream has ended (ServerStream).
class AgentSession final
    : public ServerStream<LazyMessage<v1::AttachRequest>, v1::AttachResponse, AgentItem>,
      public NodeLink {
 public:
  using Stream = ServerStream<LazyMessage<v1::AttachRequest>, v1::AttachResponse, AgentItem>;

  // It holds `counted` as long as it exists.
  AgentSession(const AgentSessionContext& context, std::shared_ptr<void> counted)
      : ServerStream(kPeerUnread),
        counted_(std::move(counted)),
        context_(context),
        workers_(context.clock, context.worker_idle_limit_ns) {}

  // True once Welcome was sent, which is the first message.
  bool greeted() const { return phase_.load() >= Phase::kWelcomed; }
  // True if Welcome was not sent, and no message of the agent waits for its turn.
  bool silent() const { return !greeted() && !HasMessage(); }
  using Stream::caller;
  // Pings an agent that got its Welcome, and releases idle workers. Ends the stream if the agent
  // has sent no Hello for 10 s, has not answered a ping for kPeerSilenceNs (kUnreadSilenceNs, if
  // bytes wait in its socket), or has not read the stream's end for kPeerSilenceNs.
  void Tick(std::uint64_t now_ns);

  // ---- For the stream
  void OnAccepted() override;
  void InTurn(const LazyMessage<v1::AttachRequest>* message, UserTurns::Take take) override;
  void OnMessage(const LazyMessage<v1::AttachRequest>& received) override;
  void OnEnd(const absl::Status& end) override;

  // Queues a message of the job.
  void QueueFor(std::uint64_t incarnation, SessionMessage message) {
    Stream::Queue(JobMessage{incarnation, std::move(message)});
  }

  // ---- NodeLink
  void Queue(v1::AttachResponse message) override { Stream::Queue(std::move(message)); }
  void Flush() override { Stream::Flush(); }
  void Close(const absl::Status& status) override;
  const std::string& node_name() const override { return node_name_; }
  const std::string& address() const override { return address_; }
  const std::string& network() const override { return network_; }
  const CallerKey& caller_key() const { return caller_key_; }
  const EngineLimits& engine_limits() const override { return engine_limits_; }
  std::uint64_t heard_ns() const override { return heard_ns_.load(); }

 private:
  std::shared_ptr<ClientInput> CallersInput() const override {
    return context_.callers_input ? context_.callers_input(caller()) : nullptr;
  }

  // In this order. A session that is refused stays in its phase until the stream has ended.
  enum class Phase : unsigned char { kConnected, kSaidHello, kWelcomed, kDetaching };

  std::size_t BytesOf(const AgentItem& item) const override;
  absl::Status Grant(std::size_t bytes, std::size_t* granted) override {
    absl::Status held = charge_.Hold(Memory(), bytes);
    *granted = charge_.granted();
    return held;
  }
  void Drained(std::size_t* granted) override;
  void ToWire(AgentItem item, v1::AttachResponse* out) override;

  absl::Status Read(const LazyMessage<v1::AttachRequest>& received);
  absl::Status Take(const v1::AttachRequest& message);
  // Judges a message, other than a short Hello, of an agent that is not part of a job. OK: drop the
  // message, because the agent was refused and may not know it yet. Otherwise MALFORMED.
  absl::Status TakeOfStranger() const;
  absl::Status OnHello(const v1::Hello& hello);
  absl::Status CheckCaller(const v1::Hello& hello) const;
  absl::Status OnRankRequest(const v1::RankRequest& request);
  // Joins the rank to the job. Not OK: it is refused.
  absl::Status Open(const v1::RankRequest& request, const std::shared_ptr<SessionSink>& sink);
  // RESOURCE_EXHAUSTED QUOTA: nothing here has needed the node for a while. Called after each
  // message, but looks only once in kPingPeriodNs. A node that sends nothing needs no look: it is
  // lost.
  absl::Status CheckNeed(std::uint64_t now_ns);
  // Is charged for what this node keeps for the agent.
  MemoryAccount Memory() const { return {context_.memory, Tenant(key_.uid), origin_}; }
  absl::Status OnGpuArenaMapped(const v1::GpuArenaMapped& mapped);
  void LogRefusal(std::uint32_t rank, const absl::Status& why) const;
  // The rank has broken the protocol: its session ends with `why`.
  void Refuse(AgentRank* rank, const absl::Status& why);
  // Null: the rank was refused or has ended. Its messages may still arrive.
  AgentRank* Find(std::uint64_t incarnation);
  void LoseAll(const absl::Status& why);
  absl::Status Malformed(absl::string_view what) const;

  const std::shared_ptr<void> counted_;
  const AgentSessionContext& context_;

  // Written by OnAccepted() and OnHello(), before others know this session.
  std::string node_name_ = "(unknown)";
  std::string address_;
  std::string network_;  // of the address: NetworkText()
  CallerKey caller_key_;
  Tenant stranger_ = kStrangers;  // whose turns it has before Welcome
  std::uint64_t accepted_ns_ = 0;
  EngineLimits engine_limits_;
  JobKey key_;
  std::shared_ptr<MemoryOrigin> origin_;  // of the address and its network
  std::shared_ptr<NodeGroup> node_group_;

  SteppedCharge charge_{kFreeUnreadBytes};  // for what waits; the queue's lock guards it
  // The newest step's record in the queue. Null: none was queued since the queue was last empty.
  mutable std::atomic<const StepRecord*> waiting_record_{nullptr};

  // Used by the read side only.
  std::shared_ptr<UserTurns> turns_;             // null: the next message finds out whose they are
  std::shared_ptr<AddressTurns> address_turns_;  // null before Welcome
  std::map<std::uint64_t, AgentRank> ranks_;     // by incarnation on the node
  RemoteWorkers workers_;
  std::uint64_t needed_ns_ = 0;   // when something last needed the node
  std::uint64_t checked_ns_ = 0;  // when CheckNeed() last looked
  std::atomic<std::uint64_t> heard_ns_{0};
  std::atomic<std::uint64_t> pinged_ns_{0};
  std::atomic<std::uint64_t> closed_ns_{0};      // when this side closed the stream; 0: it has not
  std::atomic<std::uint64_t> asked_ns_{0};       // when the first unanswered ping was sent
  std::atomic<Phase> phase_{Phase::kConnected};  // written by the read side
  std::atomic<bool> silent_{false};              // why the stream ended: the node answered no ping
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_AGENT_SESSION_H_
