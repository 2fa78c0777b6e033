// SessionOptions from what is given and the variables that torchrun and similar launchers set.

#include <cstdint>
#include <cstdlib>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/include/gradsync/client.h"
#include "client/src/error.h"
#include "client/src/session_options.h"

namespace gradsync {
namespace {

absl::string_view Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? absl::string_view() : absl::string_view(value);
}

// `option`: what wins over the variable `name`.
absl::Status Fault(const char* name, const char* option, absl::string_view what) {
  return client::MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed,
                           absl::StrCat("environment variable ", name, " ", what,
                                        "; correct it, or give the option ", option));
}

absl::Status Required(const char* name, const char* option, absl::string_view* value) {
  *value = Variable(name);
  if (!value->empty()) return absl::OkStatus();
  return client::MakeError(
      absl::StatusCode::kInvalidArgument, reason::kMalformed,
      absl::StrCat("environment variable ", name, " is not set, and the option ", option,
                   " is not given; a launcher sets the variable: start the ranks with \"python -m "
                   "gradsync.run --nproc-per-node 2 TRAINER\" or \"torchrun --nproc_per_node=2 "
                   "TRAINER\", each with --no-python before a TRAINER that is not Python; or give "
                   "the option on every rank"));
}

absl::Status RequiredNumber(const char* name, const char* option, std::uint32_t* number) {
  absl::string_view text;
  if (auto status = Required(name, option, &text); !status.ok()) return status;
  if (absl::SimpleAtoi(text, number)) return absl::OkStatus();
  return Fault(name, option, absl::StrCat("is '", text, "', not a number"));
}

absl::Status ReadRank(const GivenOptions& given, SessionOptions* options) {
  if (given.rank.has_value()) {
    options->rank = *given.rank;
  } else if (auto status = RequiredNumber("RANK", "rank", &options->rank); !status.ok()) {
    return status;
  }
  if (given.world_size.has_value()) {
    options->world_size = *given.world_size;
  } else {
    auto status = RequiredNumber("WORLD_SIZE", "world_size", &options->world_size);
    if (!status.ok()) return status;
    if (options->world_size == 0) return Fault("WORLD_SIZE", "world_size", "is 0");
  }
  // ValidateOptions checks what is given.
  if (given.rank.has_value() || given.world_size == 0u) return absl::OkStatus();
  if (options->rank < options->world_size) return absl::OkStatus();
  return Fault("RANK", "rank",
               absl::StrCat("is ", options->rank, ", but ",
                            given.world_size.has_value() ? "world_size" : "WORLD_SIZE", " is ",
                            options->world_size));
}

// The run id alone is often "none", torchrun's default. The address distinguishes the jobs of a
// cluster.
absl::Status ReadJobId(std::string* job_id) {
  absl::string_view run_id = Variable("TORCHELASTIC_RUN_ID");
  if (run_id.empty()) run_id = "none";
  absl::string_view address;
  if (auto status = Required("MASTER_ADDR", "job_id", &address); !status.ok()) return status;
  std::uint32_t port = 0;
  if (auto status = RequiredNumber("MASTER_PORT", "job_id", &port); !status.ok()) return status;
  if (port == 0 || port > 65535) return Fault("MASTER_PORT", "job_id", absl::StrCat("is ", port));
  *job_id = absl::StrCat(run_id, "@", address, ":", port);
  return absl::OkStatus();
}

// Empty: every rank is on this node.
std::string Coordinator(std::uint32_t world_size) {
  const absl::string_view coordinator = Variable("GRADSYNC_COORDINATOR");
  if (!coordinator.empty()) return std::string(coordinator);
  // One launcher has started every rank, so all are on this node, whatever MASTER_ADDR is. torchrun
  // --standalone sets it to the host's name, at which the daemon may not listen.
  const bool here = Variable("LOCAL_WORLD_SIZE") == absl::StrCat(world_size);
  return here ? std::string() : std::string(Variable("MASTER_ADDR"));
}

}  // namespace

absl::StatusOr<SessionOptions> SessionOptions::FromEnvironment(const GivenOptions& given) {
  SessionOptions options;
  if (auto status = ReadRank(given, &options); !status.ok()) return status;
  if (given.job_id.has_value()) {
    options.job_id = *given.job_id;
  } else if (auto status = ReadJobId(&options.job_id); !status.ok()) {
    return status;
  }
  options.coordinator =
      given.coordinator.has_value() ? *given.coordinator : Coordinator(options.world_size);
  options.token = given.token.value_or(std::string(Variable("GRADSYNC_JOB_TOKEN")));
  if (given.socket.has_value()) {
    options.socket = *given.socket;
  } else if (const auto socket = Variable("GRADSYNC_SOCKET"); !socket.empty()) {
    options.socket = std::string(socket);
  }
  if (auto status = client::ValidateOptions(options); !status.ok()) return status;
  return options;
}

}  // namespace gradsync
