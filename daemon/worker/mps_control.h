// Runs MPS's control program, nvidia-cuda-mps-control. Only the daemon does so, never a worker.

#ifndef DAEMON_WORKER_MPS_CONTROL_H_
#define DAEMON_WORKER_MPS_CONTROL_H_

#include <sys/types.h>

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace gradsync::daemon {

struct MpsControlOptions {
  std::string program = "nvidia-cuda-mps-control";  // a path, or a name to find in PATH
  // For all commands of one call together. A program that takes longer is killed.
  absl::Duration limit = absl::Seconds(5);
};

// Removes the process `client` from MPS for good, with MPS's command "terminate_client". MPS's
// guide requires this before a busy client is killed. Calls `lives` just before. If that returns
// false, another process may have the same pid, and nothing is done. Blocks for at most `limit`.
//
// NOT_FOUND: there is no such program, or no MPS server has this client; DEADLINE_EXCEEDED;
// INTERNAL: the program failed.
absl::Status TerminateMpsClient(const MpsControlOptions& options, pid_t client,
                                const std::function<bool()>& lives);

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_MPS_CONTROL_H_
