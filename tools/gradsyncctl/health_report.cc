#include "tools/gradsyncctl/health_report.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace gradsync {
namespace {

using grpc::health::v1::HealthCheckResponse;

void Add(HealthCode code, std::string reason, HealthReport* report) {
  report->code = std::max(report->code, code);
  report->reasons.push_back(std::move(reason));
}

void AddDaemonWarnings(const v1::GetStatusResponse& status, HealthReport* report) {
  if (status.state() == v1::DAEMON_STATE_DRAINING) {
    Add(HealthCode::kWarn, "the daemon drains: it takes no new sessions", report);
  }
  for (const std::string& warning : status.warnings()) Add(HealthCode::kWarn, warning, report);
}

// Whether a later life of the same job is listed: then its failure is history.
bool Superseded(const v1::JobStatus& job, const v1::GetStatusResponse& status) {
  return std::any_of(status.jobs().begin(), status.jobs().end(),
                     [&job](const v1::JobStatus& other) {
                       return other.uid() == job.uid() && other.job_id() == job.job_id() &&
                              other.generation() > job.generation();
                     });
}

}  // namespace

absl::string_view HealthCodeName(HealthCode code) {
  switch (code) {
    case HealthCode::kOk:
      return "OK";
    case HealthCode::kWarn:
      return "WARN";
    case HealthCode::kErr:
      return "ERR";
  }
  return "ERR";
}

HealthReport JudgeStatus(const v1::GetStatusResponse& status) {
  HealthReport report;
  AddDaemonWarnings(status, &report);
  for (const v1::JobStatus& job : status.jobs()) {
    if (job.state() != v1::JOB_STATE_FAILED || Superseded(job, status)) continue;
    Add(HealthCode::kWarn, absl::StrCat("job ", job.job_id(), " has failed: ", job.failure()),
        &report);
  }
  return report;
}

HealthReport JudgeHealth(const std::vector<ServiceHealth>& services,
                         const absl::StatusOr<v1::GetStatusResponse>& status) {
  HealthReport report;
  // A daemon that drains reports NOT_SERVING, which is right: it accepts no joins.
  const bool draining = status.ok() && status->state() == v1::DAEMON_STATE_DRAINING;
  for (const ServiceHealth& service : services) {
    if (service.state == HealthCheckResponse::SERVING || draining) continue;
    Add(HealthCode::kErr,
        absl::StrCat(service.service.empty() ? "the daemon" : service.service, " is ",
                     HealthCheckResponse::ServingStatus_Name(service.state)),
        &report);
  }
  if (status.ok()) {
    AddDaemonWarnings(*status, &report);
  } else {
    Add(HealthCode::kWarn,
        absl::StrCat("it does not tell its state, so its warnings are not known: ",
                     status.status().message()),
        &report);
  }
  return report;
}

}  // namespace gradsync
