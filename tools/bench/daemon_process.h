// The bench's own gradsyncd, one on each node.

#ifndef TOOLS_BENCH_DAEMON_PROCESS_H_
#define TOOLS_BENCH_DAEMON_PROCESS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace gradsync::bench {

// The socket and the log of a node's daemon in the bench's directory.
std::string DaemonSocket(const std::string& directory, std::uint32_t node);
std::string DaemonLog(const std::string& directory, std::uint32_t node);

// The daemon that was built with this bench, or the one beside it, or one in PATH. NOT_FOUND says
// where it was looked for.
absl::StatusOr<std::string> FindDaemon();

struct DaemonOptions {
  std::string program;
  std::string directory;
  std::uint32_t node = 0;
  std::uint32_t reduce_threads = 1;
  // On several nodes: where the other nodes' daemons reach this one, at a port of its choice.
  std::string address;
  // Empty: the daemon's defaults.
  std::string cuda_library;
  std::string nccl_library;
};

// What starts it behind `prefix`, for ChildProcess.
std::vector<std::string> DaemonCommand(const DaemonOptions& options,
                                       std::vector<std::string> prefix);

// "host:port" of the other nodes' way to a daemon with an address, once it listens. UNAVAILABLE if
// it does not within 20 s.
absl::StatusOr<std::string> AwaitPeerAddress(const std::string& directory, std::uint32_t node);

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_DAEMON_PROCESS_H_
