// This node's workers of a job that another node coordinates: they are called from there.

#ifndef DAEMON_PEER_LENT_WORKERS_H_
#define DAEMON_PEER_LENT_WORKERS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/arena/semaphore_page.h"
#include "daemon/base/mutex.h"
#include "daemon/worker/worker_port.h"
#include "gradsync/v1/peer.pb.h"
#include "proto/gradsync/data_type.h"

namespace gradsync {

// A bucket of an arena, as this node's own plan of the layout has it.
struct LentBucket {
  const WorkerPort* worker = nullptr;
  DataType dtype = DataType::kUnspecified;
  std::uint64_t count = 0;
  std::uint64_t offset = 0;          // bytes from the arena's start
  std::uint64_t verdict_offset = 0;  // of the step
  std::size_t step_buckets = 0;
  std::shared_ptr<SemaphorePage> semaphores;
};

// Calls are checked, carried out in the order in which they come, and always answered. A worker
// stays for as long as somebody has an arena there; one that is connected to the job's others until
// the coordinator releases it, since those launch nothing without it.
//
// Thread-safe, and calls nobody with its lock held; Call() comes from one thread at a time.
class LentWorkers : public std::enable_shared_from_this<LentWorkers> {
 public:
  struct Owner {
    std::function<void(v1::AttachRequest)> send;
    // FAILED_PRECONDITION: no rank of the job has this arena here, or it has no such bucket.
    std::function<absl::StatusOr<LentBucket>(std::uint64_t arena, std::uint32_t bucket,
                                             std::uint64_t step)>
        find;
    std::function<void()> settled;  // may have become !busy()
  };
  explicit LentWorkers(Owner owner) : owner_(std::move(owner)) {}

  // The number by which the coordinator knows this worker.
  std::uint64_t NumberOf(const std::shared_ptr<WorkerPort>& worker);

  void Call(const v1::WorkerCall& call);
  void Release(const v1::WorkerRelease& release);
  // Tells of those that have ended.
  void Tick();
  // The coordinator is lost: what it has called waits for nobody any more. Those that are at work
  // are killed, for the other nodes' workers may never join them.
  void End(const absl::Status& why);
  // Some call is not answered.
  bool busy() const;

 private:
  struct Worker {
    std::weak_ptr<WorkerPort> port;
    std::shared_ptr<WorkerPort> kept;  // connected
    std::size_t owed = 0;              // calls that are not answered
  };

  using Pages = std::vector<std::shared_ptr<SemaphorePage>>;

  // The call as the worker takes it; `semaphores`: of the ranks that wait for a launch.
  absl::StatusOr<worker::Call> Check(const v1::WorkerCall& call, const WorkerPort* worker,
                                     Pages* semaphores) const;
  absl::Status CheckLaunch(const v1::WorkerCall::Launch& launch, const WorkerPort* worker,
                           worker::Launch* out, Pages* semaphores) const;
  void Answer(const v1::WorkerCall& call, const WorkerPort* worker,
              const absl::StatusOr<WorkerPort::Reply>& reply);

  const Owner owner_;

  mutable Mutex mutex_;
  std::uint64_t last_number_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::uint64_t, Worker> workers_ ABSL_GUARDED_BY(mutex_);
  std::size_t owed_ ABSL_GUARDED_BY(mutex_) =
      0;  // by all, also those that are in the table no more
};

}  // namespace gradsync

#endif  // DAEMON_PEER_LENT_WORKERS_H_
