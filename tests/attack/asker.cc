// A user who asks a daemon, as a container's probe does: with what gradsyncctl is made of.
//
//   asker --socket=PATH --patience_ms=N [--uid=N]
//
// Ten times, opens a connection and asks for health, status and stats, all within N milliseconds.
// Prints "error=QUESTION: TEXT" for the first one that fails or has no answer in time, or
// "ANSWERED", and ends.

#include <unistd.h>

#include <csignal>
#include <functional>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "tests/kit/become_user.h"
#include "tests/kit/flags.h"
#include "tools/gradsyncctl/daemon_connection.h"

namespace gradsync::attack {
namespace {

using Question = std::function<absl::Status(DaemonConnection*)>;

absl::Status Health(DaemonConnection* daemon) {
  const auto health = daemon->CheckHealth("");
  if (!health.ok()) return health.status();
  if (health->state == grpc::health::v1::HealthCheckResponse::SERVING) return absl::OkStatus();
  return absl::UnavailableError("the daemon does not serve");
}
absl::Status Status(DaemonConnection* daemon) { return daemon->GetStatus("").status(); }
absl::Status Stats(DaemonConnection* daemon) { return daemon->GetStats("").status(); }

int Main(int argc, char** argv) {
  signal(SIGPIPE, SIG_IGN);
  auto flags = FlagsOf(argc, argv);
  const std::string& uid = flags["--uid"];
  if (!uid.empty() && !BecomeUser(static_cast<uid_t>(std::stoul(uid)))) return 1;
  const absl::Duration patience = absl::Milliseconds(std::stoul(flags["--patience_ms"]));
  for (int i = 0; i < 10; ++i) {
    auto daemon = DaemonConnection::Open(flags["--socket"], patience);
    for (const auto& [name, ask] : std::vector<std::pair<std::string, Question>>{
             {"health", Health}, {"status", Status}, {"stats", Stats}}) {
      const absl::Status status = daemon.ok() ? ask(&*daemon) : daemon.status();
      if (status.ok()) continue;
      std::cout << "error=" << name << ": " << status.message() << std::endl;
      return 1;
    }
  }
  std::cout << "ANSWERED" << std::endl;
  return 0;
}

}  // namespace
}  // namespace gradsync::attack

int main(int argc, char** argv) { return gradsync::attack::Main(argc, argv); }
