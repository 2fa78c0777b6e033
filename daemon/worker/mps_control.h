// Calls MPS's control program, nvidia-cuda-mps-control. For the daemon; workers never call it.

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

// Ends the process `client` as a client of MPS, for good, with MPS's "terminate_client". MPS's
// guide requires this before a busy client is killed. Calls `lives` just before: if it returns
// false, another process may have the same pid, and nothing is done. Blocks for `limit` at most.
//
// NOT_FOUND: there is no such program, or no MPS server has this client; DEADLINE_EXCEEDED;
// INTERNAL: the program failed.
absl::Status TerminateMpsClient(const MpsControlOptions& options, pid_t client,
                                const std::function<bool()>& lives);

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_MPS_CONTROL_H_
