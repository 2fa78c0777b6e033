// What a worker process does: the calls of worker.proto, carried out by one thread.

#ifndef DAEMON_WORKER_CUDA_WORKER_H_
#define DAEMON_WORKER_CUDA_WORKER_H_

#include <poll.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "daemon/base/mutex.h"
#include "daemon/base/unique_fd.h"
#include "daemon/cuda/cuda_driver.h"
#include "daemon/cuda/nccl_library.h"
#include "daemon/engine/nccl_communicator.h"
#include "daemon/reduce/cuda_combine.h"
#include "daemon/worker/cuda_context.h"
#include "daemon/worker/cuda_launch_queue.h"
#include "daemon/worker/cuda_ready_waits.h"
#include "daemon/worker/cuda_session_memory.h"
#include "daemon/worker/cuda_staging.h"
#include "daemon/worker/message_socket.h"
#include "daemon/worker/worker.pb.h"

namespace gradsync {

// The issuing thread makes every CUDA and NCCL call of the process, in one order. It sleeps while
// there is nothing to do, and looks at words and events every few microseconds while there is.
//
// Post is thread-safe. The process ends with it: there is no destruction in good order but by Stop.
class CudaWorker {
 public:
  // Replies go to the socket, which outlives this.
  explicit CudaWorker(const MessageSocket* socket);
  ~CudaWorker();
  CudaWorker(const CudaWorker&) = delete;
  CudaWorker& operator=(const CudaWorker&) = delete;

  void Post(worker::Call call, std::vector<UniqueFd> descriptors);

  // Stop has been carried out.
  bool stopped() const { return stopped_.load(); }

 private:
  struct Posted {
    worker::Call call;
    std::vector<UniqueFd> descriptors;
  };
  // A Connect that has not been replied to.
  struct Connecting {
    std::uint64_t call;
    std::uint64_t until_ns;
    std::size_t free_before;  // bytes of the GPU
  };
  struct GpuBytes {
    std::size_t free = 0;
    std::size_t total = 0;
  };
  // A call that is replied to when a rank's memory has been freed.
  struct Removal {
    std::uint64_t call;
    std::shared_ptr<CudaSessionMemory> memory;
  };

  // ---- The issuing thread ----
  void Issue();
  // What has been posted; waits for it if nothing is under way.
  std::deque<Posted> Take();
  bool idle() const;
  void Handle(Posted posted);
  // Ends the process if the GPU has failed, which under MPS another process's fault brings about:
  // who launches sees that anyway, who is idle would keep the context, and with it new clients of
  // MPS out. So also after calls that fail, or whose failures nobody sees. Needs a context, and
  // waits for nothing.
  void CheckGpu() const;
  // The same, and how much of the GPU is free. The driver may take minutes for it while another
  // process pins much host memory.
  GpuBytes MemoryInfo() const;
  // The same error, with how much of the GPU is free if it is one that NCCL explains no further
  // than that CUDA has failed: often for want of memory.
  absl::Status WithFreeBytes(const absl::Status& error) const;
  // Ends the process if the GPU has failed.
  void Advance();
  // Of memory that no launch touches any more.
  void FinishRemovals();
  // Of the trainers of `kept_`, in its order, those of which poll has reported something have
  // ended.
  void FreeKept(absl::Span<const pollfd> trainers);
  void Free(std::vector<Removal> removals) const;
  void Stop(std::uint64_t call);

  absl::Status Start(const worker::Start& start, worker::Started* started);
  absl::Status OpenDevice(const worker::Start& start, worker::Started* started);
  absl::Status AddArena(const worker::AddArena& add, std::vector<UniqueFd> descriptors,
                        worker::ArenaAdded* added, UniqueFd* exported);
  absl::Status AwaitReady(std::uint64_t call, const worker::AwaitReady& await);
  absl::Status Launch(std::uint64_t call, const worker::Launch& asked);
  absl::Status RemoveArena(std::uint64_t call, const worker::RemoveArena& remove);
  worker::Pong Memory() const;

  absl::StatusOr<std::string> NewNcclId() const;
  absl::Status Connect(std::uint64_t call, const worker::Connect& connect);
  // Looks whether the communicator that is being made is connected.
  void AdvanceConnecting();
  absl::Status UseCommunicator();
  // Once: it stays NCCL's when the communicator goes, for the next one. Moving it back would need
  // as much memory again.
  absl::Status MoveStagingToNccl();
  absl::Status RegisterStaging();
  // Only while no bucket is in it. Ends the process if it cannot be registered again.
  absl::Status GrowStaging(std::size_t bytes);
  absl::Status Disconnect();

  void Reply(const worker::Reply& reply, const UniqueFd* descriptor = nullptr) const;
  [[noreturn]] void Fail(const absl::Status& why) const;

  const MessageSocket* const socket_;
  const UniqueFd wake_;  // an eventfd: something has been posted
  std::atomic<bool> stopped_{false};

  Mutex mutex_;
  std::deque<Posted> posted_ ABSL_GUARDED_BY(mutex_);

  // The issuing thread's, in the order in which they are made.
  std::unique_ptr<const CudaDriver> driver_;
  // Or why it cannot be used.
  absl::StatusOr<std::unique_ptr<const NcclLibrary>> nccl_ =
      absl::FailedPreconditionError("the worker is not started");
  std::unique_ptr<CudaContext> context_;
  std::unique_ptr<CudaCombine> combine_;
  std::unique_ptr<CudaStagingPool> staging_;
  bool staging_is_of_nccl_ = false;
  // One at most. After the staging that is registered with it: the registration goes first.
  std::vector<std::unique_ptr<NcclCommunicator>> communicators_;
  std::optional<Connecting> connecting_;
  std::uint64_t context_bytes_ = 0;  // 0: unknown
  std::uint64_t nccl_bytes_ = 0;
  std::map<std::uint64_t, std::shared_ptr<CudaSessionMemory>> arenas_;
  CudaReadyWaits ready_waits_;
  std::unique_ptr<CudaLaunchQueue> launches_;
  std::vector<Removal> removals_;
  // Of legacy IPC: must not be freed while the trainer has it open, which only its end tells.
  std::vector<Removal> kept_;
  std::vector<Posted> postponed_;  // until the GPU is at rest

  std::thread thread_;  // last: starts when the rest stands
};

}  // namespace gradsync

#endif  // DAEMON_WORKER_CUDA_WORKER_H_
