#include "client/examples/command_line.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"

namespace gradsync::examples {

CommandLine::CommandLine(absl::string_view introduction) : introduction_(introduction) {}

void CommandLine::Text(absl::string_view name, absl::string_view placeholder,
                       absl::string_view help, std::string* value) {
  flags_.push_back({std::string(name), std::string(placeholder), std::string(help),
                    [value](absl::string_view text) {
                      *value = std::string(text);
                      return absl::OkStatus();
                    }});
}

void CommandLine::Number(absl::string_view name, absl::string_view help, std::uint64_t least,
                         std::uint64_t most, std::uint64_t* value) {
  const std::string range = absl::StrCat(least, " to ", most);
  flags_.push_back({std::string(name), "N", absl::StrCat(help, " Default: ", *value, "."),
                    [name = std::string(name), range, least, most, value](absl::string_view text) {
                      std::uint64_t number = 0;
                      if (!absl::SimpleAtoi(text, &number) || number < least || number > most) {
                        return absl::InvalidArgumentError(absl::StrCat(
                            "--", name, " takes a number from ", range, ", not '", text, "'"));
                      }
                      *value = number;
                      return absl::OkStatus();
                    }});
}

void CommandLine::Choice(absl::string_view name, std::vector<std::string> choices,
                         absl::string_view help, std::string* value) {
  const std::string placeholder = absl::StrJoin(choices, "|");
  flags_.push_back(
      {std::string(name), placeholder, std::string(help),
       [name = std::string(name), choices = std::move(choices), value](absl::string_view text) {
         if (std::find(choices.begin(), choices.end(), text) == choices.end()) {
           return absl::InvalidArgumentError(absl::StrCat(
               "--", name, " takes ", absl::StrJoin(choices, " or "), ", not '", text, "'"));
         }
         *value = std::string(text);
         return absl::OkStatus();
       }});
}

void CommandLine::Switch(absl::string_view name, absl::string_view help, bool* value) {
  flags_.push_back({std::string(name), "", std::string(help), [value](absl::string_view) {
                      *value = true;
                      return absl::OkStatus();
                    }});
}

absl::StatusOr<bool> CommandLine::Parse(int argc, char** argv) const {
  for (int i = 1; i < argc; ++i) {
    const absl::string_view argument = argv[i];
    if (argument == "--help" || argument == "-h") return false;
    if (!absl::StartsWith(argument, "--")) {
      return absl::InvalidArgumentError(absl::StrCat("unexpected argument '", argument, "'"));
    }
    const std::size_t equals = argument.find('=');
    const absl::string_view name = argument.substr(2, equals - 2);
    const auto flag = std::find_if(flags_.begin(), flags_.end(),
                                   [&](const Flag& flag) { return flag.name == name; });
    if (flag == flags_.end()) {
      return absl::InvalidArgumentError(absl::StrCat("unknown flag --", name));
    }
    absl::string_view value;
    if (flag->placeholder.empty()) {
      if (equals != absl::string_view::npos) {
        return absl::InvalidArgumentError(absl::StrCat("--", name, " takes no value"));
      }
    } else if (equals != absl::string_view::npos) {
      value = argument.substr(equals + 1);
    } else if (++i < argc) {
      value = argv[i];
    } else {
      return absl::InvalidArgumentError(
          absl::StrCat("--", name, " needs a value: --", name, " ", flag->placeholder));
    }
    if (absl::Status status = flag->set(value); !status.ok()) return status;
  }
  return true;
}

std::string CommandLine::Help() const {
  std::string help = absl::StrCat(introduction_, "\nFlags:\n");
  for (const Flag& flag : flags_) {
    absl::StrAppend(&help, "  --", flag.name, flag.placeholder.empty() ? "" : " ", flag.placeholder,
                    "\n      ", absl::StrReplaceAll(flag.help, {{"\n", "\n      "}}), "\n");
  }
  absl::StrAppend(&help, "  --help\n      Prints this.\n");
  return help;
}

}  // namespace gradsync::examples
