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
#include "daemon/base/executor.h"
#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"
#include "daemon/engine/engine_settings.h"
#include "daemon/peer/engine_epoch.h"
#include "daemon/peer/forwarding_job.h"
#include "daemon/peer/node_exchange.h"
#include "daemon/peer/rendezvous.h"
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
    Tenant user;            // whom its engines are counted for
    std::string node_name;  // of this node
    // Where this node's engines listen; empty: the address that the coordinator sees.
    std::string address;
    std::uint64_t staging_bytes = 0;
    EngineMaker make_engine;
    bool encrypted = false;      // the engines' connections have TLS; for status
    Executor* reaper = nullptr;  // destroys engines, each on a thread of its own
    std::function<void(v1::AttachRequest)> send;
    // The rank whose session has this incarnation; null if there is none.
    std::function<std::shared_ptr<ForwardingJob>(std::uint64_t incarnation)> find_rank;
    std::function<void()> settled;  // a launch was answered; busy() may have become false
  };
  // Each has memory and threads until its end, which may take 10 s.
  static constexpr int kMaxEngines = 4;
  explicit AgentEngine(Context context) : context_(std::move(context)) {}

  // ---- The coordinator's messages
  // Ends the engine, if there is one, and connects a new one. If kMaxEngines of them have not been
  // destroyed yet, answers that the engine failed: RESOURCE_EXHAUSTED.
  void Connect(const v1::ConnectEngine& connect);
  void Take(const v1::EngineEnd& end);
  void Take(const v1::RendezvousValue& value);
  void Launch(const v1::Launch& launch);

  // Ends the engine. Launches in flight fail.
  void End(const absl::Status& why);
  // A launch is in flight.
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
    std::uint64_t last_launch = 0;
    std::vector<std::string> node_names;
    EngineSettings settings;
    std::shared_ptr<Rendezvous> store;
    std::unique_ptr<NodeExchange> exchange;
  };

  // The epoch with this number, if it is the current one.
  std::shared_ptr<Epoch> Find(std::uint64_t number) const;
  // Makes the work of a launch, without its done(). `semaphores` gets the pages of its ranks.
  absl::Status MakeWork(const v1::Launch& launch, const Epoch& epoch, NodeWork* work,
                        std::vector<std::shared_ptr<SemaphorePage>>* semaphores) const;
  void Answer(std::uint64_t epoch, std::uint64_t launch, const absl::Status& status,
              const GradientStats& stats);

  const Context context_;
  std::atomic<std::uint64_t> epochs_{0};
  std::atomic<int> engines_{0};  // not destroyed yet

  mutable Mutex mutex_;
  std::shared_ptr<Epoch> epoch_ ABSL_GUARDED_BY(mutex_);  // null: there is no engine
  std::size_t in_flight_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_AGENT_ENGINE_H_
