// Where a trainer is in its data.

#ifndef DAEMON_JOB_POSITION_H_
#define DAEMON_JOB_POSITION_H_

#include <cstdint>

namespace gradsync::daemon {

struct Position {
  std::uint64_t epoch = 0;
  std::uint64_t batch = 0;

  bool operator==(const Position& other) const {
    return epoch == other.epoch && batch == other.batch;
  }
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_POSITION_H_
