// A session's gradient memory on a GPU, as the daemon sees it: an allocation of the job's worker
// there, on this node or, for a job that is coordinated here, on another one.

#ifndef DAEMON_WORKER_GPU_ARENA_H_
#define DAEMON_WORKER_GPU_ARENA_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/arena/arena_quota.h"
#include "daemon/base/unique_fd.h"
#include "daemon/worker/worker_port.h"
#include "daemon/worker/worker_supervisor.h"

namespace gradsync {

struct GpuArenaSpec {
  std::size_t bytes = 0;
  std::size_t buckets = 0;
  // Of the layout's largest bucket, whatever it is staged as (gpu_staging.h).
  std::size_t staging_bytes = 0;
  // Of the session's semaphores for this layout; stays the caller's.
  int semaphores_fd = -1;
  // Of the session's process; stays the caller's. -1: unknown.
  int trainer_pidfd = -1;
  // The user's share of the quota; given back when the worker has freed the memory.
  std::shared_ptr<const ArenaQuota::Reservation> reservation;
};

// Thread-safe. Shared by the session's offer, its job, and the launches that touch it; the last one
// to let go gives the memory back, later, once no launch touches it any more and, with an IPC
// handle, once the session's process has ended: until then it counts against the quota.
class GpuArena {
 public:
  using Created = std::function<void(absl::StatusOr<std::shared_ptr<GpuArena>>)>;

  // Allocates in the worker of `key`, which is started if need be. `created` is called once, from a
  // worker's thread or from within. Statuses as in gradsync.proto, RegisterLayout.device.
  static void Create(WorkerSupervisor* workers, const WorkerKey& key, const GpuArenaSpec& spec,
                     Created created);
  // One of another node, whose daemon gave it `number` and frees it itself.
  static std::shared_ptr<GpuArena> OfOtherNode(WorkerKey key, std::shared_ptr<WorkerPort> worker,
                                               std::uint64_t number);
  ~GpuArena();
  GpuArena(const GpuArena&) = delete;
  GpuArena& operator=(const GpuArena&) = delete;

  const WorkerKey& key() const { return key_; }
  // By which its worker knows it; never used twice there.
  std::uint64_t number() const { return number_; }
  const std::shared_ptr<WorkerPort>& worker() const { return worker_; }
  // As allocated.
  std::size_t bytes() const { return bytes_; }
  // For the session's own process; -1 if there is a legacy IPC handle instead.
  int fd() const { return fd_.get(); }
  const std::string& ipc_handle() const { return ipc_handle_; }

 private:
  GpuArena(WorkerKey key, std::shared_ptr<WorkerPort> worker, std::uint64_t number);

  const WorkerKey key_;
  const std::shared_ptr<WorkerPort> worker_;
  const std::uint64_t number_;
  std::shared_ptr<const ArenaQuota::Reservation> reservation_;
  std::size_t bytes_ = 0;
  UniqueFd fd_;
  std::string ipc_handle_;
};

}  // namespace gradsync

#endif  // DAEMON_WORKER_GPU_ARENA_H_
