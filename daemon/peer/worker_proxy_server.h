// Lets the coordinator of a job, on another node, call this node's workers of that job.

#ifndef DAEMON_PEER_WORKER_PROXY_SERVER_H_
#define DAEMON_PEER_WORKER_PROXY_SERVER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/arena/arena_quota.h"
#include "daemon/arena/semaphore_page.h"
#include "daemon/base/mutex.h"
#include "daemon/peer/stepped_charge.h"
#include "daemon/worker/worker_port.h"
#include "gradsync/v1/peer.pb.h"
#include "proto/gradsync/data_type.h"

namespace gradsync::daemon {

// A bucket of an arena, according to this node's own plan of the layout.
struct ProxiedBucket {
  const WorkerPort* worker = nullptr;
  DataType dtype = DataType::kUnspecified;
  std::uint64_t count = 0;
  std::uint64_t offset = 0;          // bytes from the arena's start
  std::uint64_t verdict_offset = 0;  // of the step
  std::size_t step_buckets = 0;
  std::shared_ptr<SemaphorePage> semaphores;
};

// Checks each call, carries calls out in order, and answers each one. A worker's arenas keep it
// alive. A worker that is connected to the job's other workers is also kept here until the
// coordinator releases it, because the others launch nothing without it.
//
// Thread-safe. It calls no one with its lock held. Call() is called from one thread at a time.
class WorkerProxyServer : public std::enable_shared_from_this<WorkerProxyServer> {
 public:
  struct Owner {
    std::function<void(v1::AttachRequest)> send;
    // FAILED_PRECONDITION: no rank of the job has this arena here, or it has no such bucket.
    std::function<absl::StatusOr<ProxiedBucket>(std::uint64_t arena, std::uint32_t bucket,
                                                std::uint64_t step)>
        find;
    std::function<void()> settled;  // a call was answered; busy() may have become false
    MemoryAccount account;          // is charged for calls that are not answered
  };
  // Up to this many bytes of such calls are not charged: some 200 calls.
  static constexpr std::size_t kFreeCallBytes = 256 << 10;
  explicit WorkerProxyServer(Owner owner) : owner_(std::move(owner)) {}

  // The number by which the coordinator knows this worker.
  std::uint64_t NumberOf(const std::shared_ptr<WorkerPort>& worker);

  // An honest coordinator may have many calls open: one or two for each bucket of the layouts that
  // are in a step. So only the user's quota bounds them. Beyond it the answer is
  // RESOURCE_EXHAUSTED.
  void Call(const v1::WorkerCall& message);
  void Release(const v1::WorkerRelease& release);
  // Reports workers that have ended.
  void Tick();
  // The coordinator is lost. Workers that still owe it an answer are killed, because the other
  // nodes' workers may never join their all-reduce.
  void End(const absl::Status& why);
  // True if a call has not been answered.
  bool busy() const;

 private:
  struct Worker {
    std::weak_ptr<WorkerPort> port;
    std::shared_ptr<WorkerPort> kept;  // connected
    std::size_t owed = 0;              // calls that it has not answered
  };

  struct OpenCall {
    std::uint64_t worker = 0;
    std::uint64_t call = 0;
    std::size_t bytes = 0;  // that it is charged for
  };
  using Pages = std::vector<std::shared_ptr<SemaphorePage>>;

  // Checks a call of the coordinator, and fills in the fields that only this node knows.
  // `semaphores` gets the pages of the ranks that wait for a launch.
  absl::Status Check(const WorkerPort* worker, worker::Call* call, Pages* semaphores) const;
  absl::Status CheckLaunch(const WorkerPort* worker, worker::Launch* launch,
                           Pages* semaphores) const;
  void Answer(const OpenCall& id, const WorkerPort* worker,
              const absl::StatusOr<WorkerPort::Reply>& reply);

  const Owner owner_;

  mutable Mutex mutex_;
  std::uint64_t last_number_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::uint64_t, Worker> workers_ ABSL_GUARDED_BY(mutex_);
  // Calls that have not been answered, including calls to workers that have left workers_.
  std::size_t owed_ ABSL_GUARDED_BY(mutex_) = 0;
  std::size_t owed_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  SteppedCharge charge_ ABSL_GUARDED_BY(mutex_){kFreeCallBytes};
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_WORKER_PROXY_SERVER_H_
