// Reads the config file: text format of gradsync.config.Config, and every fault in it at once.

#ifndef DAEMON_CONFIG_CONFIG_FILE_H_
#define DAEMON_CONFIG_CONFIG_FILE_H_

#include <string>

#include "daemon/config/setting.h"

namespace gradsync {

// A file that cannot be read is a fault too.
Settings ReadConfigFile(const std::string& path);

// `path` is for messages.
Settings ParseConfig(const std::string& path, const std::string& text);

}  // namespace gradsync

#endif  // DAEMON_CONFIG_CONFIG_FILE_H_
