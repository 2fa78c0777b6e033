// Every option once: its name, help, limits, and how its value is read and written. The flags, the
// config file, --help and Validate() are all made from this table.

#ifndef DAEMON_CONFIG_OPTION_TABLE_H_
#define DAEMON_CONFIG_OPTION_TABLE_H_

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "daemon/config/options.h"

namespace gradsync {

struct OptionEntry {
  // What its value looks like in a config file.
  enum class Literal { kString, kInteger, kBool };

  std::string_view name;   // of the flag and of the field
  std::string_view group;  // heading in --help
  std::string_view placeholder;
  std::string_view help;
  std::string allowed;
  std::string example;
  Literal literal = Literal::kString;

  // Reads a value as it stands in a flag. INVALID_ARGUMENT says what is wrong with the form alone.
  std::function<absl::Status(std::string_view text, Options* options)> parse;
  // INVALID_ARGUMENT says why the value is not allowed.
  std::function<absl::Status(const Options& options)> check;
  // The value as a flag would give it.
  std::function<std::string(const Options& options)> format;
};

// In the order of options.h.
const std::vector<OptionEntry>& OptionTable();

// Null if there is no such option.
const OptionEntry* FindOption(std::string_view name);

// The name that `unknown` is probably a misspelling of; empty if none is near.
std::string NearestName(std::string_view unknown, const std::vector<std::string_view>& names);

// The value as it stands in a config file: text, quoted if the field is a string.
std::string ToLiteral(const OptionEntry& option, std::string_view text);

}  // namespace gradsync

#endif  // DAEMON_CONFIG_OPTION_TABLE_H_
