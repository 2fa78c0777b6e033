// The bench's own gradsyncd.

#ifndef TOOLS_BENCH_DAEMON_PROCESS_H_
#define TOOLS_BENCH_DAEMON_PROCESS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tools/bench/child_process.h"

namespace gradsync::bench {

// Where Start() puts the socket, in the bench's directory.
std::string DaemonSocket(const std::string& directory);

// The daemon that was built with this bench, or the one beside it, or one in PATH. NOT_FOUND says
// where it was looked for.
absl::StatusOr<std::string> FindDaemon();

// Starts `program` with a socket in `directory`. It may not listen yet when this returns; the
// client library waits for it.
absl::StatusOr<ChildProcess> StartDaemon(const std::string& program, const std::string& directory,
                                         std::uint32_t reduce_threads);

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_DAEMON_PROCESS_H_
