#include "tools/bench/daemon_process.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "gradsync/v1/introspection.grpc.pb.h"

namespace gradsync::bench {
namespace {

constexpr std::chrono::seconds kStartLimit(20);
// Its socket appears some milliseconds after its start.
constexpr int kReconnectMs = 20;

}  // namespace

std::string DaemonSocket(const std::string& directory, std::uint32_t node) {
  return absl::StrCat(directory, "/gradsyncd-", node, ".sock");
}

std::string DaemonLog(const std::string& directory, std::uint32_t node) {
  return absl::StrCat(directory, "/gradsyncd-", node, ".log");
}

absl::StatusOr<std::string> FindDaemon() {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::filesystem::path folder = self.parent_path();
  std::vector<std::string> candidates = {
      folder / "../../daemon/gradsyncd",  // bazel-bin/tools/bench
      self.string() + ".runfiles/gradsync/daemon/gradsyncd",
      folder / "gradsyncd",
  };
  const char* const path = std::getenv("PATH");
  for (absl::string_view entry : absl::StrSplit(path != nullptr ? path : "", ':')) {
    candidates.push_back(absl::StrCat(entry, "/gradsyncd"));
  }
  for (const std::string& candidate : candidates) {
    if (access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return absl::NotFoundError(
      absl::StrCat("no gradsyncd; give --daemon PATH (looked at ",
                   absl::StrJoin(candidates.begin(), candidates.begin() + 3, ", "), " and PATH)"));
}

std::vector<std::string> DaemonCommand(const DaemonOptions& options,
                                       std::vector<std::string> prefix) {
  std::vector<std::string> command = std::move(prefix);
  command.push_back(options.program);
  command.push_back(absl::StrCat("--socket=", DaemonSocket(options.directory, options.node)));
  command.push_back(absl::StrCat("--reduce_threads=", options.reduce_threads));
  if (!options.cuda_library.empty()) {
    command.push_back(absl::StrCat("--cuda_library=", options.cuda_library));
    command.push_back(absl::StrCat("--nccl_library=", options.nccl_library));
  }
  if (!options.address.empty()) {
    command.push_back(absl::StrCat("--peer_listen=", options.address, ":0"));
    command.push_back(absl::StrCat("--node_name=node", options.node));
  }
  return command;
}

absl::StatusOr<std::string> AwaitPeerAddress(const std::string& directory, std::uint32_t node) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kReconnectMs);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kReconnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kReconnectMs);
  const auto stub = v1::Introspection::NewStub(grpc::CreateCustomChannel(
      "unix:" + DaemonSocket(directory, node), grpc::InsecureChannelCredentials(), arguments));
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  context.set_deadline(std::chrono::system_clock::now() + kStartLimit);
  v1::GetStatusResponse response;
  const grpc::Status status = stub->GetStatus(&context, {}, &response);
  if (!status.ok()) {
    return absl::UnavailableError(
        absl::StrCat("gradsyncd of node ", node, " does not answer: ", status.error_message()));
  }
  return response.peer_address();
}

}  // namespace gradsync::bench
