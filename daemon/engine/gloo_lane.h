// One lane of a Gloo engine: its own connections to every node, its own thread, and the chunks that
// fall to it, in order.
//
// The all-reduce of a chunk is a composition of two of Gloo's collectives: an all-to-all of shards
// (one per node), of which each node adds up its own in the order of the nodes, and an all-gather
// of the sums. It moves as many bytes as a ring, in two steps instead of 2 (n - 1); the result is a
// function of the elements alone, not of where chunks and shards begin, and 16-bit shards are
// rounded once. Both are posted with the sends and receives that gloo::alltoallv and
// gloo::allgatherv consist of, for what these cannot do: be aborted (they take an aborted wait for
// a finished one), run beside the next chunk's, and leave out the copy of a node's own shard.
//
// A broadcast is a scatter of the root's shards, and the same all-gather.

#ifndef DAEMON_ENGINE_GLOO_LANE_H_
#define DAEMON_ENGINE_GLOO_LANE_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "daemon/base/mutex.h"
#include "daemon/engine/engine.h"
#include "daemon/engine/peer_watch.h"
#include "daemon/engine/ring.h"
#include "daemon/engine/wire_format.h"
#include "gloo/context.h"
#include "gloo/transport/unbound_buffer.h"

namespace gradsync {

// A lane's part of an exchange: chunks next, next + stride, ...
struct LaneWork {
  Exchange* exchange = nullptr;
  int root = -1;               // >= 0: a broadcast; gather is the root's, scatter the others'
  std::size_t item_bytes = 0;  // of the work type; a broadcast's items are bytes
  DataType wire = DataType::kUnspecified;  // of a broadcast: none
  std::size_t chunk_items = 0;
  std::size_t chunks = 0;  // of the exchange
  std::size_t next = 0;
  std::size_t stride = 0;
};

// Thread-safe. Two chunks are in hand at once: the next one's gather, and its way to the nodes,
// overlap the last one's way back, and its scatter.
class GlooLane {
 public:
  // What a lane needs of its engine. Called on the lane's thread.
  class Owner {
   public:
    virtual ~Owner() = default;
    // Any thread, without a lock.
    virtual bool failed() const = 0;
    // A connection broke, or Gloo did. Returns when the engine has failed.
    virtual void Broken(const absl::Status& why) = 0;
    // The last chunk of work.exchange is finished or dropped.
    virtual void Finished(const LaneWork& work) = 0;
  };

  // Shards begin at multiples of this, chunks too.
  static constexpr std::size_t kShardItems = 64;

  // `owner` and `progress` outlive this. Throws what Gloo throws.
  GlooLane(std::shared_ptr<gloo::Context> context, std::size_t chunk_bytes, Owner* owner,
           LaneProgress* progress);
  // Finishes, or once the engine has failed drops, what was pushed. Whoever wants it bounded fails
  // the engine first.
  ~GlooLane();
  GlooLane(const GlooLane&) = delete;
  GlooLane& operator=(const GlooLane&) = delete;

  void Start();
  void Push(const LaneWork& work);
  // Wakes the lane if it waits for the network. The engine has failed.
  void Abort();
  // As the destructor, but Gloo's context lives on.
  void Stop();
  LaneStatistics Statistics() const;

 private:
  static constexpr int kSlots = 2;

  struct Shard {
    std::size_t begin = 0;  // item in the chunk
    std::size_t count = 0;
  };

  // A chunk in hand, and its memory: work | narrow | inbox, registered with Gloo once.
  struct Slot {
    std::unique_ptr<std::byte[]> owned;
    std::byte* memory = nullptr;
    std::unique_ptr<gloo::transport::UnboundBuffer> shards;   // first step
    std::unique_ptr<gloo::transport::UnboundBuffer> results;  // second step
    std::uint64_t tag = 0;                                    // and the next: Gloo's slots

    LaneWork work;
    std::uint64_t number = 0;  // of the lane's chunks, from 0
    std::size_t first = 0;     // item in the exchange
    std::size_t count = 0;
    bool narrowed = false;
    std::size_t wire_bytes = 0;  // of an item on the wire
    std::size_t data = 0;        // offset of what travels
    std::size_t shard_items = 0;
    int shard_receives = 0;
    int shard_sends = 0;
    int result_receives = 0;
    int result_sends = 0;
    bool dropped = false;
  };

  void Run();
  bool Take(bool wait, Slot* slot);
  void Prepare(Slot* slot);
  // The steps of a chunk, in order. Each does nothing if the chunk is dropped, and drops it if the
  // engine has failed.
  void Begin(Slot* slot);     // gather, send shards
  void Sum(Slot* slot);       // receive shards, add, send the sum
  void Complete(Slot* slot);  // receive sums, scatter
  void PostReceives(Slot* slot);
  void PostShards(Slot* slot);
  void PostResults(Slot* slot);
  bool Await(Slot* slot, int phase, gloo::transport::UnboundBuffer* buffer, int receives,
             int sends);
  bool Check(Slot* slot, const absl::Status& status);
  void AddUp(Slot* slot);

  Shard ShardOf(const Slot& slot, int node) const;
  std::size_t Offset(const Slot& slot, const Shard& shard) const;
  std::size_t InboxOffset(const Slot& slot, int node) const;
  void SendTo(Slot* slot, gloo::transport::UnboundBuffer* buffer, std::uint64_t tag, int node,
              const Shard& shard, int* sends);

  const std::shared_ptr<gloo::Context> context_;
  const int node_;
  const int nodes_;
  const std::size_t chunk_bytes_;
  Owner* const owner_;
  LaneProgress* const progress_;

  std::atomic<std::uint64_t> bytes_sent_{0};
  std::atomic<std::uint64_t> bytes_received_{0};
  std::atomic<std::uint64_t> busy_ns_{0};
  std::atomic<std::uint64_t> chunks_{0};

  Mutex mutex_;
  CondVar changed_;
  Ring<LaneWork> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  // The thread's alone, but for the buffers' abort functions.
  std::array<Slot, kSlots> slots_;
  std::uint64_t taken_ = 0;
  std::vector<const std::byte*> addends_;

  std::thread thread_;
};

}  // namespace gradsync

#endif  // DAEMON_ENGINE_GLOO_LANE_H_
