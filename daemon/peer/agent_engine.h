// An agent's part in the engine between the nodes of a job. The coordinator, on another node, says
// when to connect it and what to launch on it.

#ifndef DAEMON_PEER_AGENT_ENGINE_H_
#define DAEMON_PEER_AGENT_ENGINE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/arena/arena_quota.h"
#include "daemon/base/executor.h"
#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"
#include "daemon/engine/engine_settings.h"
#include "daemon/peer/engine_epoch.h"
#include "daemon/peer/forwarding_job.h"
#include "daemon/peer/node_exchange.h"
#include "daemon/peer/rendezvous.h"
#include "daemon/peer/stepped_charge.h"
#include "daemon/rpc/node_status_source.h"
#include "gradsync/v1/peer.pb.h"

namespace gradsync::daemon {

// Checks launches, carries them out in order, and answers each one.
//
// Thread-safe. It calls no one with its lock held. One thread at a time makes the calls for the
// coordinator's messages. Launches in flight own it.
class AgentEngine : public std::enable_shared_from_this<AgentEngine> {
 public:
  struct Context {
    Tenant user;                   // its engines count for this user
    ArenaQuota* memory = nullptr;  // is charged for launches in flight; null: nothing is
    std::string node_name;         // of this node
    // Where this node's engines listen; empty: the address that the coordinator sees.
    std::string address;
    std::uint64_t staging_bytes = 0;
    EngineLimits limits;  // those that this node's Hello has named
    EngineMaker make_engine;
    bool encrypted = false;      // the engines' connections have TLS; for status
    Executor* reaper = nullptr;  // destroys engines, each on a thread of its own
    std::function<void(v1::AttachRequest)> send;
    // The rank whose session has this incarnation; null if there is none.
    std::function<std::shared_ptr<ForwardingJob>(std::uint64_t incarnation)> find_rank;
    std::function<void()> settled;  // a launch was answered; busy() may have become false
  };
  // The most engines at a time. Each has memory and threads until its end, which may take 10 s.
  static constexpr int kMaxEngines = 4;
  // Up to this many bytes of an engine's launches in flight are not charged: some 200 launches.
  static constexpr std::size_t kFreeLaunchBytes = 256 << 10;
  explicit AgentEngine(Context context) : context_(std::move(context)) {}

  // ---- The coordinator's messages
  // Ends the engine, if there is one, and connects a new one. If CheckConnect() refuses it, answers
  // that the engine failed.
  void Connect(const v1::ConnectEngine& connect);
  void Take(const v1::EngineEnd& end);
  void Take(const v1::RendezvousValue& value);
  // An honest coordinator may have many launches in flight: one for each bucket of the layouts that
  // are in a step, and one for an operation. So only the user's quota bounds them. Beyond it the
  // answer is RESOURCE_EXHAUSTED, which ends the job.
  void Launch(const v1::Launch& launch);

  // Ends the engine. Launches in flight fail.
  void End(const absl::Status& why);
  // True if a launch is in flight.
  bool busy() const;
  // How many engines it has made.
  std::uint64_t engines_made() const { return epochs_.load(); }
  // Nullopt while there is no engine.
  std::optional<EngineSnapshot> Snapshot() const;

 private:
  // The exchange is destroyed on the reaper only, because a thread of the engine may drop the last
  // reference.
  struct Epoch {
    std::uint64_t number = 0;
    std::uint64_t place = 0;  // counts this object's epochs; not the coordinator's choice
    std::uint64_t last_launch = 0;
    std::size_t bytes_in_flight = 0;  // of its launches
    // For the most bytes that were in flight at a time: the exchange keeps that memory for later
    // launches.
    SteppedCharge charge{kFreeLaunchBytes};
    std::vector<std::string> node_names;
    EngineSettings settings;
    std::shared_ptr<Rendezvous> store;
    std::unique_ptr<NodeExchange> exchange;
  };

  // A launch until it is answered.
  struct InFlight {
    std::uint64_t epoch = 0;
    std::uint64_t sequence = 0;
    std::uint64_t place = 0;  // of the epoch that is charged for it; 0: none is
    std::size_t bytes = 0;
  };

  // Checks whether an engine may be made, before anything of the message is copied: it may be long.
  // INVALID_ARGUMENT: the message is not valid. RESOURCE_EXHAUSTED QUOTA: the new engine is one too
  // many, or larger than Context::limits allow. Does not ask whether a rank of this node needs the
  // engine: an honest coordinator sends the message before there are layouts, and the message may
  // come when the rank has just ended.
  absl::Status CheckConnect(const v1::ConnectEngine& connect) const;
  absl::Status CheckNew(const EngineSettings& settings) const;
  // The epoch with this number, if it is the current one.
  std::shared_ptr<Epoch> Find(std::uint64_t number) const;
  // Makes the work of a launch, without its done(). `semaphores` gets the pages of its ranks.
  absl::Status MakeWork(const v1::Launch& launch, const Epoch& epoch, NodeWork* work,
                        std::vector<std::shared_ptr<SemaphorePage>>* semaphores) const;
  // RESOURCE_EXHAUSTED QUOTA, with the text of `why`, the quota's error.
  absl::Status TooMuchInFlight(const absl::Status& why) const;
  // Charges for the launch.
  absl::Status ChargeLocked(const InFlight& launch, Epoch* epoch) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Answer(const InFlight& launch, const absl::Status& status, const GradientStats& stats);

  const Context context_;
  std::atomic<std::uint64_t> epochs_{0};
  std::atomic<int> engines_{0};  // not destroyed yet

  mutable Mutex mutex_;
  std::shared_ptr<Epoch> epoch_ ABSL_GUARDED_BY(mutex_);  // null: there is no engine
  std::size_t in_flight_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_AGENT_ENGINE_H_
