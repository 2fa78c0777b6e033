// MPS's control program, nvidia-cuda-mps-control, as the daemon asks it. Workers never do.

#ifndef DAEMON_WORKER_MPS_CONTROL_H_
#define DAEMON_WORKER_MPS_CONTROL_H_

#include <sys/types.h>

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace gradsync {

struct MpsControlOptions {
  std::string program = "nvidia-cuda-mps-control";  // a path, or a name that PATH has
  // For all that is asked at a time; a program that takes longer is killed.
  absl::Duration limit = absl::Seconds(5);
};

// Ends what the process `client` does on GPUs that it shares through MPS, for good: MPS's
// "terminate_client", which its guide wants before a busy client is killed. `lives` is asked just
// before that: if it says no, the number may be another process's by now, and nothing is done.
// Blocks for the limit at most.
//
// NOT_FOUND: there is no such program, or no server of MPS has this client; DEADLINE_EXCEEDED;
// INTERNAL: the program failed.
absl::Status TerminateMpsClient(const MpsControlOptions& options, pid_t client,
                                const std::function<bool()>& lives);

}  // namespace gradsync

#endif  // DAEMON_WORKER_MPS_CONTROL_H_
