// The workers of another node, on the coordinator of their job. They take the same calls as workers
// of this node; the calls travel through that node's daemon (WorkerProxyServer).

#ifndef DAEMON_PEER_REMOTE_WORKER_H_
#define DAEMON_PEER_REMOTE_WORKER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"
#include "daemon/peer/node_link.h"
#include "daemon/worker/worker_port.h"
#include "gradsync/v1/peer.pb.h"

namespace gradsync::daemon {

// Thread-safe; its lock comes before that of the link's queue. Its owners keep the worker alive:
// RemoteWorkers releases it only if nobody else has referred to it for a while.
class RemoteWorker final : public WorkerPort {
 public:
  // `number` is its node's number for it.
  RemoteWorker(std::shared_ptr<NodeLink> link, std::uint64_t number, std::string device,
               const Clock* clock);
  RemoteWorker(const RemoteWorker&) = delete;
  RemoteWorker& operator=(const RemoteWorker&) = delete;

  const std::string& device() const { return device_; }

  // ---- WorkerPort
  // UNIMPLEMENTED for calls that only its own node makes. RemoveArena is answered at once, because
  // its own node removes the arena.
  void Call(worker::Call call, std::vector<UniqueFd> descriptors, Answered answered) override;
  void Kill(const absl::Status& why) override;
  absl::Status EndReason() const override;

  // ---- For its node's stream
  // True if a call has not been answered.
  bool owes() const;
  // True if it was killed long ago, and a call has not been answered yet.
  bool IsLate(std::uint64_t now_ns) const;
  // INVALID_ARGUMENT MALFORMED: no such call is open, or the reply does not fit it.
  absl::Status Take(const v1::WorkerReply& reply);
  // Releases the worker on its node, with the next message that goes there. Later calls are
  // answered with an error: nobody would take the worker's replies, and it may have a successor
  // with the same number. False: a call has not been answered, and the worker is not released.
  bool Release();
  // The worker or its node is lost. Answers every open call with `why`.
  void Lost(const absl::Status& why);

 private:
  struct Unanswered {
    worker::Call::KindCase kind;
    Answered answered;
  };

  absl::Status Malformed(absl::string_view what) const;

  const std::shared_ptr<NodeLink> link_;
  const std::uint64_t number_;
  const std::string device_;
  const Clock* const clock_;

  mutable Mutex mutex_;
  std::uint64_t last_id_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::uint64_t, Unanswered> unanswered_ ABSL_GUARDED_BY(mutex_);  // by the call's id
  absl::Status end_ ABSL_GUARDED_BY(mutex_);             // not OK: why it has ended
  std::uint64_t killed_ns_ ABSL_GUARDED_BY(mutex_) = 0;  // 0: Kill() has not been called
};

// All workers of one node in one job. Thread-safe; its lock comes before the workers'.
class RemoteWorkers {
 public:
  // A worker that no one else has referred to for `idle_limit_ns` is released.
  RemoteWorkers(const Clock* clock, std::uint64_t idle_limit_ns)
      : clock_(clock), idle_limit_ns_(idle_limit_ns) {}

  // The worker with this number on the node of `link`, on this GPU. If the GPU had a worker with
  // another number, that one has ended. INVALID_ARGUMENT MALFORMED: the node has too many workers.
  absl::StatusOr<std::shared_ptr<RemoteWorker>> Find(const std::shared_ptr<NodeLink>& link,
                                                     std::uint64_t number,
                                                     const std::string& device);
  // A reply of a worker that has been released is ignored: the node may not know it yet.
  absl::Status Take(const v1::WorkerReply& reply);
  void Ended(std::uint64_t number, const absl::Status& why);
  // False: a worker that was killed does not end, and its node must be disconnected.
  bool Tick(std::uint64_t now_ns);
  // The node is lost.
  void Lost(const absl::Status& why);

 private:
  struct Entry {
    std::shared_ptr<RemoteWorker> worker;
    std::uint64_t idle_since_ns = 0;  // 0: in use
  };

  const Clock* const clock_;
  const std::uint64_t idle_limit_ns_;

  Mutex mutex_;
  std::map<std::uint64_t, Entry> workers_ ABSL_GUARDED_BY(mutex_);  // by number
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_REMOTE_WORKER_H_
