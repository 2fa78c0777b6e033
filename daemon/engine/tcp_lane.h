// One lane of a TcpEngine: its own connections to every node, and a thread that runs the lane's
// chunks in order.
//
// The all-reduce of a chunk consists of two collectives. In an all-to-all, each node receives its
// shard of the chunk from every node and adds the shards up, in the order of the nodes. In an
// all-gather, each node receives the other nodes' sums. This moves as many bytes as a ring does, in
// 2 steps instead of 2 (n - 1). The result depends on the elements alone, not on where chunks and
// shards begin, and 16-bit shards are rounded once.
//
// A broadcast is a scatter of the root's shards, then the same all-gather.

#ifndef DAEMON_ENGINE_TCP_LANE_H_
#define DAEMON_ENGINE_TCP_LANE_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "daemon/base/mutex.h"
#include "daemon/engine/engine.h"
#include "daemon/engine/lane_links.h"
#include "daemon/engine/lane_memory.h"
#include "daemon/engine/peer_watch.h"
#include "daemon/engine/ring.h"
#include "daemon/engine/wire_format.h"

namespace gradsync::daemon {

// A lane's part of an exchange: chunks next, next + stride, ...
struct LaneWork {
  Exchange* exchange = nullptr;
  bool owned = false;  // the engine deletes the exchange
  int root = -1;  // a broadcast's root, which alone gathers; the others scatter. -1: an all-reduce
  std::size_t item_bytes = 0;              // of the work type; 1 for a broadcast
  DataType wire = DataType::kUnspecified;  // kUnspecified for a broadcast
  std::size_t chunk_items = 0;
  std::size_t chunks = 0;  // of the exchange
  std::size_t next = 0;
  std::size_t stride = 0;
};

// Thread-safe. Two chunks are under way at once: the next chunk is gathered and sent while the last
// one's sums come back and are scattered.
class TcpLane {
 public:
  // The engine. The lane calls it on the lane's thread.
  class Owner {
   public:
    virtual ~Owner() = default;
    // True once the engine has failed. Takes no lock.
    virtual bool failed() const = 0;
    // A connection is broken. Returns when the engine has failed.
    virtual void Broken(const absl::Status& why) = 0;
    // The last chunk of work.exchange has finished or was dropped.
    virtual void Finished(const LaneWork& work) = 0;
  };

  // `peers`: by node, connected; closed for this node. `memory`: LaneBytes(), aligned to
  // kSlotAlignment; null: the lane allocates it. `memory`, `owner` and `progress` must outlive
  // this.
  TcpLane(std::uint32_t node, const std::vector<std::string>& node_names,
          std::vector<PeerStream> peers, std::size_t chunk_bytes, std::byte* memory, Owner* owner,
          LaneProgress* progress);
  // Finishes all pushed work, or drops it once the engine has failed. To bound the wait, fail the
  // engine first.
  ~TcpLane();
  TcpLane(const TcpLane&) = delete;
  TcpLane& operator=(const TcpLane&) = delete;

  void Start();
  void Push(const LaneWork& work);
  // Wakes the lane if it waits for the network. Requires that the engine has failed.
  void Abort();
  // Like the destructor, but keeps the connections.
  void Stop();
  // Has the connections drop what is not sent when they are closed.
  void DropUnsent() { links_.DropUnsent(); }
  LaneStatistics Statistics() const;

 private:
  struct Shard {
    std::size_t begin = 0;  // item in the chunk
    std::size_t count = 0;
  };

  // A chunk that is under way, and its memory: work | narrow | inbox.
  struct Slot {
    std::byte* memory = nullptr;
    LaneLinks::Group shards;   // received in the first step
    LaneLinks::Group results;  // received in the second step
    LaneLinks::Group sent;     // in both steps
    LaneWork work;
    std::uint64_t number = 0;  // of the chunk in this lane, from 0
    std::size_t first = 0;     // item in the exchange
    std::size_t count = 0;
    bool narrowed = false;
    std::size_t wire_bytes = 0;  // of an item on the wire
    std::size_t data = 0;        // offset of the data to send
    std::size_t shard_items = 0;
    int shard_receives = 0;
    bool receives_results = false;
    bool dropped = false;
  };

  void Run();
  bool Take(bool wait, Slot* slot);
  void Prepare(Slot* slot);
  // The steps of a chunk, in order. Each drops the chunk if the engine has failed, and does nothing
  // if the chunk is dropped.
  void Begin(Slot* slot);     // gather, send shards
  void Sum(Slot* slot);       // receive shards, add, send the sum
  void Complete(Slot* slot);  // receive sums, scatter
  void PostReceives(Slot* slot);
  void PostShards(Slot* slot);
  void PostResults(Slot* slot);
  bool Await(Slot* slot, int phase, LaneLinks::Group* group);
  bool Check(Slot* slot, const absl::Status& status);
  void AddUp(Slot* slot);

  Shard ShardOf(const Slot& slot, int node) const;
  std::size_t Offset(const Slot& slot, const Shard& shard) const;
  std::size_t InboxOffset(const Slot& slot, int node) const;
  void SendTo(Slot* slot, int node, const Shard& shard);

  const int node_;
  const int nodes_;
  const std::size_t chunk_bytes_;
  Owner* const owner_;
  LaneProgress* const progress_;
  std::unique_ptr<std::byte[]> memory_;  // null: the owner's
  LaneLinks links_;                      // after the memory that it writes to

  std::atomic<std::uint64_t> bytes_sent_{0};
  std::atomic<std::uint64_t> bytes_received_{0};
  std::atomic<std::uint64_t> busy_ns_{0};
  std::atomic<std::uint64_t> chunks_{0};

  Mutex mutex_;
  CondVar changed_;
  Ring<LaneWork> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  // For the thread alone.
  std::array<Slot, kLaneSlots> slots_;
  std::uint64_t taken_ = 0;
  std::vector<const std::byte*> addends_;

  std::thread thread_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_TCP_LANE_H_
