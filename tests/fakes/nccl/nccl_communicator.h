// One rank of a communicator, in one process, on one device.
//
// Call order: Init AllReduce* Finalize? Destroy, or Abort at any time. A nonblocking communicator
// is in progress after Init, Finalize and every AllReduce, until polling ends that. Only then an
// all-reduce reaches its stream, and other calls are accepted.
//
// Thread-safe, except that Abort during another thread's call is a violation.

#ifndef TESTS_FAKES_NCCL_NCCL_COMMUNICATOR_H_
#define TESTS_FAKES_NCCL_NCCL_COMMUNICATOR_H_

#include <nccl.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "daemon/base/mutex.h"
#include "tests/fakes/machine/device_memory.h"
#include "tests/fakes/nccl/nccl_process.h"
#include "tests/fakes/nccl/nccl_rendezvous.h"

namespace gradsync::fakes {

struct NcclCollective {
  NcclCall call;
  CUdeviceptr from;
  CUdeviceptr to;
  CUstream stream;
};

class NcclCommunicator : public std::enable_shared_from_this<NcclCommunicator> {
 public:
  NcclCommunicator(NcclProcess* process, Context* context, int rank, int ranks, bool blocking,
                   std::unique_ptr<NcclRendezvous> rendezvous,
                   std::shared_ptr<Allocation> footprint);

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  bool blocking() const { return blocking_; }

  // Connects to the other ranks, and disconnects. Both return the result of the API's call.
  ncclResult_t Init();
  ncclResult_t Finalize();

  // ncclInvalidArgument while an operation is in progress, or after an error.
  ncclResult_t EnsureReady();
  // Launches all collectives of a group, at its end.
  ncclResult_t Launch(std::vector<NcclCollective> collectives);
  // The result of ncclCommGetAsyncError. Launches late collectives.
  ncclResult_t Poll();
  // Makes every later call fail with `error`.
  void SetAsyncError(ncclResult_t error);

  void Register(const void* buffer, std::size_t bytes);
  bool Deregister(const void* buffer);
  // The offset of the bytes in registered memory; nullopt if they are not registered.
  std::optional<std::uint64_t> OffsetInRegistered(CUdeviceptr address, std::size_t bytes);

  // Ends the kernels of this rank. Frees nothing.
  void FlagAbort();
  // Waits for this rank's kernels and for parked streams, then frees its memory.
  void Reclaim(const char* call);

  // The number of running calls other than Abort, to check that Abort comes during none.
  std::atomic<int> inside{0};

 private:
  ncclResult_t Start(const std::function<ncclResult_t()>& work);
  ncclResult_t Join();
  ncclResult_t Leave();
  // Allocates the memory for connections. Init calls it, or the first collective does.
  ncclResult_t Connect();
  ncclResult_t LaunchNow(const std::vector<NcclCollective>& collectives);
  CUresult Run(std::uint64_t sequence, const NcclCollective& collective);
  CUresult Exchange(std::uint64_t sequence, const NcclCollective& collective, std::size_t bytes);
  // Spins until `reached` holds for every rank's slot. False if the rank is aborted or its process
  // has a sticky error.
  bool SpinUntil(const std::function<bool(const NcclSlot&)>& reached);
  void SpinUntilAborted();
  bool ARankIsLost() const;

  NcclProcess& process_;
  NcclPort& port_;
  Context* const context_;
  const int rank_;
  const int ranks_;
  const bool blocking_;
  const std::unique_ptr<NcclRendezvous> rendezvous_;

  std::atomic<bool> aborted_{false};
  std::atomic<ncclResult_t> async_error_{ncclSuccess};

  daemon::Mutex mutex_;
  daemon::CondVar idle_;
  std::shared_ptr<Allocation> footprint_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Allocation> connection_ ABSL_GUARDED_BY(mutex_);  // null if not connected
  // True while a thread works for Init or Finalize.
  bool background_ ABSL_GUARDED_BY(mutex_) = false;
  bool finalized_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<NcclCollective> late_ ABSL_GUARDED_BY(mutex_);  // not on a stream yet
  int polls_left_ ABSL_GUARDED_BY(mutex_) = 0;
  std::mt19937_64 random_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t launched_ ABSL_GUARDED_BY(mutex_) = 0;
  std::shared_ptr<Operation> last_ ABSL_GUARDED_BY(mutex_);
  std::map<CUdeviceptr, std::size_t> registered_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_NCCL_NCCL_COMMUNICATOR_H_
