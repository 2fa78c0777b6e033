// The engine that sums host memory over nodes: Gloo over TCP.

#ifndef DAEMON_ENGINE_GLOO_ENGINE_H_
#define DAEMON_ENGINE_GLOO_ENGINE_H_

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
#include "daemon/engine/gloo_lane.h"
#include "daemon/engine/peer_watch.h"

namespace gradsync::daemon {

struct GlooOptions : EngineOptions {
  // The lanes' memory, aligned to kSlotAlignment: LaneBytes() for each lane, one after the other.
  // Null: the engine allocates it.
  std::byte* memory = nullptr;
};

// Thread-safe. Has one thread per lane, one that watches the other nodes, and one of Gloo per lane.
// Gloo's threads wake every 10 ms even when idle.
//
// Data is neither encrypted nor authenticated, and Gloo trusts the other side: unexpected data ends
// this process. So use a network that only the job's nodes can reach. All nodes must have the same
// byte order.
class GlooEngine final : public Engine, private GlooLane::Owner {
 public:
  // Connects to the other nodes; every node calls this. Blocks for up to connect_timeout, and for
  // 10 s more if a node is lost while the lanes connect.
  //
  // INVALID_ARGUMENT     an option out of its bounds
  // FAILED_PRECONDITION  the nodes' options differ
  // DEADLINE_EXCEEDED    ENGINE_TIMEOUT: names the nodes that have not connected
  // NOT_FOUND            this machine has no such address or interface
  // UNAVAILABLE          a node was lost (ENGINE_PEER_LOST), or cannot be reached
  static absl::StatusOr<std::unique_ptr<GlooEngine>> Connect(const GlooOptions& options);

  // If nothing is pending, the other nodes can still finish the exchanges that this node took part
  // in. Must not be called from a done().
  ~GlooEngine() override;
  GlooEngine(const GlooEngine&) = delete;
  GlooEngine& operator=(const GlooEngine&) = delete;

  void Submit(Exchange* exchange) override;
  void Broadcast(std::byte* data, std::size_t bytes, std::uint32_t root_node,
                 std::function<void(const absl::Status&)> done) override;
  // As Broadcast(), through an exchange of bytes, which the caller owns as with Submit(). The root
  // gathers, the others scatter.
  void SubmitBroadcast(Exchange* exchange, std::uint32_t root_node);
  void Abort(const absl::Status& why) override;
  EngineStatistics Statistics() const override;

 private:
  explicit GlooEngine(GlooOptions options);

  absl::Status ConnectWatch(std::uint64_t deadline_ns);
  absl::Status ConnectLanes(std::uint64_t deadline_ns);
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

  const GlooOptions options_;
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
  bool abortable_ ABSL_GUARDED_BY(mutex_) = false;  // lanes_ is complete

  // Constant once Connect has returned. The lanes' buffers are destroyed before their contexts.
  std::vector<std::shared_ptr<gloo::Context>> contexts_;
  std::vector<std::unique_ptr<GlooLane>> lanes_;
  std::unique_ptr<PeerWatch> watch_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_GLOO_ENGINE_H_
