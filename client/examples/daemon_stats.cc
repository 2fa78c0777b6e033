#include "client/examples/daemon_stats.h"

#include <grpcpp/grpcpp.h>

#include <chrono>

#include "absl/strings/str_cat.h"
#include "proto/gradsync/v1/introspection.grpc.pb.h"

namespace gradsync::examples {

absl::StatusOr<v1::GetStatsResponse> GetDaemonStats(const std::string& socket,
                                                    absl::Duration timeout) {
  const std::shared_ptr<grpc::Channel> channel =
      grpc::CreateChannel("unix:" + socket, grpc::InsecureChannelCredentials());
  const std::unique_ptr<v1::Introspection::Stub> stub = v1::Introspection::NewStub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(timeout));
  v1::GetStatsResponse response;
  const grpc::Status status = stub->GetStats(&context, v1::GetStatsRequest(), &response);
  if (!status.ok()) {
    return absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                        absl::StrCat("GetStats: ", status.error_message()));
  }
  return response;
}

}  // namespace gradsync::examples
