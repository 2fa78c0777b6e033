// gradsyncd: parse, construct, run. The daemon starts it as a worker too.

#include <cstdio>
#include <cstring>

#include "daemon/app/daemon.h"
#include "daemon/base/logging.h"
#include "daemon/config/options.h"
#include "daemon/worker/worker_main.h"
#include "daemon/worker/worker_process.h"

namespace {

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;

int Fail(const absl::Status& status, int code) {
  std::fprintf(stderr, "gradsyncd: %s\n", std::string(status.message()).c_str());
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], gradsync::kWorkerArgument) == 0) {
    return gradsync::RunWorker();
  }
  if (const auto text = gradsync::HelpOrVersion(argc, argv)) {
    std::fputs(text->c_str(), stdout);
    return 0;
  }
  const auto options = gradsync::LoadOptions(argc, argv);
  if (!options.ok()) return Fail(options.status(), kExitUsage);
  gradsync::LogOptions log;
  log.level = options->log_level;
  log.format = options->log_format;
  log.file = options->log_file;
  if (const absl::Status status = gradsync::InitLogging(log); !status.ok()) {
    return Fail(status, kExitUsage);
  }
  gradsync::Daemon::BlockSignals();
  auto daemon = gradsync::Daemon::Start(*options);
  if (!daemon.ok()) return Fail(daemon.status(), kExitFailure);
  (*daemon)->ServeUntilSignal();
  daemon->reset();
  gradsync::FlushLogging();
  return 0;
}
