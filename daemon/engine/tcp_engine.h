// The engine that sums host memory over nodes, over TCP or TLS.

#ifndef DAEMON_ENGINE_TCP_ENGINE_H_
#define DAEMON_ENGINE_TCP_ENGINE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/base/mutex.h"
#include "daemon/engine/engine.h"
#include "daemon/engine/engine_options.h"
#include "daemon/engine/peer_tls.h"
#include "daemon/engine/peer_watch.h"
#include "daemon/engine/tcp_lane.h"

namespace gradsync::daemon {

struct TcpOptions : EngineOptions {
  // The lanes' memory, aligned to kSlotAlignment: LaneBytes() for each lane, one after the other.
  // Null: the engine allocates it.
  std::byte* memory = nullptr;
};

// Thread-safe. Has two threads per lane: one runs its chunks, the other reads and writes its
// connections. One more thread watches the other nodes. Without exchanges only that one wakes up.
//
// Only the engines of the job's nodes can connect (peer_mesh.h). Even these nodes are not trusted:
// data that is not expected fails the engine. All nodes must have the same byte order.
class TcpEngine final : public Engine, private TcpLane::Owner {
 public:
  // Connects to the other nodes; every node calls this. Blocks for up to connect_timeout.
  //
  // INVALID_ARGUMENT     an option out of its bounds
  // FAILED_PRECONDITION  the nodes' options differ
  // DEADLINE_EXCEEDED    ENGINE_TIMEOUT: names the nodes that have not connected
  // INVALID_ARGUMENT     the keys cannot be used
  // NOT_FOUND            this machine has no such address or interface
  // UNAVAILABLE          a node was lost (ENGINE_PEER_LOST), or cannot be reached
  static absl::StatusOr<std::unique_ptr<TcpEngine>> Connect(const TcpOptions& options);

  // If nothing is pending, the other nodes can still finish the exchanges that this node took part
  // in. Must not be called from a done().
  ~TcpEngine() override;
  TcpEngine(const TcpEngine&) = delete;
  TcpEngine& operator=(const TcpEngine&) = delete;

  void Submit(Exchange* exchange) override;
  void Broadcast(std::vector<std::byte*> buffers, std::size_t bytes, std::uint32_t root_node,
                 std::function<void(const absl::Status&)> done) override;
  // As Broadcast(), through an exchange of bytes, which the caller owns as with Submit(). The root
  // gathers, the others scatter.
  void SubmitBroadcast(Exchange* exchange, std::uint32_t root_node);
  void Abort(const absl::Status& why) override;
  EngineStatistics Statistics() const override;

 private:
  explicit TcpEngine(TcpOptions options);

  absl::Status ConnectAll(std::uint64_t deadline_ns);
  // Returns when the engine has failed: with the cause that the watch finds, else with `why`.
  void AwaitFailure(const absl::Status& why);
  // True if this was the first failure.
  bool Fail(const absl::Status& why);
  absl::Status failure();
  void PushBroadcast(Exchange* exchange, std::uint32_t root_node, bool owned);
  void Push(LaneWork work);

  bool failed() const override { return failed_.load(std::memory_order_acquire); }
  void Broken(const absl::Status& why) override;
  void Finished(const LaneWork& work) override;

  const TcpOptions options_;
  std::vector<LaneProgress> progress_;  // by lane
  std::atomic<bool> failed_{false};
  std::atomic<std::uint64_t> exchanges_{0};
  std::atomic<std::uint64_t> pending_{0};

  // Taken before mutex_. Gives exchanges the same order on all lanes.
  Mutex submit_mutex_;
  std::uint64_t chunks_submitted_ ABSL_GUARDED_BY(submit_mutex_) = 0;

  Mutex mutex_;
  CondVar has_failed_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);

  // Constant once the watch has begun.
  std::vector<std::unique_ptr<TcpLane>> lanes_;
  std::unique_ptr<PeerWatch> watch_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_TCP_ENGINE_H_
