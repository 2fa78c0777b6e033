// A lane's connections to the other nodes: moves the parts of chunks between their memory and this
// node's.

#ifndef DAEMON_ENGINE_LANE_LINKS_H_
#define DAEMON_ENGINE_LANE_LINKS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "daemon/base/mutex.h"
#include "daemon/base/unique_fd.h"
#include "daemon/engine/lane_connection.h"
#include "daemon/engine/peer_stream.h"

namespace gradsync::daemon {

// Both sides know what comes next and how long it is: the receiver names the memory for each
// message (LaneConnection). Until it does, the sender waits.
//
// Thread-safe. Has one thread, which sleeps in poll(). The caller keeps memory and groups alive
// until their transfers are done, or this is destroyed.
class LaneLinks {
 public:
  // Guarded by the mutex of the LaneLinks.
  using Group = TransferGroup;

  // `peers`: by node, connected; closed for this node. `names`: by node.
  LaneLinks(std::vector<PeerStream> peers, std::vector<std::string> names);
  // Drops transfers that are not done.
  ~LaneLinks();
  LaneLinks(const LaneLinks&) = delete;
  LaneLinks& operator=(const LaneLinks&) = delete;

  // Each adds a transfer to the group. `bytes` is above 0. Start() begins all that were added.
  void Receive(std::size_t node, Group* group, std::byte* data, std::size_t bytes);
  void Send(std::size_t node, Group* group, const std::byte* data, std::size_t bytes);
  void Start();

  // Waits until the group's transfers are done: received, or taken by the kernel to be sent.
  // UNAVAILABLE ENGINE_PEER_LOST: the connection to a node is broken. INTERNAL ENGINE_BROKEN: a
  // node has sent what it should not. Both name the node. CANCELLED: Abort() was called. After an
  // error, the thread uses no transfer's memory any more. There is no deadline here: PeerWatch
  // decides when to abort.
  absl::Status Await(Group* group);
  // Ends all waits, now and later.
  void Abort();
  // Has the destructor drop what the kernel has not sent. Otherwise the kernel still delivers it.
  void DropUnsent();

 private:
  struct Posted {
    std::size_t node = 0;
    bool receives = false;
    Transfer transfer;
  };

  void Post(std::size_t node, bool receives, const Transfer& transfer);
  void Wake() const;
  void Run();
  // Takes over what was posted. False: it has ended.
  bool TakePosted();
  void Fail(const absl::Status& why);

  const std::vector<std::string> names_;
  const UniqueFd wake_;  // eventfd

  // For the thread alone.
  std::vector<LaneConnection> peers_;  // by node
  std::vector<Posted> taken_;
  std::vector<Group*> done_;  // not reported yet

  Mutex mutex_;
  CondVar changed_;
  std::vector<Posted> posted_ ABSL_GUARDED_BY(mutex_);
  absl::Status status_ ABSL_GUARDED_BY(mutex_);  // not OK: it has ended
  bool drop_unsent_ ABSL_GUARDED_BY(mutex_) = false;
  bool running_ ABSL_GUARDED_BY(mutex_) = true;  // the thread may touch memory

  std::thread thread_;  // last: it uses the other members
};

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_LANE_LINKS_H_
