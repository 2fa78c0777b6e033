#include "client/examples/daemon_stats.h"

#include <grpcpp/grpcpp.h>

#include <chrono>

#include "absl/strings/str_cat.h"
#include "proto/gradsync/v1/introspection.grpc.pb.h"

namespace gradsync::examples {

namespace {

using v1::Introspection;

// Calls `method`, which the error is said to be of.
template <typename Request, typename Response>
absl::StatusOr<Response> Ask(const std::string& socket, absl::Duration timeout,
                             grpc::Status (Introspection::Stub::*method)(grpc::ClientContext*,
                                                                         const Request&, Response*),
                             const char* name) {
  const std::shared_ptr<grpc::Channel> channel =
      grpc::CreateChannel("unix:" + socket, grpc::InsecureChannelCredentials());
  const std::unique_ptr<Introspection::Stub> stub = Introspection::NewStub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(timeout));
  Response response;
  const grpc::Status status = (stub.get()->*method)(&context, Request(), &response);
  if (!status.ok()) {
    return absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                        absl::StrCat(name, ": ", status.error_message()));
  }
  return response;
}

}  // namespace

absl::StatusOr<v1::GetStatsResponse> GetDaemonStats(const std::string& socket,
                                                    absl::Duration timeout) {
  return Ask(socket, timeout, &Introspection::Stub::GetStats, "GetStats");
}

absl::StatusOr<std::string> GetPeerAddress(const std::string& socket, absl::Duration timeout) {
  absl::StatusOr<v1::GetStatusResponse> status =
      Ask(socket, timeout, &Introspection::Stub::GetStatus, "GetStatus");
  if (!status.ok()) return status.status();
  return status->peer_address();
}

}  // namespace gradsync::examples
