// Writes GPUs and workers for GetStatus.

#ifndef DAEMON_RPC_CUDA_STATUS_H_
#define DAEMON_RPC_CUDA_STATUS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/worker/worker_supervisor.h"
#include "gradsync/v1/introspection.pb.h"

namespace gradsync::daemon {

// Writes driver, NCCL and GPUs; WorkerStatusOf() writes the workers themselves. `found` is
// WorkerSupervisor::Found(). `workers` add what `found` lacks: free memory, a driver that was
// installed later, and MIG instances that a process sees only if its environment names them.
v1::CudaStatus CudaStatusOf(const absl::StatusOr<worker::Started>& found,
                            const std::vector<WorkerStatus>& workers);

// Warns of each GPU on which the rank's process and the daemon's worker differ: one uses it through
// MPS, and the other does not.
std::vector<std::string> MpsWarnings(const std::string& job_id, const v1::SessionStatus& rank,
                                     const v1::CudaStatus& cuda);

// Writes one worker.
v1::WorkerStatus WorkerStatusOf(const WorkerStatus& worker);

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_CUDA_STATUS_H_
