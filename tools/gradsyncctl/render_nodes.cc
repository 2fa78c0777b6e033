#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "tools/gradsyncctl/quantity.h"
#include "tools/gradsyncctl/render.h"
#include "tools/gradsyncctl/text_table.h"

namespace gradsync {
namespace {

constexpr auto kRight = TextTable::Align::kRight;

// How long ago a node's daemon said something; it is asked every second.
std::string Heard(double seconds) {
  return seconds < 2 ? "now" : absl::StrCat(FormatUptime(seconds), " ago");
}

std::string Nodes(const v1::GetStatusResponse& status) {
  TextTable table({{"NODE"}, {"JOB"}, {"ADDRESS"}, {"RANKS"}, {"HEARD"}, {"WAITING FOR"}});
  for (const v1::JobStatus& job : status.jobs()) {
    for (const v1::NodeStatus& node : job.nodes()) {
      const std::vector<std::uint32_t> waiting(node.waiting_ranks().begin(),
                                               node.waiting_ranks().end());
      const bool here = node.connected() && node.address().empty();
      table.AddRow(
          {node.name(), job.job_id(), here ? "here" : (node.connected() ? node.address() : "-"),
           FormatRanks({node.ranks().begin(), node.ranks().end()}),
           here ? "-" : (node.connected() ? Heard(node.heard_s()) : "GONE"),
           waiting.empty()
               ? "-"
               : absl::StrCat(waiting.size() == 1 ? "rank " : "ranks ", FormatRanks(waiting))});
    }
  }
  return table.empty() ? "" : table.Render();
}

std::string RemoteJobs(const v1::GetStatusResponse& status) {
  TextTable table({{"JOB ELSEWHERE"},
                   {"USER", kRight},
                   {"COORDINATOR"},
                   {"ADDRESS"},
                   {"RANKS HERE"},
                   {"HEARD"}});
  for (const v1::RemoteJobStatus& job : status.remote_jobs()) {
    std::vector<std::uint32_t> ranks;
    for (const v1::SessionStatus& session : job.sessions()) ranks.push_back(session.rank());
    std::sort(ranks.begin(), ranks.end());
    table.AddRow(
        {job.job_id(), absl::StrCat(job.uid()), job.node_name().empty() ? "-" : job.node_name(),
         job.coordinator(), FormatRanks(ranks),
         job.connected() ? Heard(job.heard_s())
                         : absl::StrCat("NOT YET, called for ", FormatUptime(job.heard_s()))});
  }
  return table.empty() ? "" : table.Render();
}

absl::string_view WireTypeText(v1::WireType type) {
  switch (type) {
    case v1::WIRE_TYPE_SAME:
      return "as they are";
    case v1::WIRE_TYPE_BFLOAT16:
      return "as bfloat16";
    case v1::WIRE_TYPE_FLOAT16:
      return "as float16";
    default:
      return "as an unknown type";
  }
}

void AddLanes(const std::string& job, const v1::EngineStatus& engine, TextTable* table) {
  for (int lane = 0; lane < engine.lanes_size(); ++lane) {
    const v1::LaneStatus& line = engine.lanes(lane);
    table->AddRow({absl::StrCat(lane), job, FormatBytes(line.bytes_sent()),
                   FormatBytes(line.bytes_received()), FormatMicroseconds(line.busy_s() * 1e6),
                   absl::StrFormat("%.3g", line.gbit_per_s())});
  }
  const std::string nodes = absl::StrJoin(engine.nodes(), ", ");
  table->AddNote(engine.connected()
                     ? absl::StrCat("  ", job, ": between ", nodes, "; float32 gradients travel ",
                                    WireTypeText(engine.wire_type()))
                     : absl::StrCat("  ", job, ": ", nodes, " have not met yet"));
}

std::string Lanes(const v1::GetStatusResponse& status) {
  TextTable table({{"LANE", kRight},
                   {"JOB"},
                   {"SENT", kRight},
                   {"RECEIVED", kRight},
                   {"BUSY", kRight},
                   {"GBIT/S", kRight}});
  for (const v1::JobStatus& job : status.jobs()) {
    if (job.has_engine()) AddLanes(job.job_id(), job.engine(), &table);
  }
  for (const v1::RemoteJobStatus& job : status.remote_jobs()) {
    if (job.has_engine()) AddLanes(job.job_id(), job.engine(), &table);
  }
  return table.empty() ? "" : table.Render();
}

}  // namespace

std::string RenderNodes(const v1::GetStatusResponse& status) {
  std::string text;
  for (const std::string& part : {Nodes(status), RemoteJobs(status), Lanes(status)}) {
    if (!part.empty()) absl::StrAppend(&text, text.empty() ? "" : "\n", part);
  }
  return text;
}

}  // namespace gradsync
