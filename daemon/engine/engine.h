// The interface of the collective between nodes. Each node brings the sum of its local ranks'
// gradients, or their minimum or maximum; the engine combines these, chunk by chunk. TcpEngine
// implements it for host memory, over TCP.

#ifndef DAEMON_ENGINE_ENGINE_H_
#define DAEMON_ENGINE_ENGINE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "proto/gradsync/data_type.h"
#include "proto/gradsync/reduce_op.h"

namespace gradsync::daemon {

// The type of the sums that gather() and scatter() exchange with the engine: float32 for sums of
// the 16-bit floating-point types, else the bucket's own type.
constexpr DataType WorkType(DataType dtype, ReduceOp op = ReduceOp::kSum) {
  return ItemSize(dtype) == 2 && !IsOrderFree(op, dtype) ? DataType::kFloat32 : dtype;
}

// One all-reduce between nodes. The submitter owns it, and keeps it alive and untouched until
// done(). Then it may change it and submit it again, for the same bucket or another one.
//
// gather and scatter run on the engine's threads, for several chunks at once. The chunks cover the
// bucket and do not overlap. Each begins at a multiple of 64 elements and holds 32 KiB to 64 MiB;
// the last one may be smaller. The engine chooses where chunks begin, the same on every node.
//
// gather and scatter must run at memory speed: while they run, their lane does nothing else.
// Neither may destroy the engine. done() may call Submit.
struct Exchange {
  DataType dtype = DataType::kUnspecified;
  std::size_t count = 0;         // elements; the same on every node
  ReduceOp op = ReduceOp::kSum;  // sum, min or max; the same on every node
  // Ignores the engine's wire type, as every order-free reduction does; the same on every node.
  bool exact = false;
  // How many buffers of local ranks gather reads, and scatter writes. This tells what they cost.
  std::size_t buffers = 1;

  // Writes the local ranks' elements [first, first + count), combined by `op`, to `sum` in the work
  // type. `sum` is the engine's memory, aligned to 64 bytes. A node without live ranks writes a
  // value that changes no result: zero for a sum, the largest value for a minimum, the least for a
  // maximum.
  //
  // On a 16-bit wire the engine rounds this sum to 16 bits, and the sum over the nodes too. Divide
  // here, not in scatter, if the sums may exceed float16's range (65504).
  std::function<void(std::size_t first, std::size_t count, std::byte* sum)> gather;
  // Takes the sum of the same elements over all nodes: bitwise the same on every node. `sum` is
  // read-only and valid during the call.
  std::function<void(std::size_t first, std::size_t count, const std::byte* sum)> scatter;
  // Called once per submission, on an engine's thread. OK: after the last scatter. Not OK: the
  // engine has failed, with this as its first error. It no longer touches this exchange; some
  // chunks may have been scattered. Exchanges may finish in any order.
  std::function<void(const absl::Status&)> done;

  // For the engine alone, between Submit() and done().
  std::atomic<std::size_t> chunks_left{0};
  std::atomic<bool> dropped{false};
};

struct LaneStatistics {
  // Payload, without any headers: not the engine's, and not those of TLS, TCP and IP.
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  std::uint64_t busy_ns = 0;  // time with at least one chunk under way
  std::uint64_t chunks = 0;   // finished
};

struct EngineStatistics {
  std::uint64_t exchanges = 0;  // finished, broadcasts too
  std::vector<LaneStatistics> lanes;
};

// Thread-safe. An engine fails once, for good: all pending and later exchanges fail with the same
// error. To go on, make a new engine. Errors, besides the one given to Abort():
//   UNAVAILABLE        ENGINE_PEER_LOST: a node is lost, or it ended its engine. Field "node": its
//                      name, or all candidates, comma-separated, if the cause is unknown.
//   DEADLINE_EXCEEDED  ENGINE_TIMEOUT: a node is silent, or data that it has sent does not arrive.
//                      Field "node": its name, or all candidates, comma-separated.
//   CANCELLED          ENGINE_CLOSED: this engine was destroyed with exchanges pending
//   INTERNAL           ENGINE_BROKEN: a node has sent what the engine did not expect, or this
//                      program has a fault
class Engine {
 public:
  // Fails pending exchanges and waits for their done() and for running callbacks.
  virtual ~Engine() = default;

  // Begins the all-reduce. Never blocks and never calls done() itself. For an engine in another
  // process it allocates a message.
  //
  // The caller must submit the same exchanges (dtype, count, op) and broadcasts in the same order
  // on every node; the engine cannot check this. The engine waits without limit for the other nodes
  // to submit theirs: NodeGroup disconnects a node that stays silent.
  virtual void Submit(Exchange* exchange) = 0;

  // Copies the first of root_node's buffers to its other buffers, and to every buffer of every
  // other node. Each node gives one buffer or more. The caller owns the buffers and keeps them
  // alive until done(). `bytes`, of each buffer, is the same on every node. Ordered with Submit.
  virtual void Broadcast(std::vector<std::byte*> buffers, std::size_t bytes,
                         std::uint32_t root_node,
                         std::function<void(const absl::Status&)> done) = 0;

  // Fails the engine with `why`, on every node. The other nodes get the code, reason, message and
  // field "node" of `why`, at most 1 KiB of each text. Every done() follows soon. Does nothing if
  // the engine has failed already.
  virtual void Abort(const absl::Status& why) = 0;

  virtual EngineStatistics Statistics() const = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_ENGINE_H_
