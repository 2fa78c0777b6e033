// Sees at once when another node's daemon dies, and soon when it is silent or its data does not
// come; tells the others why this engine fails.
//
// Gloo itself cannot be asked. A connection that breaks in the middle of a message is not reported
// to the operation in flight (pair.cc, signalException), an operation that times out does not say
// whom it waited for, and one that waits for a slow trainer on another node looks the same as one
// that waits for a dead link.

#ifndef DAEMON_ENGINE_PEER_WATCH_H_
#define DAEMON_ENGINE_PEER_WATCH_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "daemon/base/mutex.h"
#include "daemon/base/unique_fd.h"
#include "daemon/engine/engine_settings.h"
#include "daemon/engine/watch_frame.h"

namespace gradsync {

// How far a lane is: written by the lane, read by the watch.
struct LaneProgress {
  // Chunks of which this node has sent its part.
  std::atomic<std::uint64_t> begun{0};
  // What the lane waits for: 4 * the chunk's number (from 0) + 1, 2 or 3 for the chunk's phases; 0
  // if it does not wait for the network.
  std::atomic<std::uint64_t> waiting{0};
};

// Thread-safe. One thread of its own, which sleeps in poll() and says once per period that this
// node is alive.
class PeerWatch {
 public:
  struct Options {
    std::uint32_t node = 0;
    std::vector<std::string> node_names;  // by node
    // Without a byte from a node for so long, or without the data of a chunk that every node has
    // begun, it counts as lost. Runs from a node's first word.
    absl::Duration silence_limit = EngineSettings().silence_limit;
    // Called at most once, on the watch's thread.
    std::function<void(const absl::Status&)> on_failure;
  };
  // A lane's broken connection waits so long for its cause to be known.
  static constexpr absl::Duration kSuspicion = absl::Milliseconds(500);

  // `peers` by node, as ConnectPeers returns them; `progress` by lane, outlives this.
  PeerWatch(Options options, std::vector<UniqueFd> peers,
            const std::vector<LaneProgress>* progress);
  // Tells the peers, if Say() has not, that this node has left in order.
  ~PeerWatch();
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  // Something broke that a peer's end may explain: if nothing has within kSuspicion, `why` is the
  // failure.
  void Suspect(const absl::Status& why);
  // Tells the peers that this engine has failed. Only the first counts.
  void Say(const absl::Status& failure);

 private:
  struct Peer {
    UniqueFd fd;  // closed: gone
    std::string received;
    std::string unsent;
    std::uint64_t heard_ns = 0;  // 0: not yet
    bool left = false;
    std::vector<std::uint64_t> begun;  // by lane
  };
  // A lane's wait, as last seen.
  struct Stall {
    std::uint64_t waiting = 0;
    std::uint64_t since_ns = 0;
  };

  void Run();
  int TimeoutMs(std::uint64_t now_ns);
  void Wake();
  // What the peers' words, or their silence, mean; OK if nothing.
  absl::Status Read(Peer* peer, const std::string& name);
  absl::Status Take(const WatchFrame& frame, Peer* peer, const std::string& name);
  absl::Status CheckSilence(std::uint64_t now_ns);
  absl::Status CheckLanes(std::uint64_t now_ns);
  absl::Status CheckLeft();
  absl::Status CheckSuspicion(std::uint64_t now_ns);
  void Fail(const absl::Status& failure);
  void Send(WatchFrame::Kind kind, const absl::Status& failure);
  static void Flush(Peer* peer);

  const Options options_;
  const std::uint64_t limit_ns_;
  const std::uint64_t period_ns_;
  const std::vector<LaneProgress>* const progress_;
  const UniqueFd wake_;  // eventfd

  // The thread's alone.
  std::vector<Peer> peers_;
  std::vector<Stall> stalls_;  // by lane
  std::uint64_t next_alive_ns_ = 0;
  bool failed_ = false;
  bool said_ = false;

  Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status to_say_ ABSL_GUARDED_BY(mutex_);
  absl::Status suspicion_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t suspicion_ns_ ABSL_GUARDED_BY(mutex_) = 0;  // when it becomes the failure

  std::thread thread_;  // last: starts when the rest stands
};

}  // namespace gradsync

#endif  // DAEMON_ENGINE_PEER_WATCH_H_
