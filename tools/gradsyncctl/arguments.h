// gradsyncctl's command line.

#ifndef TOOLS_GRADSYNCCTL_ARGUMENTS_H_
#define TOOLS_GRADSYNCCTL_ARGUMENTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace gradsync {

enum class CtlCommand { kNone, kStatus, kStats, kTimeline, kHealth, kDoctor };

struct CtlArguments {
  CtlCommand command = CtlCommand::kNone;  // kNone only with help or version
  bool help = false;
  bool version = false;
  bool json = false;
  bool all = false;  // the whole answer instead of the worst of it
  std::string socket;
  std::string job;          // empty: all jobs; for a timeline the only one
  std::string layout;       // empty: the only one
  std::uint32_t steps = 1;  // of a timeline: the last ones
  std::uint64_t step = 0;   // of a timeline: this one; 0: the last `steps`
  absl::Duration timeout = absl::Seconds(5);
};

// `arguments` without the program's name. `socket_variable` is GRADSYNC_SOCKET's value, null if
// unset. Options may stand before or after the command, as "--option value" or "--option=value".
// INVALID_ARGUMENT says what is wrong and what would be right.
absl::StatusOr<CtlArguments> ParseArguments(const std::vector<std::string>& arguments,
                                            const char* socket_variable);

}  // namespace gradsync

#endif  // TOOLS_GRADSYNCCTL_ARGUMENTS_H_
