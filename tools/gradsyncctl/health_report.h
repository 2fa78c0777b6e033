// OK, WARN or ERR: what the daemon's answers mean for an operator, and gradsyncctl's exit status.

#ifndef TOOLS_GRADSYNCCTL_HEALTH_REPORT_H_
#define TOOLS_GRADSYNCCTL_HEALTH_REPORT_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "gradsync/v1/introspection.pb.h"
#include "grpc/health/v1/health.pb.h"

namespace gradsync {

// The numbers are exit statuses.
enum class HealthCode { kOk = 0, kWarn = 1, kErr = 2 };

absl::string_view HealthCodeName(HealthCode code);  // "OK", "WARN", "ERR"

// What grpc.health.v1 says of one service; SERVICE_UNKNOWN if the daemon does not know it.
struct ServiceHealth {
  std::string service;  // empty: the whole daemon
  grpc::health::v1::HealthCheckResponse::ServingStatus state;
};

struct HealthReport {
  HealthCode code = HealthCode::kOk;
  std::vector<std::string> reasons;  // why it is not OK, the gravest first
};

// WARN: the daemon warns or drains, or a job has failed and no later generation of it runs.
HealthReport JudgeStatus(const v1::GetStatusResponse& status);

// ERR: a service does not serve, unless the daemon drains. WARN: the daemon warns or drains, or it
// serves but does not tell its state: `status` is an error.
HealthReport JudgeHealth(const std::vector<ServiceHealth>& services,
                         const absl::StatusOr<v1::GetStatusResponse>& status);

}  // namespace gradsync

#endif  // TOOLS_GRADSYNCCTL_HEALTH_REPORT_H_
