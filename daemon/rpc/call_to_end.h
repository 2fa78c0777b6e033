// Chooses the call that makes room for a new one.

#ifndef DAEMON_RPC_CALL_TO_END_H_
#define DAEMON_RPC_CALL_TO_END_H_

#include <sys/types.h>

#include <cstddef>
#include <map>
#include <optional>
#include <vector>

namespace gradsync::daemon {

struct OpenCall {
  pid_t process = 0;
  bool answer_is_due = false;  // its client waits for the daemon, not the daemon for its client
};

// `open`: the open calls, as many as are allowed; the oldest first. `process` makes the new call.
// Returns the place in `open` of the call to end; nullopt: refuse the new one.
//
// The process with the most calls loses one: its oldest call that waits for its client. If all of
// its calls wait for the daemon, it loses the oldest one if `process` has fewer calls, the new one
// included. Otherwise the new call is refused.
inline std::optional<std::size_t> CallToEnd(const std::vector<OpenCall>& open, pid_t process) {
  std::map<pid_t, std::size_t> count;
  for (const OpenCall& call : open) ++count[call.process];
  pid_t busiest = 0;
  std::size_t most = 0;
  for (const OpenCall& call : open) {  // the oldest one of several with as many
    if (count[call.process] > most) {
      most = count[call.process];
      busiest = call.process;
    }
  }
  std::optional<std::size_t> oldest;
  for (std::size_t i = 0; i < open.size(); ++i) {
    if (open[i].process != busiest) continue;
    if (!open[i].answer_is_due) return i;
    if (!oldest.has_value()) oldest = i;
  }
  return most > count[process] + 1 ? oldest : std::nullopt;
}

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_CALL_TO_END_H_
