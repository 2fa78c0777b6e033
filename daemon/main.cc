// gradsyncd: parses its options, constructs the daemon, runs it. The daemon also starts this
// program as its workers and engine processes.

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "daemon/app/daemon.h"
#include "daemon/app/stop_guard.h"
#include "daemon/base/logging.h"
#include "daemon/config/options.h"
#include "daemon/worker/engine_main.h"
#include "daemon/worker/worker_main.h"
#include "daemon/worker/worker_process.h"

namespace {

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;

// Makes gRPC read at most so much at a time as its servers' arguments say. By default gRPC 1.51
// makes room for as much as the connection has brought since it was last empty: a client that sends
// without a pause takes that much memory again, and from 2 GiB on gRPC aborts the process
// (tcp_posix.cc: maybe_make_read_slices, tcp_do_read). Called before gRPC begins.
void BoundReadsOfGrpc() { setenv("GRPC_EXPERIMENTS", "-tcp_read_chunks", /*replace=*/1); }

int Fail(const absl::Status& status, int code) {
  std::fprintf(stderr, "gradsyncd: %s\n", std::string(status.message()).c_str());
  return code;
}

// --check: a start up to the point where it listens.
int Check(const gradsync::daemon::Options& options, const gradsync::daemon::LogOptions& log) {
  absl::Status status = gradsync::daemon::CheckLogFile(log.file);
  if (!status.ok()) return Fail(status, kExitUsage);
  status = gradsync::daemon::Daemon::Check(options);
  if (!status.ok()) return Fail(status, kExitFailure);
  std::puts("configuration ok");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], gradsync::daemon::kWorkerArgument) == 0) {
    return gradsync::daemon::RunWorker();
  }
  if (argc == 2 && std::strcmp(argv[1], gradsync::daemon::kEngineArgument) == 0) {
    return gradsync::daemon::RunEngine();
  }
  if (const auto text = gradsync::daemon::HelpOrVersion(argc, argv)) {
    std::fputs(text->c_str(), stdout);
    return 0;
  }
  BoundReadsOfGrpc();
  const auto options = gradsync::daemon::LoadOptions(argc, argv);
  if (!options.ok()) return Fail(options.status(), kExitUsage);
  gradsync::daemon::LogOptions log;
  log.level = options->log_level;
  log.format = options->log_format;
  log.file = options->log_file;
  if (gradsync::daemon::ChecksOnly(argc, argv)) return Check(*options, log);
  if (const absl::Status status = gradsync::daemon::InitLogging(log); !status.ok()) {
    return Fail(status, kExitUsage);
  }
  gradsync::daemon::Daemon::BlockSignals();
  gradsync::daemon::StopGuard guard(gradsync::daemon::EndHungProcess);
  auto daemon = gradsync::daemon::Daemon::Start(*options, &guard);
  if (!daemon.ok()) return Fail(daemon.status(), kExitFailure);
  (*daemon)->ServeUntilSignal();
  daemon->reset();
  guard.Enter("flushing the log");
  gradsync::daemon::FlushLogging();
  return 0;
}
