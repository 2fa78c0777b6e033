#include "daemon/rpc/status_mapping.h"

#include <string>
#include <utility>
#include <vector>

#include "daemon/base/error.h"
#include "google/rpc/error_details.pb.h"

namespace gradsync::daemon {

google::rpc::Status ToProto(const absl::Status& status) {
  google::rpc::Status proto;
  proto.set_code(static_cast<int>(status.code()));
  proto.set_message(std::string(status.message()));
  const ErrorDetails details = DetailsOf(status);
  if (!details.reason.empty()) {
    google::rpc::ErrorInfo info;
    info.set_reason(details.reason);
    info.set_domain(kErrorDomain);
    for (const auto& [key, value] : details.fields) {
      if (!value.empty()) (*info.mutable_metadata())[key] = value;
    }
    proto.add_details()->PackFrom(info);
  }
  return proto;
}

absl::Status FromProto(const google::rpc::Status& proto) {
  const auto code = static_cast<absl::StatusCode>(proto.code());
  google::rpc::ErrorInfo info;
  for (const auto& detail : proto.details()) {
    if (detail.UnpackTo(&info)) break;
    info.Clear();  // it has what came before the fault, and may have the fault
  }
  if (info.reason().empty()) return absl::Status(code, proto.message());
  ErrorDetails details;
  details.reason = info.reason();
  details.fields.assign(info.metadata().begin(), info.metadata().end());
  return MakeError(code, details, proto.message());
}

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message()),
                      ToProto(status).SerializeAsString());
}

}  // namespace gradsync::daemon
