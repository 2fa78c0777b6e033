// Watches the other nodes of an engine. Detects at once that the connection to a node has ended,
// and within silence_limit that a node is silent or that its data does not arrive. Sends the other
// nodes the reason when this engine fails.
//
// The lanes' connections alone cannot show this: a wait for a slow trainer on another node looks
// like a wait on a lost connection.

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
#include "daemon/engine/peer_stream.h"
#include "daemon/engine/watch_frame.h"

namespace gradsync::daemon {

// The progress of a lane: the lane writes it, the watch reads it.
struct LaneProgress {
  // Number of chunks whose shards this node has sent.
  std::atomic<std::uint64_t> begun{0};
  // What the lane waits for: 4 * the chunk's number (from 0) + the chunk's phase (1, 2 or 3). 0: it
  // does not wait for the network.
  std::atomic<std::uint64_t> waiting{0};
};

// Thread-safe. Has one thread, which sleeps in poll() and tells the other nodes once per period
// that this node is alive.
class PeerWatch {
 public:
  struct Options {
    std::uint32_t node = 0;
    std::vector<std::string> node_names;  // by node
    // The engine fails (ENGINE_TIMEOUT) if a node sends nothing for this long after its first
    // message. It also fails if data of a chunk that every node has begun has not arrived
    // after this long.
    absl::Duration silence_limit = EngineSettings().silence_limit;
    // Called at most once, on the watch's thread.
    std::function<void(const absl::Status&)> on_failure;
  };
  // The watch reports a lane's broken connection only after this time. In the meantime it may learn
  // which node's loss has broken the connection.
  static constexpr absl::Duration kSuspicion = absl::Milliseconds(500);

  // `peers`: by node, as ConnectPeers returns them. `progress`: by lane; must outlive this.
  PeerWatch(Options options, std::vector<PeerStream> peers,
            const std::vector<LaneProgress>* progress);
  // Unless Say() was called, tells the other nodes that this one has closed its engine without a
  // failure.
  ~PeerWatch();
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  // Reports an error that the loss of a node may explain. If no node is lost within kSuspicion, the
  // engine fails with `why`.
  void Suspect(const absl::Status& why);
  // Tells the other nodes that this engine has failed. Only the first call counts.
  void Say(const absl::Status& failure);

 private:
  struct Peer {
    PeerStream stream;  // closed if the node has left or is lost
    std::string received;
    std::string unsent;
    std::uint64_t heard_ns = 0;        // when its last bytes came; 0: none yet
    bool left = false;                 // it has closed its engine without a failure
    std::vector<std::uint64_t> begun;  // by lane
  };
  // What a lane has waited for, and since when.
  struct Stall {
    std::uint64_t waiting = 0;
    std::uint64_t since_ns = 0;
  };

  void Run();
  int TimeoutMs(std::uint64_t now_ns);
  void Wake();
  // Each returns the failure that it detects, or OK.
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

  // For the thread alone.
  std::vector<Peer> peers_;
  std::vector<Stall> stalls_;  // by lane
  std::uint64_t next_alive_ns_ = 0;
  bool failed_ = false;
  bool said_ = false;

  Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status to_say_ ABSL_GUARDED_BY(mutex_);
  absl::Status suspicion_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t suspicion_ns_ ABSL_GUARDED_BY(mutex_) = 0;  // when suspicion_ becomes the failure

  std::thread thread_;  // last: it uses the other members
};

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_PEER_WATCH_H_
