// Answers for programs.

#ifndef TOOLS_GRADSYNCCTL_JSON_H_
#define TOOLS_GRADSYNCCTL_JSON_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "google/protobuf/message.h"
#include "tools/gradsyncctl/doctor/doctor.h"
#include "tools/gradsyncctl/health_report.h"

namespace gradsync {

// Protobuf's JSON under the names of the .proto file, with fields that are zero or empty. Ends with
// a line feed.
std::string MessageToJson(const google::protobuf::Message& message);

// {"code", "exit_status", "reasons", "socket", "services": {name: state}}; the whole daemon is the
// service named "".
std::string HealthToJson(const HealthReport& report, absl::string_view socket,
                         const std::vector<ServiceHealth>& services);

// {"code", "exit_status", "findings": [{"check", "verdict", "what", "remedy"}]}; a verdict is "ok",
// "warning" or "failure".
std::string DoctorToJson(HealthCode code, const std::vector<Finding>& findings);

}  // namespace gradsync

#endif  // TOOLS_GRADSYNCCTL_JSON_H_
