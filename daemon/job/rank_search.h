// Whether a job still waits for some rank. A job may have 65,536 ranks.

#ifndef DAEMON_JOB_RANK_SEARCH_H_
#define DAEMON_JOB_RANK_SEARCH_H_

#include <cstdint>

#include "absl/functional/function_ref.h"

namespace gradsync::daemon {

// Asks the same question again after each message of a rank. Each search begins at the rank that
// the last one found. So all searches together look at each rank about twice until no rank waits,
// whatever the order of the messages. It is more if a rank that has stopped waiting waits again.
//
// Externally synchronized: guarded by the job's lock.
class RankSearch {
 public:
  // True if `waits` is true for one of the ranks 0 to `ranks` - 1. `ranks` is always the same.
  bool Any(std::uint32_t ranks, absl::FunctionRef<bool(std::uint32_t rank)> waits) {
    for (std::uint32_t looks = 0; looks < ranks; ++looks) {
      if (waits(found_)) return true;
      found_ = found_ + 1 == ranks ? 0 : found_ + 1;
    }
    return false;
  }

 private:
  std::uint32_t found_ = 0;  // by the last search
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_RANK_SEARCH_H_
