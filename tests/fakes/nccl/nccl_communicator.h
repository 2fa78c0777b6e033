// A communicator: one rank of it, in one process, on one device.
//
// Init -> (AllReduce | Broadcast)* -> Finalize? -> Destroy, or Abort at any time. A nonblocking one
// is in progress after Init, Finalize and every collective until polling has brought it out of
// that; a collective reaches the stream only then, and no other call is admitted before.
//
// Thread-safe, but Abort must not come while another thread is inside a call (noted in the
// journal).

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
  CUdeviceptr from;  // read by all-reduces and by a broadcast's root
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
  int device() const { return port_.OrdinalOf(*context_); }
  bool blocking() const { return blocking_; }

  // Meets the other ranks. Both return what the API's call returns.
  ncclResult_t Init();
  ncclResult_t Finalize();

  // ncclInvalidArgument while something is in progress or after an error.
  ncclResult_t EnsureReady();
  // To be called for all collectives of a group, at its end.
  ncclResult_t Launch(std::vector<NcclCollective> collectives);
  // What ncclCommGetAsyncError gives; launches what is late.
  ncclResult_t Poll();
  // From now on everything returns without success.
  void SetAsyncError(ncclResult_t error);

  void Register(const void* buffer, std::size_t bytes);
  bool Deregister(const void* buffer);
  // How far into what is registered they lie; nothing if they do not.
  std::optional<std::uint64_t> OffsetInRegistered(CUdeviceptr address, std::size_t bytes);

  // Kernels of this rank end; nothing is freed yet.
  void FlagAbort();
  // Waits for this rank's kernels and for parked streams, then frees what it has.
  void Reclaim(const char* call);

  // Of calls other than Abort; for the check that nobody is inside when Abort comes.
  std::atomic<int> inside{0};

 private:
  ncclResult_t Start(const std::function<ncclResult_t()>& work);
  ncclResult_t Join();
  ncclResult_t Leave();
  // With Init, or before the first collective: takes the memory that has been left for it.
  ncclResult_t Connect();
  ncclResult_t LaunchNow(const std::vector<NcclCollective>& collectives);
  CUresult Run(std::uint64_t sequence, const NcclCollective& collective);
  CUresult Exchange(std::uint64_t sequence, const NcclCollective& collective, std::size_t bytes);
  // Spins until `reached` holds for every rank's slot; false if aborted or the process is at fault.
  bool SpinUntil(const std::function<bool(const NcclSlot&)>& reached);
  void SpinUntilAborted();
  bool APeerIsDead() const;

  NcclProcess& process_;
  NcclPort& port_;
  Context* const context_;
  const int rank_;
  const int ranks_;
  const bool blocking_;
  const std::unique_ptr<NcclRendezvous> rendezvous_;

  std::atomic<bool> aborted_{false};
  std::atomic<ncclResult_t> async_error_{ncclSuccess};

  Mutex mutex_;
  CondVar idle_;
  std::shared_ptr<Allocation> footprint_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Allocation> connection_ ABSL_GUARDED_BY(mutex_);  // null: not connected
  bool background_ ABSL_GUARDED_BY(mutex_) = false;  // a thread works for Init or Finalize
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
