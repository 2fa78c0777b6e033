#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tools/gradsyncctl/quantity.h"
#include "tools/gradsyncctl/render.h"
#include "tools/gradsyncctl/text_table.h"

namespace gradsync {

std::string RenderHealth(const HealthReport& report, const std::vector<ServiceHealth>& services,
                         const v1::GetStatusResponse& status) {
  std::string text =
      absl::StrCat(HealthCodeName(report.code), "  gradsyncd ", Printable(status.version()),
                   ", up ", FormatUptime(status.uptime_s()), ", jobs: ", status.jobs_size(),
                   ", socket ", Printable(status.socket()), "\n");
  for (const std::string& reason : report.reasons) {
    absl::StrAppend(&text, "  ", Printable(reason), "\n");
  }
  TextTable table({{"SERVICE"}, {"STATE"}});
  for (const ServiceHealth& service : services) {
    table.AddRow({service.service.empty() ? "(the daemon)" : service.service,
                  grpc::health::v1::HealthCheckResponse::ServingStatus_Name(service.state)});
  }
  return absl::StrCat(text, "\n", table.Render());
}

}  // namespace gradsync
