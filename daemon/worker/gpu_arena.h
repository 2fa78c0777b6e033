// The daemon's handle of a session's gradient memory on a GPU. The job's worker on that GPU
// allocates and frees the memory, on this node or, for a job that this daemon coordinates, on
// another node.

#ifndef DAEMON_WORKER_GPU_ARENA_H_
#define DAEMON_WORKER_GPU_ARENA_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/arena/arena_quota.h"
#include "daemon/arena/device_arena.h"
#include "daemon/base/unique_fd.h"
#include "daemon/worker/worker_port.h"
#include "daemon/worker/worker_supervisor.h"

namespace gradsync::daemon {

struct GpuArenaSpec {
  std::size_t bytes = 0;
  std::size_t buckets = 0;
  // The most staging memory that the layout's largest bucket can take (gpu_staging.h).
  std::size_t staging_bytes = 0;
  // The session's semaphores for this layout. The caller keeps the descriptor.
  int semaphores_fd = -1;
  // The pidfd of the session's process; -1 if unknown. The caller keeps the descriptor.
  int trainer_pidfd = -1;
  // The user's share of the quota. It ends when the worker has freed the memory.
  std::shared_ptr<const ArenaQuota::Reservation> reservation;
};

// Thread-safe. Shared by the session, its job, and the launches that use the memory. When the last
// reference is dropped, the worker frees the memory as soon as no launch uses it. Memory that is
// shared by an IPC handle is kept until the session's process has ended, too. Until it is freed,
// memory counts against the quota.
class GpuArena final : public DeviceArena {
 public:
  using Created = std::function<void(absl::StatusOr<std::shared_ptr<GpuArena>>)>;

  // Allocates memory in the worker of `key`, and starts that worker if necessary. Calls `created`
  // once, on a worker's thread or from within Create. Statuses as in gradsync.proto,
  // RegisterLayout.device.
  static void Create(WorkerSupervisor* workers, const WorkerKey& key, const GpuArenaSpec& spec,
                     Created created);
  // An arena on another node. That node's daemon has given it its number, and frees it.
  static std::shared_ptr<GpuArena> OfOtherNode(WorkerKey key, std::shared_ptr<WorkerPort> worker,
                                               std::uint64_t number);
  // Every DeviceArena in the daemon is a GpuArena.
  static const GpuArena& Of(const DeviceArena& arena) {
    return static_cast<const GpuArena&>(arena);
  }
  ~GpuArena() override;
  GpuArena(const GpuArena&) = delete;
  GpuArena& operator=(const GpuArena&) = delete;

  const std::string& device() const override { return key_.device; }
  const WorkerKey& key() const { return key_; }
  // The number by which the worker knows the arena; no other arena of the worker ever has it.
  std::uint64_t number() const { return number_; }
  const std::shared_ptr<WorkerPort>& worker() const { return worker_; }
  // The size that was allocated.
  std::size_t bytes() const { return bytes_; }
  // What the session's process maps: the descriptor or, if fd() is -1, the legacy IPC handle.
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

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_GPU_ARENA_H_
