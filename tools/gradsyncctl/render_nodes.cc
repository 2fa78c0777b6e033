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

// How long ago a node's daemon answered. This daemon asks it every second.
std::string Heard(double seconds) {
  return seconds < 2 ? "now" : absl::StrCat(FormatUptime(seconds), " ago");
}

TextTable Nodes(const v1::GetStatusResponse& status) {
  TextTable table({{"NODE"}, {"JOB"}, {"ADDRESS"}, {"RANKS"}, {"HEARD"}, {"WAITING FOR"}});
  for (const v1::JobStatus& job : status.jobs()) {
    for (const v1::NodeStatus& node : job.nodes()) {
      const std::vector<std::uint32_t> waiting(node.waiting_ranks().begin(),
                                               node.waiting_ranks().end());
      const bool here = node.connected() && node.address().empty();
      table.AddRow(
          {node.name(), job.job_id(), here ? "here" : (node.connected() ? node.address() : "-"),
           FormatRanks({node.ranks().begin(), node.ranks().end()}),
           here ? "-" : (node.connected() ? Heard(node.heard_s()) : "ENDED"),
           waiting.empty()
               ? "-"
               : absl::StrCat(waiting.size() == 1 ? "rank " : "ranks ", FormatRanks(waiting))},
          node.connected() ? (waiting.empty() ? 0 : 1) : 2);
    }
    if (job.former_ranks_unlisted() == 0) continue;
    table.AddNote(absl::StrCat("  ", job.job_id(), ": ", job.former_ranks_unlisted(),
                               " more ranks have no session now. If their nodes have ENDED, this "
                               "table may lack those nodes"));
  }
  return table;
}

TextTable RemoteJobs(const v1::GetStatusResponse& status) {
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
                         : absl::StrCat("NOT YET, called for ", FormatUptime(job.heard_s()))},
        job.connected() ? 0 : 1);
  }
  return table;
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
                                    WireTypeText(engine.wire_type()),
                                    engine.encrypted() ? ", encrypted" : ", in clear text")
                     : absl::StrCat("  ", job, ": ", nodes, " have not met yet"));
}

TextTable Lanes(const v1::GetStatusResponse& status) {
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
  return table;
}

}  // namespace

std::vector<Section> NodeSections(const v1::GetStatusResponse& status) {
  return {{"nodes", Nodes(status), ""},
          {"jobs elsewhere", RemoteJobs(status), ""},
          {"lanes", Lanes(status), ""}};
}

}  // namespace gradsync
