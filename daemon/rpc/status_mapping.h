// Translates errors between the daemon and gRPC, in this one place. An absl::Status becomes a
// google.rpc.Status with ErrorInfo{reason, domain "gradsync", metadata
// job/rank/channel/step/bucket}, and that becomes the details of a grpc::Status.

#ifndef DAEMON_RPC_STATUS_MAPPING_H_
#define DAEMON_RPC_STATUS_MAPPING_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "google/rpc/status.pb.h"

namespace gradsync::daemon {

google::rpc::Status ToProto(const absl::Status& status);
// Translates back the error of another daemon.
absl::Status FromProto(const google::rpc::Status& proto);
grpc::Status ToGrpc(const absl::Status& status);

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_STATUS_MAPPING_H_
