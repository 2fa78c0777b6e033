#include "daemon/config/options.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/base/version.h"
#include "daemon/config/command_line.h"
#include "daemon/config/config_file.h"
#include "daemon/config/option_table.h"
#include "daemon/config/option_value.h"
#include "daemon/config/setting.h"
#include "daemon/peer/peer_address.h"
#include "proto/gradsync/limits.h"

namespace gradsync::daemon {
namespace {

std::string Message(std::string_view source, const absl::Status& status,
                    const OptionEntry& option) {
  return absl::StrCat(std::string(source), ": ", status.message(), "; allowed: ", option.allowed);
}

// Checks each setting by itself, so that a bad value is reported even if another one overrides it.
void Apply(Settings given, Options* options, std::vector<std::string>* faults) {
  for (const Setting& setting : given.settings) {
    Options parsed = *options;
    absl::Status status = setting.option->parse(setting.text, &parsed);
    if (status.ok()) status = setting.option->check(parsed);
    if (status.ok()) {
      *options = std::move(parsed);
    } else {
      given.faults.push_back({setting.place, Message(setting.source, status, *setting.option)});
    }
  }
  std::stable_sort(given.faults.begin(), given.faults.end(),
                   [](const Fault& a, const Fault& b) { return a.place < b.place; });
  for (Fault& fault : given.faults) faults->push_back(std::move(fault.message));
}

// Faults that concern two options.
std::vector<std::string> ContradictionsIn(const Options& options) {
  std::vector<std::string> faults;
  if (options.staging_bytes > options.quota_arena_bytes_per_user) {
    faults.push_back(absl::StrCat("staging_bytes: ", FormatBytes(options.staging_bytes),
                                  " exceeds quota_arena_bytes_per_user (",
                                  FormatBytes(options.quota_arena_bytes_per_user),
                                  "), so no session could open: lower the one or raise the other"));
  }
  if (options.engine_chunk_bytes > EngineSettings::kMaxLaneBytes / options.engine_lanes) {
    faults.push_back(absl::StrCat("engine_chunk_bytes: ", options.engine_lanes, " engine_lanes of ",
                                  FormatBytes(options.engine_chunk_bytes), " exceed ",
                                  FormatBytes(EngineSettings::kMaxLaneBytes),
                                  ": lower engine_chunk_bytes or engine_lanes"));
  }
  // A name may be any machine's address.
  const auto listen = ParsePeerAddress(options.peer_listen, kPeerPort);
  if (listen.ok() && !listen->IsLoopback() && options.peer_tls_certificate.empty() &&
      !options.peer_plain_text) {
    faults.push_back(absl::StrCat(
        "peer_listen: other machines reach ", options.peer_listen,
        ", and there is no TLS. Set peer_tls_certificate, peer_tls_key and peer_tls_ca "
        "(deploy/peer-keys makes them), or peer_plain_text if everyone on that network may "
        "join any user's jobs"));
  }
  return faults;
}

absl::Status Join(const std::vector<std::string>& faults) {
  if (faults.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrJoin(faults, "\n"));
}

}  // namespace

absl::Status Validate(const Options& options) {
  std::vector<std::string> faults = ContradictionsIn(options);
  for (const OptionEntry& option : OptionTable()) {
    const absl::Status status = option.check(options);
    if (!status.ok()) faults.push_back(Message(option.name, status, option));
  }
  return Join(faults);
}

absl::StatusOr<Options> LoadOptions(int argc, const char* const* argv) {
  const CommandLine command_line = ReadCommandLine(argc, argv);
  Options options;
  std::vector<std::string> faults;
  if (!command_line.config.empty()) {
    Apply(ReadConfigFile(command_line.config), &options, &faults);
  }
  Apply(command_line.flags, &options, &faults);
  if (faults.empty()) faults = ContradictionsIn(options);
  if (!faults.empty()) return Join(faults);
  return options;
}

std::optional<std::string> HelpOrVersion(int argc, const char* const* argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--help") return HelpText();
    if (argument == "--version") return absl::StrCat("gradsyncd ", kVersion, "\n");
  }
  return std::nullopt;
}

bool ChecksOnly(int argc, const char* const* argv) {
  return std::find(argv + 1, argv + argc, std::string_view("--check")) != argv + argc;
}

}  // namespace gradsync::daemon
