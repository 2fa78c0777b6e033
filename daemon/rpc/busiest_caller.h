// Chooses the call that makes room for another one.

#ifndef DAEMON_RPC_BUSIEST_CALLER_H_
#define DAEMON_RPC_BUSIEST_CALLER_H_

#include <sys/types.h>

#include <cstddef>
#include <map>
#include <vector>

namespace gradsync::daemon {

// `callers`: the process of each call, at least one call, the oldest first. Returns the place of
// the oldest call of the process with the most calls. If several have as many, it is the one whose
// first call is the oldest.
inline std::size_t OldestOfBusiest(const std::vector<pid_t>& callers) {
  struct Calls {
    std::size_t first = 0;
    std::size_t count = 0;
  };
  std::map<pid_t, Calls> by_caller;
  for (std::size_t i = 0; i < callers.size(); ++i) {
    Calls& calls = by_caller[callers[i]];
    if (calls.count++ == 0) calls.first = i;
  }
  Calls busiest;
  for (const auto& [caller, calls] : by_caller) {
    if (calls.count > busiest.count ||
        (calls.count == busiest.count && calls.first < busiest.first)) {
      busiest = calls;
    }
  }
  return busiest.first;
}

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_BUSIEST_CALLER_H_
