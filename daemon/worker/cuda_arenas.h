// The arenas of a worker, from AddArena until their memory is freed.

#ifndef DAEMON_WORKER_CUDA_ARENAS_H_
#define DAEMON_WORKER_CUDA_ARENAS_H_

#include <poll.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "daemon/base/unique_fd.h"
#include "daemon/worker/cuda_context.h"
#include "daemon/worker/cuda_launch_queue.h"
#include "daemon/worker/cuda_session_memory.h"
#include "daemon/worker/worker.pb.h"

namespace gradsync::daemon {

// A removed arena is freed when no launch touches it any more. An arena that is shared by legacy
// IPC is kept until the trainer has ended, too: it must not be freed while the trainer has it open,
// and nothing else shows that the trainer has closed it.
//
// For the issuing thread alone. Shares ownership of the memory with the launches and ready waits
// that use it. The Free...() methods return the ids of the RemoveArena calls that they have carried
// out.
class CudaArenas {
 public:
  // `context` must outlive this. The arenas are made in it.
  explicit CudaArenas(const CudaContext* context) : context_(context) {}
  CudaArenas(const CudaArenas&) = delete;
  CudaArenas& operator=(const CudaArenas&) = delete;

  // Makes an arena. `descriptors`: that of its semaphores and, if known, its trainer's pidfd.
  // Returns what the trainer maps: the descriptor `exported`, or the IPC handle in `added`.
  // Requires that the arena's number is not in use. Fails as CudaSemaphorePage::Register() and
  // CudaArena::Create().
  absl::Status Add(const worker::AddArena& add, std::vector<UniqueFd> descriptors,
                   worker::ArenaAdded* added, UniqueFd* exported);
  // Null: there is no such arena.
  std::shared_ptr<CudaSessionMemory> Find(std::uint64_t number) const;
  // Removes the arena, and returns its memory, which no new launch may use. NOT_FOUND: there is no
  // such arena.
  absl::StatusOr<std::shared_ptr<CudaSessionMemory>> Remove(std::uint64_t call,
                                                            std::uint64_t number);

  // True if some memory waits for the end of launches.
  bool waits_for_launches() const { return !removals_.empty(); }
  // Frees the removed memory that no launch of `launches` touches any more. Memory that a trainer
  // may have open by legacy IPC is kept for FreeOfEnded().
  std::vector<std::uint64_t> FreeUntouched(const CudaLaunchQueue& launches);

  // For poll(): the processes that must end before their memory is freed. An entry may have no
  // descriptor.
  std::vector<pollfd> AwaitedTrainers() const;
  // Frees the memory of trainers that have ended: poll has reported an event for their entries in
  // `trainers`, the result of AwaitedTrainers(). Requires that no launch is on the GPU, because
  // freeing waits for its kernels.
  std::vector<std::uint64_t> FreeOfEnded(absl::Span<const pollfd> trainers);

  // Counts the memory that a trainer can still see and that is not freed.
  void Count(worker::Pong* memory) const;

 private:
  // A RemoveArena. Its reply is sent when the memory has been freed.
  struct Removal {
    std::uint64_t call;
    std::shared_ptr<CudaSessionMemory> memory;
  };

  const CudaContext* const context_;
  std::map<std::uint64_t, std::shared_ptr<CudaSessionMemory>> arenas_;
  std::vector<Removal> removals_;  // a launch may touch the memory
  std::vector<Removal> kept_;      // no launch touches it, but the trainer may have it open
};

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_CUDA_ARENAS_H_
