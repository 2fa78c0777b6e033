// The facts about a job that its layouts and operations need.

#ifndef DAEMON_JOB_JOB_TERMS_H_
#define DAEMON_JOB_JOB_TERMS_H_

#include <cstdint>
#include <string>

#include "daemon/job/job_options.h"

namespace gradsync::daemon {

// Constant. Owned by the job, which outlives every reference to it.
struct JobTerms {
  std::string job_id;
  std::uint64_t flow = 0;  // the job's share of the reduce threads (ReduceOperation::flow)
  JobOptions options;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_JOB_TERMS_H_
