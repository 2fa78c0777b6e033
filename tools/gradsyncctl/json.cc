#include "tools/gradsyncctl/json.h"

#include <google/protobuf/util/json_util.h>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace gradsync {
namespace {

// Makes UTF-8, which JSON is, of text that may be any bytes.
std::string Dump(const nlohmann::ordered_json& json) {
  return absl::StrCat(json.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace),
                      "\n");
}

absl::string_view VerdictName(Verdict verdict) {
  switch (verdict) {
    case Verdict::kOk:
      return "ok";
    case Verdict::kWarning:
      return "warning";
    case Verdict::kFailure:
      break;
  }
  return "failure";
}

}  // namespace

std::string MessageToJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string json;
  // Fails only for a google.protobuf.Any of unknown type. Introspection has none.
  (void)google::protobuf::util::MessageToJsonString(message, &json, options);
  return json;
}

std::string HealthToJson(const HealthReport& report, absl::string_view socket,
                         const std::vector<ServiceHealth>& services) {
  nlohmann::ordered_json states = nlohmann::ordered_json::object();
  for (const ServiceHealth& service : services) {
    states[service.service] =
        grpc::health::v1::HealthCheckResponse::ServingStatus_Name(service.state);
  }
  nlohmann::ordered_json json;
  json["code"] = std::string(HealthCodeName(report.code));
  json["exit_status"] = static_cast<int>(report.code);
  json["reasons"] = report.reasons;
  json["socket"] = std::string(socket);
  json["services"] = states;
  return Dump(json);
}

std::string DoctorToJson(HealthCode code, const std::vector<Finding>& findings) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Finding& finding : findings) {
    nlohmann::ordered_json one;
    one["check"] = finding.check;
    one["verdict"] = std::string(VerdictName(finding.verdict));
    one["what"] = finding.what;
    one["remedy"] = finding.remedy;
    list.push_back(one);
  }
  nlohmann::ordered_json json;
  json["code"] = std::string(HealthCodeName(code));
  json["exit_status"] = static_cast<int>(code);
  json["findings"] = list;
  return Dump(json);
}

}  // namespace gradsync
