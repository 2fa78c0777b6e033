// The facts about a job that its layouts and operations need.

#ifndef DAEMON_JOB_JOB_TERMS_H_
#define DAEMON_JOB_JOB_TERMS_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "daemon/arena/arena_quota.h"
#include "daemon/base/tenant.h"
#include "daemon/job/done_word_turns.h"
#include "daemon/job/job_options.h"

namespace gradsync::daemon {

// Constant. The job owns the terms, and outlives every reference to them.
struct JobTerms {
  std::string job_id;
  // The job's share of the reduce threads (ReduceOperation).
  Tenant user;
  std::uint64_t flow = 0;
  JobOptions options;
  MemoryAccount account;                             // charged for what the job keeps
  std::size_t signalled_at_once = kSignalledAtOnce;  // done words of a void step or a LeaveDone
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_JOB_TERMS_H_
