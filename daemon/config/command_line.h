// Reads the command line: --NAME=VALUE, and every fault in it at once.

#ifndef DAEMON_CONFIG_COMMAND_LINE_H_
#define DAEMON_CONFIG_COMMAND_LINE_H_

#include <string>

#include "daemon/config/setting.h"

namespace gradsync {

struct CommandLine {
  std::string config;  // empty: no --config
  Settings flags;
};

// argv[0] is skipped. `--name` alone means true for a bool. --help and --version are skipped too.
CommandLine ReadCommandLine(int argc, const char* const* argv);

// What --help prints.
std::string HelpText();

}  // namespace gradsync

#endif  // DAEMON_CONFIG_COMMAND_LINE_H_
