// gradsyncctl from its arguments to its exit status.

#ifndef TOOLS_GRADSYNCCTL_RUN_COMMAND_H_
#define TOOLS_GRADSYNCCTL_RUN_COMMAND_H_

#include <ostream>
#include <string>
#include <vector>

namespace gradsync {

// `arguments` without the program's name; `socket_variable` is GRADSYNC_SOCKET's value or null.
// Answers go to `out`, faults to `error`. Returns the exit status: 0 OK, 1 WARN, 2 ERR.
int RunCommand(const std::vector<std::string>& arguments, const char* socket_variable,
               std::ostream& out, std::ostream& error);

}  // namespace gradsync

#endif  // TOOLS_GRADSYNCCTL_RUN_COMMAND_H_
