// The average of a reduced bucket on its way to a session that came after a loss.

#ifndef DAEMON_JOB_AVERAGE_COPY_H_
#define DAEMON_JOB_AVERAGE_COPY_H_

#include <cstddef>
#include <cstdint>

#include "daemon/job/rank_session.h"
#include "daemon/reduce/reducer.h"

namespace gradsync::daemon {

// First an executor copies the average from the memory of another session. Then a reducer measures
// the copy, as it measured the average when it wrote it. If the two measurements differ, a trainer
// has changed the average. Integers, minima and maxima are not measured, so they are not checked.
//
// Externally synchronized: guarded by the job's lock, except for `check` while it is submitted. The
// layout owns it until the step is decided, and no step is decided before its copies are done.
//
//   kCopying --Copied--> kMeasuring --Copied--> kDone
//   kCopying --Copied--> kDone: not measured, or the step is void
struct AverageCopy {
  enum class State : std::uint8_t { kCopying, kMeasuring, kDone };
  State state = State::kCopying;
  std::size_t bucket = 0;
  RankSession to;
  RankSession from;
  ReduceOperation check;  // measures the copy, and changes nothing
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_AVERAGE_COPY_H_
