#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tools/gradsyncctl/quantity.h"
#include "tools/gradsyncctl/render.h"
#include "tools/gradsyncctl/text_table.h"

namespace gradsync {
namespace {

constexpr std::size_t kMostReasons = 20;

}  // namespace

std::string RenderHealth(const HealthReport& report, const std::vector<ServiceHealth>& services,
                         const absl::StatusOr<v1::GetStatusResponse>& status, Length length) {
  std::string text = absl::StrCat(HealthCodeName(report.code), "  gradsyncd");
  if (status.ok()) {
    absl::StrAppend(&text, " ", Printable(status->version()), ", up ",
                    FormatUptime(status->uptime_s()), ", jobs: ", status->jobs_size(), ", socket ",
                    Printable(status->socket()));
  }
  text += '\n';
  // The gravest come first.
  TextTable reasons({});
  for (const std::string& reason : report.reasons) reasons.AddNote(absl::StrCat("  ", reason));
  const std::size_t most = length == Length::kFull ? TextTable::kAllLines : kMostReasons;
  absl::StrAppend(&text, reasons.Render(most));
  LeftOut left_out;
  left_out.Add(reasons.RowsBeyond(most), "reasons");
  TextTable table({{"SERVICE"}, {"STATE"}});
  for (const ServiceHealth& service : services) {
    table.AddRow({service.service.empty() ? "(the daemon)" : service.service,
                  grpc::health::v1::HealthCheckResponse::ServingStatus_Name(service.state)});
  }
  return absl::StrCat(text, "\n", table.Render(), left_out.Line());
}

}  // namespace gradsync
