// GPUs and workers, as status tells of them.

#ifndef DAEMON_RPC_CUDA_STATUS_H_
#define DAEMON_RPC_CUDA_STATUS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/worker/worker_supervisor.h"
#include "gradsync/v1/introspection.pb.h"

namespace gradsync {

// Driver, NCCL and GPUs, without workers. `found`: what WorkerSupervisor::Found says. The workers
// know how much memory is free, and MIG instances that a process sees only if it is told to.
v1::CudaStatus CudaStatusOf(const absl::StatusOr<worker::Started>& found,
                            const std::vector<WorkerStatus>& workers);

// Of each GPU that the rank's process shares through MPS and the daemon's worker does not, or the
// other way round.
std::vector<std::string> MpsWarnings(const std::string& job_id, const v1::SessionStatus& rank,
                                     const v1::CudaStatus& cuda);

v1::WorkerStatus WorkerStatusOf(const WorkerStatus& worker);

}  // namespace gradsync

#endif  // DAEMON_RPC_CUDA_STATUS_H_
