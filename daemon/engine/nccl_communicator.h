// One GPU's rank in the communicator of a job's GPUs.

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

namespace gradsync {

struct NcclCommunicatorOptions {
  std::string unique_id;  // of NewUniqueId, the same on every rank
  int rank = 0;
  int ranks = 1;
  int max_ctas = 0;  // 0: NCCL's choice
  // As NCCL_ALGO and NCCL_PROTO take them. Empty: as this process was started.
  std::string algorithm;
  std::string protocol;
  // NCCL's default, which trainers use: what tools/bench compares with. Connect waits for the other
  // ranks, AllReduce until it is on the stream, and it is always settled.
  bool blocking = false;
};

// Nonblocking by default: no call waits for another rank, so that the thread that makes them stays
// able to give up. Call order: Connect Settled* (AllReduce Settled+)*, and after any error only
// Abort.
//
// "Settled" is what everything that follows on the stream waits for: until then an operation may
// not be on the stream yet, and what is enqueued behind it would overtake it.
//
// For the one thread that issues a GPU's work, with its context current. Owns the communicator,
// which is aborted with it.
class NcclCommunicator {
 public:
  // For rank 0 to give to all. Its process has to live until every rank is connected.
  static absl::StatusOr<std::string> NewUniqueId(const NcclLibrary* nccl);

  // Begins to connect to the other ranks. Changes NCCL_ALGO and NCCL_PROTO of this process, which
  // has no other communicator: NCCL has no other way to be told, and reads them for each one. Also
  // NCCL_RUNTIME_CONNECT, unless it is set: all memory is taken and all ranks are reached once this
  // has settled.
  static absl::StatusOr<std::unique_ptr<NcclCommunicator>> Connect(
      const NcclLibrary* nccl, const NcclCommunicatorOptions& options);
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Whether nothing is in progress. Also the watch on a settled one: errors that come later, from
  // the other ranks or the network, show here. Statuses as StatusOfNccl.
  absl::StatusOr<bool> Settled();

  // Begins the sum over all ranks, in place. Every rank calls with the same count and type, in the
  // same order. Only when settled.
  absl::Status AllReduce(CUdeviceptr data, DataType dtype, std::size_t count, CUstream stream);

  // Memory that AllReduce works on faster; of AllocateMemory. If one rank registers, all do. Only
  // when settled. One piece at a time: deregistered before it is freed, or gone with the
  // communicator.
  absl::Status Register(CUdeviceptr address, std::size_t bytes);
  absl::Status Deregister();

  // Gives up whatever is in progress. Tells every communicator to stop before it frees any, for one
  // that is being freed waits for its kernels, which may wait for those of another. No thread is
  // inside NCCL with one of them.
  static void Abort(absl::Span<const std::unique_ptr<NcclCommunicator>> communicators);

  // Device memory with the properties that NCCL wants of registered memory.
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

}  // namespace gradsync

#endif  // DAEMON_ENGINE_NCCL_COMMUNICATOR_H_
