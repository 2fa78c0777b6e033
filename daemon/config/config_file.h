// Reads the config file, gradsync.config.Config in text format, and collects all of its faults.

#ifndef DAEMON_CONFIG_CONFIG_FILE_H_
#define DAEMON_CONFIG_CONFIG_FILE_H_

#include <string>

#include "daemon/config/setting.h"

namespace gradsync::daemon {

// A file that cannot be read is a fault.
Settings ReadConfigFile(const std::string& path);

// Parses a file's text. `path` appears in the faults.
Settings ParseConfig(const std::string& path, const std::string& text);

}  // namespace gradsync::daemon

#endif  // DAEMON_CONFIG_CONFIG_FILE_H_
