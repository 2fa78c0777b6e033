// The common form of the config file and the command line, before values are parsed.

#ifndef DAEMON_CONFIG_SETTING_H_
#define DAEMON_CONFIG_SETTING_H_

#include <string>
#include <vector>

#include "daemon/config/option_table.h"

namespace gradsync::daemon {

// One option given in one place.
struct Setting {
  int place;  // line of the file or index of the argument; faults are sorted by it
  const OptionEntry* option;
  std::string text;    // the value, as in a flag
  std::string source;  // "FILE:LINE: lease" or "--lease", for error messages
};

// Something wrong in one place.
struct Fault {
  int place;            // as Setting's
  std::string message;  // begins with its source
};

struct Settings {
  std::vector<Setting> settings;
  std::vector<Fault> faults;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_CONFIG_SETTING_H_
