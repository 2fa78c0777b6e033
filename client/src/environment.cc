// SessionOptions from the variables that torchrun and similar launchers set.

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

absl::Status Fault(const char* name, absl::string_view what) {
  return client::MakeError(
      absl::StatusCode::kInvalidArgument, reason::kMalformed,
      absl::StrCat("environment variable ", name, " ", what,
                   "; start the trainer with torchrun or set it, the same way on every rank"));
}

absl::Status Required(const char* name, absl::string_view* value) {
  *value = Variable(name);
  return value->empty() ? Fault(name, "is not set") : absl::OkStatus();
}

absl::Status RequiredNumber(const char* name, std::uint32_t* number) {
  absl::string_view text;
  if (auto status = Required(name, &text); !status.ok()) return status;
  if (absl::SimpleAtoi(text, number)) return absl::OkStatus();
  return Fault(name, absl::StrCat("is '", text, "', not a number"));
}

}  // namespace

absl::StatusOr<SessionOptions> SessionOptions::FromEnvironment() {
  SessionOptions options;
  if (auto status = RequiredNumber("RANK", &options.rank); !status.ok()) return status;
  if (auto status = RequiredNumber("WORLD_SIZE", &options.world_size); !status.ok()) return status;
  if (options.world_size == 0) return Fault("WORLD_SIZE", "is 0");
  if (options.rank >= options.world_size) {
    return Fault("RANK",
                 absl::StrCat("is ", options.rank, ", but WORLD_SIZE is ", options.world_size));
  }
  // The run id alone is often "none", torchrun's default. The address distinguishes the jobs of a
  // cluster.
  absl::string_view run_id = Variable("TORCHELASTIC_RUN_ID");
  if (run_id.empty()) run_id = "none";
  absl::string_view address;
  if (auto status = Required("MASTER_ADDR", &address); !status.ok()) return status;
  std::uint32_t port = 0;
  if (auto status = RequiredNumber("MASTER_PORT", &port); !status.ok()) return status;
  if (port == 0 || port > 65535) return Fault("MASTER_PORT", absl::StrCat("is ", port));
  options.job_id = absl::StrCat(run_id, "@", address, ":", port);
  const absl::string_view coordinator = Variable("GRADSYNC_COORDINATOR");
  // One launcher has started every rank, so all are on this node, whatever MASTER_ADDR is. torchrun
  // --standalone sets it to the host's name, at which the daemon may not listen.
  const bool here = Variable("LOCAL_WORLD_SIZE") == Variable("WORLD_SIZE");
  if (!coordinator.empty()) {
    options.coordinator = std::string(coordinator);
  } else if (!here) {
    options.coordinator = std::string(address);
  }
  options.token = std::string(Variable("GRADSYNC_JOB_TOKEN"));
  if (const auto socket = Variable("GRADSYNC_SOCKET"); !socket.empty()) {
    options.socket = std::string(socket);
  }
  if (auto status = client::ValidateOptions(options); !status.ok()) return status;
  return options;
}

}  // namespace gradsync
