// The table of options: each has a name, a help text, limits, and functions that read and write its
// value. The flags, the config file, --help and Validate() all use this table.

#ifndef DAEMON_CONFIG_OPTION_TABLE_H_
#define DAEMON_CONFIG_OPTION_TABLE_H_

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "daemon/config/options.h"

namespace gradsync::daemon {

struct OptionEntry {
  // Form of the value in a config file.
  enum class Literal { kString, kInteger, kBool };

  std::string_view name;         // of the flag and of the field
  std::string_view group;        // heading in --help
  std::string_view placeholder;  // stands for the value in --help
  std::string_view help;
  std::string allowed;  // the values that check() accepts, in words
  std::string example;
  Literal literal = Literal::kString;

  // Reads a flag's value. INVALID_ARGUMENT describes a fault of its form.
  std::function<absl::Status(std::string_view text, Options* options)> parse;
  // INVALID_ARGUMENT describes why the value is not allowed.
  std::function<absl::Status(const Options& options)> check;
  // Writes the value as in a flag.
  std::function<std::string(const Options& options)> format;
};

// All options, in the order of options.h.
const std::vector<OptionEntry>& OptionTable();

// Finds an option by its name, or returns null.
const OptionEntry* FindOption(std::string_view name);

// Returns the name that `unknown` probably misspells, or "" if none is similar.
std::string NearestName(std::string_view unknown, const std::vector<std::string_view>& names);

// Writes a flag's value as in a config file: a string is quoted.
std::string ToLiteral(const OptionEntry& option, std::string_view text);

}  // namespace gradsync::daemon

#endif  // DAEMON_CONFIG_OPTION_TABLE_H_
