// The options that all ranks of a job must agree on when they join.

#ifndef DAEMON_JOB_JOB_OPTIONS_H_
#define DAEMON_JOB_JOB_OPTIONS_H_

#include <cstdint>
#include <string>

#include "proto/gradsync/nccl_settings.h"

namespace gradsync::daemon {

struct JobOptions {
  bool divide_by_world = false;  // averages divide by the world size, not by the live ranks
  std::uint64_t step_timeout_ns = 0;
  NcclSettings nccl;
};

// The first option that differs: "divisor is world, but the ranks that joined before have
// live_ranks". Empty if the options are the same.
std::string FirstDifference(const JobOptions& before, const JobOptions& given);

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_JOB_OPTIONS_H_
