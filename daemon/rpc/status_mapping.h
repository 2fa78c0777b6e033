// The one place where an error of the daemon becomes one of gRPC: absl::Status -> google.rpc.Status
// with ErrorInfo{reason, domain "gradsync", metadata job/rank/channel/step/bucket} -> grpc::Status
// with that as its details.

#ifndef DAEMON_RPC_STATUS_MAPPING_H_
#define DAEMON_RPC_STATUS_MAPPING_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "google/rpc/status.pb.h"

namespace gradsync {

google::rpc::Status ToProto(const absl::Status& status);
// Back, for what another daemon says.
absl::Status FromProto(const google::rpc::Status& proto);
grpc::Status ToGrpc(const absl::Status& status);

}  // namespace gradsync

#endif  // DAEMON_RPC_STATUS_MAPPING_H_
