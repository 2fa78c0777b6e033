#include "client/src/error.h"

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "client/include/gradsync/client.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace gradsync {
namespace client {
namespace {

constexpr char kErrorInfoUrl[] = "type.googleapis.com/google.rpc.ErrorInfo";

std::optional<google::rpc::ErrorInfo> ErrorInfoOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kErrorInfoUrl);
  if (!payload.has_value()) return std::nullopt;
  google::rpc::ErrorInfo info;
  if (!info.ParseFromString(std::string(*payload)) || info.domain() != kErrorDomain)
    return std::nullopt;
  return info;
}

absl::StatusCode CodeOf(int code) {
  constexpr int kLast = static_cast<int>(absl::StatusCode::kUnauthenticated);
  return code >= 0 && code <= kLast ? static_cast<absl::StatusCode>(code)
                                    : absl::StatusCode::kUnknown;
}

}  // namespace

absl::Status MakeError(absl::StatusCode code, Reason reason, absl::string_view message,
                       const ErrorFields& fields) {
  google::rpc::ErrorInfo info;
  info.set_reason(std::string(reason.text()));
  info.set_domain(kErrorDomain);
  const auto put = [&info](FieldName name, const absl::AlphaNum& value) {
    (*info.mutable_metadata())[std::string(name.text())] = std::string(value.Piece());
  };
  if (!fields.job.empty()) put(field::kJob, fields.job);
  if (fields.rank) put(field::kRank, *fields.rank);
  if (fields.channel) put(field::kChannel, *fields.channel);
  if (fields.step) put(field::kStep, *fields.step);
  if (fields.bucket) put(field::kBucket, *fields.bucket);
  absl::Status status(code, message);
  status.SetPayload(kErrorInfoUrl, absl::Cord(info.SerializeAsString()));
  return status;
}

absl::Status StatusFromProto(const google::rpc::Status& proto) {
  absl::Status status(CodeOf(proto.code()), proto.message());
  if (status.ok()) return status;
  for (const auto& detail : proto.details()) {
    status.SetPayload(detail.type_url(), absl::Cord(detail.value()));
  }
  return status;
}

absl::Status StatusFromTrailer(int code, absl::string_view message, absl::string_view details) {
  if (!details.empty()) {
    google::rpc::Status proto;
    if (proto.ParseFromArray(details.data(), static_cast<int>(details.size())) &&
        proto.code() == code) {
      return StatusFromProto(proto);
    }
  }
  return absl::Status(CodeOf(code), message);
}

}  // namespace client

std::string ErrorReason(const absl::Status& status) {
  const auto info = client::ErrorInfoOf(status);
  return info.has_value() ? info->reason() : "";
}

std::string ErrorField(const absl::Status& status, FieldName field) {
  const auto info = client::ErrorInfoOf(status);
  if (!info.has_value()) return "";
  const auto found = info->metadata().find(std::string(field.text()));
  return found == info->metadata().end() ? "" : found->second;
}

}  // namespace gradsync
