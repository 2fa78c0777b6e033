// One node's part in a job's exchanges between nodes: it sums its ranks' buffers for the engine,
// and writes the averages back.

#ifndef DAEMON_PEER_NODE_EXCHANGE_H_
#define DAEMON_PEER_NODE_EXCHANGE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/base/mutex.h"
#include "daemon/engine/engine.h"
#include "daemon/reduce/gradient_stats.h"
#include "proto/gradsync/data_type.h"
#include "proto/gradsync/reduce_op.h"

namespace gradsync::daemon {

// One node's work in a launch.
struct NodeWork {
  DataType dtype = DataType::kUnspecified;
  std::size_t count = 0;         // elements; bytes of a broadcast
  ReduceOp op = ReduceOp::kSum;  // as in ReduceOperation
  double scale = 1.0;
  bool measure = false;
  bool exact = false;  // as in Exchange
  // 0 or more: this is a broadcast from the first buffer of that node.
  int root_node = -1;
  // The buffers of the local ranks in the launch, in rank order. May be empty.
  std::vector<std::byte*> buffers;
  std::vector<std::shared_ptr<void>> keep;  // what must live until the work is done
  // Called once, when the buffers are no longer touched: on a thread of the engine or of the
  // exchange, or within Abort(). Not OK: the buffers are undefined, and the engine has failed.
  std::function<void(const absl::Status&, const GradientStats&)> done;
};

// Thread-safe. It has one thread of its own, while it connects. It owns the engine.
class NodeExchange {
 public:
  using Connect = std::function<absl::StatusOr<std::unique_ptr<Engine>>()>;

  // Connects on its own thread. If that fails, calls `failed` once, on that thread. If the thread
  // cannot be started, failure() says so, and `failed` is not called. `node`: this node's name,
  // for errors about its limits.
  NodeExchange(std::string node, Connect connect, std::function<void(const absl::Status&)> failed);
  // Fails the pending work and waits for its done(). First call Abort(), and cancel the waits of
  // Connect. Must not be called from a done().
  ~NodeExchange();
  NodeExchange(const NodeExchange&) = delete;
  NodeExchange& operator=(const NodeExchange&) = delete;

  // Every node submits in the same order. Not OK: the exchange has failed, and drops `work`.
  absl::Status Submit(NodeWork work);
  // Fails the pending work: its done() is called soon, or from within this call if no engine has
  // the work yet.
  void Abort(const absl::Status& why);
  // Not OK: it has failed, for this reason.
  absl::Status failure() const;
  // Nullopt while it connects.
  std::optional<EngineStatistics> Statistics() const;

 private:
  struct Running;

  absl::Status NamingNode(const absl::Status& why) const;
  void Run(Connect connect, const std::function<void(const absl::Status&)>& failed);
  void StartLocked(std::unique_ptr<Running> given) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Finished(Running* running, const absl::Status& status);

  const std::string node_;
  mutable Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  // Submitted before the engine was connected.
  std::vector<std::unique_ptr<Running>> early_ ABSL_GUARDED_BY(mutex_);
  // Finished ones, to be used again. An engine may still be returning from their done().
  std::vector<std::unique_ptr<Running>> spare_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Engine> engine_ ABSL_GUARDED_BY(mutex_);  // set once

  std::thread thread_;  // last
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_NODE_EXCHANGE_H_
