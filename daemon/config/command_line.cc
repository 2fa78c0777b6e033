#include "daemon/config/command_line.h"

#include <functional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "daemon/config/option_value.h"

namespace gradsync::daemon {
namespace {

std::string UnknownFlag(std::string_view name) {
  std::vector<std::string_view> names = {"check", "config", "help", "version"};
  for (const OptionEntry& option : OptionTable()) names.push_back(option.name);
  const std::string nearest = NearestName(name, names);
  return absl::StrCat(
      "--", std::string(name), ": unknown flag",
      nearest.empty() ? "; --help lists all" : absl::StrCat("; did you mean --", nearest, "?"));
}

// Wraps text into lines of at most 80 columns, indented by 6 spaces.
std::string Wrapped(const std::string& text) {
  constexpr std::size_t kColumns = 80;
  std::string lines;
  std::string line = "     ";
  for (absl::string_view word : absl::StrSplit(text, ' ')) {
    if (line.size() + 1 + word.size() > kColumns) {
      absl::StrAppend(&lines, line, "\n");
      line = "     ";
    }
    absl::StrAppend(&line, " ", word);
  }
  return absl::StrCat(lines, line, "\n");
}

}  // namespace

CommandLine ReadCommandLine(int argc, const char* const* argv) {
  CommandLine result;
  std::set<std::string, std::less<>> seen;
  for (int i = 1; i < argc; ++i) {
    const auto fail = [&result, i](const std::string& what) {
      result.flags.faults.push_back({i, what});
    };
    const std::string_view argument = argv[i];
    if (argument.size() < 3 || argument.substr(0, 2) != "--") {
      fail(absl::StrCat(Quoted(argument), ": not a flag; flags are --NAME=VALUE"));
      continue;
    }
    const std::size_t equals = argument.find('=');
    const bool has_value = equals != std::string_view::npos;
    const std::string name(argument.substr(2, has_value ? equals - 2 : equals));
    const std::string value(has_value ? argument.substr(equals + 1) : "");
    const std::string flag = absl::StrCat("--", name);

    const OptionEntry* option = FindOption(name);
    const bool is_command = name == "check" || name == "help" || name == "version";
    if (option == nullptr && name != "config" && !is_command) {
      fail(UnknownFlag(name));
      continue;
    }
    if (!seen.insert(name).second) fail(absl::StrCat(flag, ": given twice"));
    if (is_command) {
      if (has_value) fail(absl::StrCat(flag, ": takes no value"));
    } else if (name == "config") {
      if (value.empty()) fail("--config: needs a file, --config=FILE");
      result.config = value;
    } else if (has_value) {
      result.flags.settings.push_back({i, option, value, flag});
    } else if (option->literal == OptionEntry::Literal::kBool) {
      result.flags.settings.push_back({i, option, "true", flag});
    } else {
      fail(absl::StrCat(flag, ": needs a value, such as ", flag, "=", option->example));
    }
  }
  return result;
}

std::string HelpText() {
  std::string text =
      R"(gradsyncd averages gradients of data-parallel training, outside the trainers.

Usage: gradsyncd [--check] [--config=FILE] [--NAME=VALUE]...
       gradsyncd --help | --version

  --config=FILE
      Reads options from FILE. Each line is NAME: VALUE, with strings in quotes
      and comments after #. The usual FILE is /etc/gradsync/gradsyncd.textproto;
      without this flag no file is read. Flags override the file:

        lease: "30s"              in FILE is the same as
        --lease=30s               on the command line

  --check
      Validates the options, the files that they name and the folders of sockets
      and log, as a start does before it listens. Starts nothing and changes
      nothing; a daemon may run meanwhile. Prints "configuration ok", or what is
      wrong and exits as a start does. Run it as the daemon's user, who must be
      able to read the files. It always checks the folder of the option socket.
      A start does not need it if the service manager passes the sockets.

gradsyncd lists all options that are unknown, given twice or out of range, and
exits. Exit codes: 0 stopped by a signal, 1 failed, 2 has bad options, 3 hung
while it stopped.
)";
  const Options defaults;
  std::string_view group;
  for (const OptionEntry& option : OptionTable()) {
    if (option.group != group) absl::StrAppend(&text, "\n", std::string(option.group), "\n");
    group = option.group;
    const std::string name(option.name);
    absl::StrAppend(&text, "\n  --", name, "=", std::string(option.placeholder), "\n");
    absl::StrAppend(&text, Wrapped(std::string(option.help)));
    absl::StrAppend(&text, Wrapped(absl::StrCat("Allowed: ", option.allowed, ".")));
    const std::string value = option.format(defaults);
    absl::StrAppend(&text, Wrapped(absl::StrCat("Default: ", value.empty() ? "(empty)" : value,
                                                ". Example: --", name, "=", option.example)));
  }
  return text;
}

}  // namespace gradsync::daemon
