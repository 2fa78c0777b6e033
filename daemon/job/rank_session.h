// The identity of one session of a rank.

#ifndef DAEMON_JOB_RANK_SESSION_H_
#define DAEMON_JOB_RANK_SESSION_H_

#include <cstdint>

namespace gradsync::daemon {

// One session of a rank. A rank that joins again gets another incarnation, so that a late message
// of its old session does not count for the new one.
struct RankSession {
  std::uint32_t rank = 0;
  std::uint64_t incarnation = 0;  // unique in the daemon that coordinates the job

  bool operator==(const RankSession& other) const {
    return rank == other.rank && incarnation == other.incarnation;
  }
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_RANK_SESSION_H_
