#include "tools/gradsyncctl/arguments.h"

#include <cstddef>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "proto/gradsync/limits.h"

namespace gradsync {
namespace {

constexpr char kDefaultSocket[] = "/run/gradsync/gradsyncd.sock";
constexpr double kMaxTimeoutSeconds = 3600.0;

absl::StatusOr<CtlCommand> ParseCommand(absl::string_view word) {
  if (word == "status") return CtlCommand::kStatus;
  if (word == "stats") return CtlCommand::kStats;
  if (word == "timeline") return CtlCommand::kTimeline;
  if (word == "health") return CtlCommand::kHealth;
  if (word == "doctor") return CtlCommand::kDoctor;
  return absl::InvalidArgumentError(absl::StrCat(
      "unknown command '", word, "'; the commands are status, stats, timeline, health and doctor"));
}

absl::Status SetOption(absl::string_view name, const std::string& value, CtlArguments* arguments) {
  if (value.empty()) return absl::InvalidArgumentError(absl::StrCat(name, " has an empty value"));
  if (name == "--socket") {
    arguments->socket = value;
  } else if (name == "--job") {
    arguments->job = value;
  } else if (name == "--layout") {
    arguments->layout = value;
  } else if (name == "--steps") {
    if (!absl::SimpleAtoi(value, &arguments->steps) || arguments->steps < 1 ||
        arguments->steps > kMaxTimelineSteps) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--steps '", value, "' is not a whole number from 1 to ", kMaxTimelineSteps));
    }
  } else if (name == "--step") {
    if (!absl::SimpleAtoi(value, &arguments->step) || arguments->step < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("--step '", value, "' is not a whole number from 1"));
    }
  } else {  // --timeout
    double seconds = 0.0;
    // Written so that NaN fails.
    if (!absl::SimpleAtod(value, &seconds) || !(seconds > 0.0 && seconds <= kMaxTimeoutSeconds)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--timeout '", value, "' is not a number of seconds above 0 and up to 3600"));
    }
    arguments->timeout = absl::Seconds(seconds);
  }
  return absl::OkStatus();
}

bool TakesValue(absl::string_view name) {
  return name == "--socket" || name == "--job" || name == "--layout" || name == "--steps" ||
         name == "--step" || name == "--timeout";
}

// One word without a value; false if it is no such word.
bool SetSwitch(absl::string_view word, CtlArguments* arguments) {
  if (word == "--json") {
    arguments->json = true;
  } else if (word == "--all") {
    arguments->all = true;
  } else if (word == "--help" || word == "-h" || word == "help") {
    arguments->help = true;
  } else if (word == "--version") {
    arguments->version = true;
  } else {
    return false;
  }
  return true;
}

// INVALID_ARGUMENT names an option that the command does not take, or a word that it lacks.
absl::Status CheckCommand(const CtlArguments& arguments, bool steps_given) {
  const bool step_given = arguments.step != 0;
  if (arguments.help || arguments.version) return absl::OkStatus();
  if (arguments.command == CtlCommand::kNone) {
    return absl::InvalidArgumentError(
        "no command; the commands are status, stats, timeline, health and doctor");
  }
  if (arguments.command != CtlCommand::kTimeline &&
      (steps_given || step_given || !arguments.layout.empty())) {
    return absl::InvalidArgumentError(absl::StrCat(steps_given  ? "--steps"
                                                   : step_given ? "--step"
                                                                : "--layout",
                                                   " goes with the command timeline only"));
  }
  if (steps_given && step_given) {
    return absl::InvalidArgumentError("--step and --steps do not go together");
  }
  if (arguments.command == CtlCommand::kHealth && !arguments.job.empty()) {
    return absl::InvalidArgumentError("--job does not go with health, which asks about the daemon");
  }
  if (arguments.command == CtlCommand::kDoctor && !arguments.job.empty()) {
    return absl::InvalidArgumentError("--job does not go with doctor, which looks at the machine");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<CtlArguments> ParseArguments(const std::vector<std::string>& arguments,
                                            const char* socket_variable) {
  CtlArguments result;
  const bool from_environment = socket_variable != nullptr && *socket_variable != '\0';
  result.socket = from_environment ? socket_variable : kDefaultSocket;
  bool steps_given = false;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const absl::string_view word = arguments[i];
    if (SetSwitch(word, &result)) continue;
    if (!absl::StartsWith(word, "-")) {
      if (result.command != CtlCommand::kNone) {
        return absl::InvalidArgumentError(absl::StrCat(
            "'", word, "' is one word too many: one command is expected, and options with '--'"));
      }
      absl::StatusOr<CtlCommand> command = ParseCommand(word);
      if (!command.ok()) return std::move(command).status();
      result.command = *command;
      continue;
    }
    const std::size_t equals = word.find('=');
    const absl::string_view name = word.substr(0, equals);
    if (!TakesValue(name)) {
      return absl::InvalidArgumentError(
          equals != absl::string_view::npos &&
                  (name == "--json" || name == "--all" || name == "--help")
              ? absl::StrCat(name, " takes no value")
              : absl::StrCat("unknown option '", name,
                             "'; the options are --socket, --job, --layout, --steps, --step, "
                             "--timeout, --all, --json, --help and --version"));
    }
    std::string value;
    if (equals != absl::string_view::npos) {
      value = std::string(word.substr(equals + 1));
    } else if (i + 1 < arguments.size()) {
      value = arguments[++i];
    } else {
      return absl::InvalidArgumentError(absl::StrCat(name, " needs a value after it"));
    }
    if (absl::Status status = SetOption(name, value, &result); !status.ok()) return status;
    steps_given = steps_given || name == "--steps";
  }
  if (absl::Status status = CheckCommand(result, steps_given); !status.ok()) return status;
  return result;
}

}  // namespace gradsync
