// One GPU's rank in the NCCL communicator of a job.

#ifndef DAEMON_ENGINE_NCCL_COMMUNICATOR_H_
#define DAEMON_ENGINE_NCCL_COMMUNICATOR_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cuda.h"
#include "daemon/cuda/nccl_library.h"
#include "proto/gradsync/data_type.h"

namespace gradsync::daemon {

struct NcclCommunicatorOptions {
  std::string unique_id;  // from NewUniqueId, the same on every rank
  int rank = 0;
  int ranks = 1;
  int max_ctas = 0;  // 0: NCCL's choice
  // Values for NCCL_ALGO and NCCL_PROTO. Empty: as in the environment of this process at its start.
  std::string algorithm;
  std::string protocol;
  // Blocking mode: NCCL's default, which trainers use. tools/bench compares with it. Connect then
  // waits for the other ranks, AllReduce until it is on the stream, and Settled is always true.
  bool blocking = false;
};

// Nonblocking by default: no call waits for another rank, so the calling thread can always give up.
// Call order: Connect Settled* (AllReduce Settled+)*, and after any error only Abort.
//
// Enqueue nothing behind an operation on its stream until Settled() is true: the operation may not
// be on the stream yet, and would be overtaken.
//
// Not thread-safe: for the thread that issues the GPU's work, with the GPU's context current. Owns
// the communicator and aborts it in the destructor.
class NcclCommunicator {
 public:
  // Makes an id for all ranks. This process must be rank 0, and must live until every rank is
  // connected.
  static absl::StatusOr<std::string> NewUniqueId(const NcclLibrary* nccl);

  // Begins to connect to the other ranks. Sets NCCL_ALGO and NCCL_PROTO in this process's
  // environment, where NCCL reads them for each communicator: so the process must have no other
  // communicator. Also sets NCCL_RUNTIME_CONNECT to 0, unless it is set: then all memory is
  // allocated and all ranks are connected once the communicator is settled, not in the first
  // all-reduce.
  static absl::StatusOr<std::unique_ptr<NcclCommunicator>> Connect(
      const NcclLibrary* nccl, const NcclCommunicatorOptions& options);
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // True if no operation is in progress. Call this on a settled communicator too: it returns later
  // errors of the other ranks and the network. Statuses as StatusOfNccl.
  absl::StatusOr<bool> Settled();

  // Begins the sum over all ranks, in place. Every rank makes the same calls (count, type) in the
  // same order. Requires that the communicator is settled.
  absl::Status AllReduce(CUdeviceptr data, DataType dtype, std::size_t count, CUstream stream);

  // Registers memory from AllocateMemory, which makes AllReduce on it faster. If one rank
  // registers, all ranks must. One piece at a time: deregister it before it is freed, unless the
  // communicator is destroyed first. Requires that the communicator is settled.
  absl::Status Register(CUdeviceptr address, std::size_t bytes);
  absl::Status Deregister();

  // Gives up all operations. Tells every communicator to stop before it frees any: freeing one
  // waits for its kernels, which may wait for kernels of another. No thread may be in a call on any
  // of them.
  static void Abort(absl::Span<const std::unique_ptr<NcclCommunicator>> communicators);

  // Device memory as NCCL requires it for registration.
  static absl::Status AllocateMemory(const NcclLibrary* nccl, CUdeviceptr* address,
                                     std::size_t bytes);
  static void FreeMemory(const NcclLibrary* nccl, CUdeviceptr address);

 private:
  explicit NcclCommunicator(const NcclLibrary* nccl) : nccl_(nccl) {}

  void Abort();

  const NcclLibrary* const nccl_;
  ncclComm_t communicator_ = nullptr;  // null once aborted
  void* registration_ = nullptr;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_NCCL_COMMUNICATOR_H_
