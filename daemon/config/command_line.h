// Reads the command line, --NAME=VALUE, and collects all of its faults.

#ifndef DAEMON_CONFIG_COMMAND_LINE_H_
#define DAEMON_CONFIG_COMMAND_LINE_H_

#include <string>

#include "daemon/config/setting.h"

namespace gradsync::daemon {

struct CommandLine {
  std::string config;  // --config; empty: not given
  Settings flags;
};

// Skips argv[0], --check, --help and --version. `--name` alone means true for a bool.
CommandLine ReadCommandLine(int argc, const char* const* argv);

// What --help prints.
std::string HelpText();

}  // namespace gradsync::daemon

#endif  // DAEMON_CONFIG_COMMAND_LINE_H_
