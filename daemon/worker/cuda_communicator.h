// A worker's connection to the other workers of its job, and the staging memory registered with it.

#ifndef DAEMON_WORKER_CUDA_COMMUNICATOR_H_
#define DAEMON_WORKER_CUDA_COMMUNICATOR_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "daemon/cuda/nccl_library.h"
#include "daemon/engine/nccl_communicator.h"
#include "daemon/worker/cuda_staging.h"

namespace gradsync::daemon {

// The worker's NcclCommunicator, from Connect to Disconnect. While there is a communicator, all
// staging memory is registered with it. So staging memory is reserved only through this class, even
// if there is no communicator.
//
// For the issuing thread alone. Owns the communicator and aborts it in the destructor.
class CudaCommunicator {
 public:
  // The worker process.
  struct Process {
    // Returns the free bytes of the GPU.
    std::function<std::size_t()> free_bytes;
    // Ends the process.
    std::function<void(const absl::Status& why)> fail;
  };
  // How a Connect ended. OK: the communicator can be used. Otherwise it can only be aborted.
  struct Connected {
    std::uint64_t call = 0;
    absl::Status status;
  };

  // `nccl` may be null: then Connect must not be called. `nccl` and `staging` outlive this object.
  CudaCommunicator(const NcclLibrary* nccl, CudaStagingPool* staging, Process process);
  ~CudaCommunicator();
  CudaCommunicator(const CudaCommunicator&) = delete;
  CudaCommunicator& operator=(const CudaCommunicator&) = delete;

  // True from Connect to Abort.
  bool exists() const { return communicator_ != nullptr; }
  // True from Connect until AdvanceConnecting or CancelConnecting returns its call.
  bool connecting() const { return connecting_.has_value(); }
  // The communicator if it can be used, otherwise null.
  NcclCommunicator* get() const { return connecting() ? nullptr : communicator_.get(); }
  // Bytes of the GPU that the communicator has taken; 0 if there is none.
  std::uint64_t nccl_bytes() const { return nccl_bytes_; }

  // Begins to connect, on behalf of the daemon's `call`. Requires that no communicator exists.
  absl::Status Connect(std::uint64_t call, const NcclCommunicatorOptions& options,
                       std::uint64_t limit_ns);
  // Returns the end of the Connect, or nullopt if it is still under way. DEADLINE_EXCEEDED
  // NCCL_TIMEOUT after its limit; otherwise statuses as StatusOfNccl. After an error, call Abort.
  // Requires connecting().
  std::optional<Connected> AdvanceConnecting();
  // Forgets the Connect that is under way, and returns its call: AdvanceConnecting will not return
  // it. Nullopt if none is under way.
  std::optional<std::uint64_t> CancelConnecting();
  void Abort();

  // Makes every piece of staging hold at least `bytes`. Requires that no bucket is in staging. Ends
  // the process if staging cannot be registered again. Fails as CudaStagingPool::Reserve does.
  absl::Status GrowStaging(std::size_t bytes);

 private:
  struct Connecting {
    std::uint64_t call;
    std::uint64_t until_ns;
    std::size_t free_before;  // bytes of the GPU
  };

  // Moves staging to NCCL's allocator, once. It stays there for later communicators, because moving
  // it back would need as much memory again.
  absl::Status MoveStagingToNccl();
  absl::Status RegisterStaging();

  const NcclLibrary* const nccl_;
  CudaStagingPool* const staging_;
  const Process process_;
  bool staging_is_of_nccl_ = false;
  std::unique_ptr<NcclCommunicator> communicator_;
  std::optional<Connecting> connecting_;
  std::uint64_t nccl_bytes_ = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_CUDA_COMMUNICATOR_H_
