// The collective between nodes, as the job room sees it: what the local ranks' arenas hold is
// summed over all nodes, chunk by chunk. LoopbackEngine is the one for a single node, GlooEngine
// the one for host memory over TCP.

#ifndef DAEMON_ENGINE_ENGINE_H_
#define DAEMON_ENGINE_ENGINE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "proto/gradsync/data_type.h"

namespace gradsync {

// The type in which a bucket's sums are handed over: float32 for the 16-bit types, else the
// bucket's own.
constexpr DataType WorkType(DataType dtype) {
  return ItemSize(dtype) == 2 ? DataType::kFloat32 : dtype;
}

// One bucket's all-reduce between nodes. Made once per bucket and submitted once per step; the
// submitter owns it and keeps it alive and untouched until done().
//
// gather and scatter run on engine threads, at once for different chunks. Chunks do not overlap,
// cover the bucket, begin at multiples of 64 elements and hold 32 KiB to a few MiB (the last one
// less); where they begin is the engine's choice, and the same on every node. Both must be quick
// (memory speed): while they run, their lane does nothing else. Neither may call the engine's
// destructor; done() may call Submit.
struct Exchange {
  DataType dtype = DataType::kUnspecified;
  std::size_t count = 0;  // elements; the same on every node
  bool exact = false;     // travels as it is, whatever the engine's wire type; likewise

  // Writes the sum of the local ranks' elements [first, first + count), in the work type. `sum` is
  // the engine's, aligned to 64 bytes. A node without live ranks writes zeros.
  //
  // Where the wire has 16 bits, what is written here is rounded to it, and so is the sum over the
  // nodes: divide here rather than in scatter if float16's range (65504) might not hold sums.
  std::function<void(std::size_t first, std::size_t count, std::byte* sum)> gather;
  // Takes the sum over all nodes of the same elements: bitwise the same on every node. `sum` is
  // read-only and valid during the call.
  std::function<void(std::size_t first, std::size_t count, const std::byte* sum)> scatter;
  // Once per submission, on an engine thread: after the last scatter (OK), or when the engine has
  // failed (its first error) and touches nothing of this any more. Some chunks may have been
  // scattered then. Exchanges may finish in another order than they were submitted in.
  std::function<void(const absl::Status&)> done;

  // The engine's own, between Submit() and done().
  std::atomic<std::size_t> chunks_left{0};
  std::atomic<bool> dropped{false};
};

struct LaneStatistics {
  // Payload, without the headers of Gloo, TCP and IP.
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  std::uint64_t busy_ns = 0;  // with a chunk in hand, up to the last one's end
  std::uint64_t chunks = 0;   // finished
};

struct EngineStatistics {
  std::uint64_t exchanges = 0;  // finished, broadcasts too
  std::vector<LaneStatistics> lanes;
};

// Thread-safe. One failure is the end: every exchange that is pending or comes later fails with it,
// and a new engine has to be made. Statuses, besides what Abort() was given:
//   UNAVAILABLE        ENGINE_PEER_LOST: a node's daemon died or closed its engine; field "node"
//                      (the candidates, comma-separated, if a connection broke for no known cause)
//   DEADLINE_EXCEEDED  ENGINE_TIMEOUT: a node is silent, or data that it has sent does not arrive;
//                      field "node", comma-separated if there are several candidates
//   CANCELLED          ENGINE_CLOSED: this engine was destroyed with exchanges pending
//   INTERNAL           ENGINE_BROKEN: a fault of this program, or of Gloo
class Engine {
 public:
  // Fails what is pending, waits for its done(), and for a callback that runs. Bounded, as long as
  // they are.
  virtual ~Engine() = default;

  // Begins the all-reduce; never blocks, never calls done() itself, allocates nothing once its
  // queues have grown to the most exchanges ever pending. Every node submits the same exchanges
  // (dtype, count) and broadcasts in the same order: the caller sees to it, the engine cannot. How
  // long the others take to submit theirs is not limited: a step's deadline is the job's.
  virtual void Submit(Exchange* exchange) = 0;

  // Copies the `data` of root_node, which is one of the nodes, to every other node's. `data` stays
  // the caller's, and alive until done(). `bytes` is the same on every node. Ordered with Submit.
  virtual void Broadcast(std::byte* data, std::size_t bytes, std::uint32_t root_node,
                         std::function<void(const absl::Status&)> done) = 0;

  // Fails the engine with `why`, on every node: the others learn its code, reason, message and
  // field "node" (1 KiB of each text) from here. Every done() is called soon. Does nothing if the
  // engine has failed already.
  virtual void Abort(const absl::Status& why) = 0;

  virtual EngineStatistics Statistics() const = 0;
};

}  // namespace gradsync

#endif  // DAEMON_ENGINE_ENGINE_H_
