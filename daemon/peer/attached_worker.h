// The workers of another node, as its job's coordinator calls them: the same calls as to its own,
// through that node's daemon.

#ifndef DAEMON_PEER_ATTACHED_WORKER_H_
#define DAEMON_PEER_ATTACHED_WORKER_H_

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

namespace gradsync {

// Thread-safe; its lock comes before the link's queue. Callers keep it, and with it the worker: its
// node may stop the worker some time after the last of them has let go.
class AttachedWorker final : public WorkerPort {
 public:
  // `number`: by which its node knows it.
  AttachedWorker(std::shared_ptr<NodeLink> link, std::uint64_t number, std::string device,
                 const Clock* clock);
  // Releases it on its node, with the next message that goes there.
  ~AttachedWorker() override;
  AttachedWorker(const AttachedWorker&) = delete;
  AttachedWorker& operator=(const AttachedWorker&) = delete;

  const std::string& device() const { return device_; }

  // ---- WorkerPort
  // UNIMPLEMENTED of what only its own node calls. RemoveArena is its node's own affair too, and
  // answered at once.
  void Call(worker::Call call, std::vector<UniqueFd> descriptors, Answered answered) override;
  void Kill(const absl::Status& why) override;
  bool over() const override;

  // ---- For its node's stream
  // Some call has not been answered.
  bool owes() const;
  // INVALID_ARGUMENT MALFORMED: it answers no call, or another one.
  absl::Status Take(const v1::WorkerReply& reply);
  // It or its node is gone: nothing is answered any more but by this.
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
  absl::Status over_ ABSL_GUARDED_BY(mutex_);                               // not OK: why
};

// All that one node has in a job. Thread-safe; its lock comes before the workers'.
class AttachedWorkers {
 public:
  // One that nobody has called for `idle_limit_ns` is released.
  AttachedWorkers(const Clock* clock, std::uint64_t idle_limit_ns)
      : clock_(clock), idle_limit_ns_(idle_limit_ns) {}

  // The worker that the node of `link` has under this number, on this GPU. One with another number
  // there has ended. INVALID_ARGUMENT MALFORMED: more than any node has.
  absl::StatusOr<std::shared_ptr<AttachedWorker>> Find(const std::shared_ptr<NodeLink>& link,
                                                       std::uint64_t number,
                                                       const std::string& device);
  // What is about a worker that has been released is ignored: the node may not know yet.
  absl::Status Take(const v1::WorkerReply& reply);
  void Gone(std::uint64_t number, const absl::Status& why);
  void Tick(std::uint64_t now_ns);
  // The node is gone.
  void Lost(const absl::Status& why);

 private:
  struct Entry {
    std::shared_ptr<AttachedWorker> worker;
    std::uint64_t idle_since_ns = 0;  // 0: somebody has it
  };

  const Clock* const clock_;
  const std::uint64_t idle_limit_ns_;

  Mutex mutex_;
  std::map<std::uint64_t, Entry> workers_ ABSL_GUARDED_BY(mutex_);  // by number
};

}  // namespace gradsync

#endif  // DAEMON_PEER_ATTACHED_WORKER_H_
