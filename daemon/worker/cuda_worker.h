// The worker process's side of worker.proto: carries out the daemon's calls.

#ifndef DAEMON_WORKER_CUDA_WORKER_H_
#define DAEMON_WORKER_CUDA_WORKER_H_

#include <time.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/base/mutex.h"
#include "daemon/base/unique_fd.h"
#include "daemon/cuda/cuda_driver.h"
#include "daemon/cuda/nccl_library.h"
#include "daemon/reduce/cuda_combine.h"
#include "daemon/worker/cuda_arenas.h"
#include "daemon/worker/cuda_communicator.h"
#include "daemon/worker/cuda_context.h"
#include "daemon/worker/cuda_launch_queue.h"
#include "daemon/worker/cuda_ready_waits.h"
#include "daemon/worker/cuda_staging.h"
#include "daemon/worker/message_socket.h"
#include "daemon/worker/poll_pace.h"
#include "daemon/worker/worker.pb.h"

namespace gradsync::daemon {

// Carries out the daemon's calls on one thread, the issuing thread, which makes every CUDA and NCCL
// call of the process. That thread polls ready words and events while something is under way, and
// sleeps otherwise.
//
// Thread-safe. Ends the process at Stop, or when the GPU or NCCL fails.
class CudaWorker {
 public:
  // Replies go to `socket`, which must outlive this object.
  explicit CudaWorker(const MessageSocket* socket);
  ~CudaWorker();
  CudaWorker(const CudaWorker&) = delete;
  CudaWorker& operator=(const CudaWorker&) = delete;

  void Post(worker::Call call, std::vector<UniqueFd> descriptors);

  // True once Stop has been carried out.
  bool stopped() const { return stopped_.load(); }

 private:
  struct Posted {
    worker::Call call;
    std::vector<UniqueFd> descriptors;
  };
  struct GpuBytes {
    std::size_t free = 0;
    std::size_t total = 0;
  };
  // NCCL has lost a remote rank. At `until_ns` the process ends with `why`, unless the daemon ends
  // it before.
  struct RemoteLoss {
    absl::Status why;
    std::uint64_t until_ns;
  };

  // ---- The issuing thread ----
  void Issue();
  // Returns the posted calls. Waits for one if nothing is under way.
  std::deque<Posted> Take();
  // How long to sleep before the next look at what is under way.
  timespec Pause() const;
  // True if a Connect has no reply yet.
  bool connecting() const;
  bool idle() const;
  void Handle(Posted posted);
  // Ends the process if the GPU has failed. Under MPS, another process can make it fail. A worker
  // with launches notices that without this check. An idle worker would keep its context, and MPS
  // accepts no new clients until the last failed client has ended. Also called after every failed
  // call, and after calls that would not show such a failure. Requires a context; never waits.
  void CheckGpu() const;
  // The GPU's free and total bytes. Ends the process if the GPU has failed. The driver may take
  // minutes for this while another process pins much host memory.
  GpuBytes MemoryInfo() const;
  // Returns `error`. If it only says that a CUDA call inside NCCL has failed, adds the GPU's free
  // bytes: the cause is often a lack of memory.
  absl::Status WithFreeBytes(const absl::Status& error) const;
  // Advances the launches and the calls that wait for them. Ends the process if the GPU has failed.
  // If NCCL has lost a remote rank, advances nothing any more, and ends the process a little later.
  void Advance();
  // Replies to these RemoveArena calls, whose memory has been freed. Ends the process if the GPU
  // has failed.
  void ReplyToRemovals(const std::vector<std::uint64_t>& calls) const;
  void Stop(std::uint64_t call);

  absl::Status Start(const worker::Start& start, worker::Started* started);
  absl::Status OpenDevice(const worker::Start& start, worker::Started* started);
  absl::Status AddArena(const worker::AddArena& add, std::vector<UniqueFd> descriptors,
                        worker::ArenaAdded* added, UniqueFd* exported);
  absl::Status AwaitReady(std::uint64_t call, const worker::AwaitReady& await);
  absl::Status Launch(std::uint64_t call, const worker::Launch& asked);
  absl::Status RemoveArena(std::uint64_t call, const worker::RemoveArena& remove);
  worker::Pong Memory() const;

  // RESOURCE_EXHAUSTED QUOTA: too many ids have not connected yet.
  absl::StatusOr<std::string> NewNcclId();
  absl::Status Connect(std::uint64_t call, const worker::Connect& connect);
  // Replies to Connect if the communicator is connected, has failed, or is too late.
  void AdvanceConnecting();
  absl::Status Disconnect();

  void Reply(const worker::Reply& reply, const UniqueFd* descriptor = nullptr) const;
  [[noreturn]] void Fail(const absl::Status& why) const;

  const MessageSocket* const socket_;
  const UniqueFd wake_;  // an eventfd that wakes the issuing thread
  std::atomic<bool> stopped_{false};

  Mutex mutex_;
  std::deque<Posted> posted_ ABSL_GUARDED_BY(mutex_);

  // For the issuing thread alone, in the order in which they are made.
  std::unique_ptr<const CudaDriver> driver_;
  // NCCL, or why it cannot be used.
  absl::StatusOr<std::unique_ptr<const NcclLibrary>> nccl_ =
      absl::FailedPreconditionError("the worker is not started");
  std::unique_ptr<CudaContext> context_;
  std::unique_ptr<CudaCombine> combine_;
  std::unique_ptr<CudaStagingPool> staging_;
  // Declared after staging_, so that its registration of staging is destroyed first.
  std::unique_ptr<CudaCommunicator> communicator_;
  // The ids of NewNcclId() with which this worker has not connected. For each of them NCCL may keep
  // a thread and a socket, and has no call that ends them. After kMostUnusedIds the worker ends.
  std::set<std::string> unused_ids_;
  std::string connecting_id_;        // of the last Connect
  std::uint64_t context_bytes_ = 0;  // 0: unknown
  std::unique_ptr<CudaArenas> arenas_;
  CudaReadyWaits ready_waits_;
  std::unique_ptr<CudaLaunchQueue> launches_;
  std::vector<Posted> postponed_;  // calls that wait until no launch is on the GPU
  std::optional<RemoteLoss> remote_loss_;
  PollPace pace_;  // since something was last seen to happen

  std::thread thread_;  // last: it uses the other members
};

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_CUDA_WORKER_H_
