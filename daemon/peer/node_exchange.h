// One node's part in a job's exchanges between nodes: sums of its ranks' buffers go to the engine,
// and come back as averages.

#ifndef DAEMON_PEER_NODE_EXCHANGE_H_
#define DAEMON_PEER_NODE_EXCHANGE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/base/mutex.h"
#include "daemon/engine/engine.h"
#include "daemon/reduce/bucket_numbers.h"
#include "proto/gradsync/data_type.h"

namespace gradsync {

// What one node does in a launch.
struct NodeWork {
  DataType dtype = DataType::kUnspecified;
  std::size_t count = 0;  // elements; bytes of a broadcast
  double scale = 1.0;
  bool measure = false;
  bool exact = false;  // as Exchange has it
  // 0 or more: a broadcast from the first buffer of that node.
  int root_node = -1;
  // Of the local ranks that take part, in their order; may be empty.
  std::vector<std::byte*> buffers;
  std::vector<std::shared_ptr<void>> keep;  // what keeps them mapped
  // Once, on an engine thread or the exchange's own: the buffers are no longer touched. Not OK:
  // they hold nothing of value, and the engine has failed.
  std::function<void(const absl::Status&, const BucketNumbers&)> done;
};

// Thread-safe. One thread of its own, while it connects.
class NodeExchange {
 public:
  using Connect = std::function<absl::StatusOr<std::unique_ptr<Engine>>()>;

  // Connects on the thread; `failed` is called once, from it, if that fails.
  NodeExchange(Connect connect, std::function<void(const absl::Status&)> failed);
  // Fails what is pending and waits for its done(). Abort() first, and let the thing that Connect
  // waits for be cancelled. Not from within a done().
  ~NodeExchange();
  NodeExchange(const NodeExchange&) = delete;
  NodeExchange& operator=(const NodeExchange&) = delete;

  // In this order on every node. Not OK: the exchange has failed, and nothing is done with it.
  absl::Status Submit(NodeWork work);
  // Fails what is pending: done() is called soon, of what no engine has yet from within this.
  void Abort(const absl::Status& why);
  bool failed() const;
  // None while it connects.
  std::optional<EngineStatistics> Statistics() const;

 private:
  struct Running;

  void Run(Connect connect, const std::function<void(const absl::Status&)>& failed);
  void StartLocked(std::unique_ptr<Running> given) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Finished(Running* running, const absl::Status& status);

  mutable Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  // Submitted before there was an engine.
  std::vector<std::unique_ptr<Running>> early_ ABSL_GUARDED_BY(mutex_);
  // Done with; an engine may still be returning from its done().
  std::vector<std::unique_ptr<Running>> spare_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Engine> engine_ ABSL_GUARDED_BY(mutex_);  // set once

  std::thread thread_;  // last
};

}  // namespace gradsync

#endif  // DAEMON_PEER_NODE_EXCHANGE_H_
