// What the config file and the command line are both read into, before any value is understood.

#ifndef DAEMON_CONFIG_SETTING_H_
#define DAEMON_CONFIG_SETTING_H_

#include <string>
#include <vector>

#include "daemon/config/option_table.h"

namespace gradsync {

// One option given in one place.
struct Setting {
  int place;  // line of the file or index of the argument; faults are told in this order
  const OptionEntry* option;
  std::string text;    // as a flag would give it
  std::string source;  // "FILE:LINE: lease" or "--lease", for messages
};

struct Fault {
  int place;
  std::string message;  // with its source
};

struct Settings {
  std::vector<Setting> settings;
  std::vector<Fault> faults;
};

}  // namespace gradsync

#endif  // DAEMON_CONFIG_SETTING_H_
