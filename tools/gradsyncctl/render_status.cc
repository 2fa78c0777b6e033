#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tools/gradsyncctl/quantity.h"
#include "tools/gradsyncctl/render.h"
#include "tools/gradsyncctl/text_table.h"

namespace gradsync {
namespace {

constexpr auto kRight = TextTable::Align::kRight;
// The most ranges of ranks that a cell of a short answer names.
constexpr std::size_t kShortRanges = 8;

absl::string_view StateName(v1::DaemonState state) {
  switch (state) {
    case v1::DAEMON_STATE_SERVING:
      return "serving";
    case v1::DAEMON_STATE_DRAINING:
      return "DRAINING";
    default:
      return "state unknown";
  }
}

absl::string_view StateName(v1::JobState state) {
  switch (state) {
    case v1::JOB_STATE_FORMING:
      return "forming";
    case v1::JOB_STATE_RUNNING:
      return "running";
    case v1::JOB_STATE_FAILED:
      return "FAILED";
    case v1::JOB_STATE_ENDED:
      return "ended";
    default:
      return "unknown";
  }
}

// Failed and ended jobs are listed for their statistics; nothing of them waits any more.
bool HasEnded(const v1::JobStatus& job) {
  return job.state() == v1::JOB_STATE_FAILED || job.state() == v1::JOB_STATE_ENDED;
}

// Live ranks of the world, such as "3/4", "2/4 +1 left" or "3/4 +1 held".
std::string RankCount(const v1::JobStatus& job) {
  int live = 0;
  int left = 0;
  for (const v1::SessionStatus& session : job.sessions()) {
    const bool has_left = session.state() == "left" || session.state() == "finished";
    ++(has_left ? left : live);
  }
  return absl::StrCat(
      live, "/", job.world_size(), left > 0 ? absl::StrCat(" +", left, " left") : "",
      job.held_ranks().empty() ? "" : absl::StrCat(" +", job.held_ranks_size(), " held"));
}

// "state of rank 1 from rank 0, 32.0 MiB of 100.0 MiB".
std::string Healing(const v1::HealingStatus& healing) {
  return absl::StrCat("state of rank ", healing.rank(), " from rank ", healing.source(),
                      healing.bytes_total() == 0
                          ? std::string()
                          : absl::StrCat(", ", FormatBytes(healing.bytes()), " of ",
                                         FormatBytes(healing.bytes_total())));
}

std::string MissingRanks(const v1::JobStatus& job, Length length) {
  const std::vector<std::uint32_t> listed(job.missing_ranks().begin(), job.missing_ranks().end());
  return FormatLowestRanks(listed, job.missing_ranks_total(),
                           length == Length::kFull ? listed.size() : kShortRanges);
}

std::string WaitingFor(const v1::JobStatus& job, Length length) {
  if (HasEnded(job)) return "-";
  if (job.state() == v1::JOB_STATE_FORMING) {
    const std::size_t missing = job.missing_ranks_total();
    return missing == 0 ? "-"
                        : absl::StrCat(missing == 1 ? "rank " : "ranks ", MissingRanks(job, length),
                                       " to join");
  }
  if (!job.held_ranks().empty()) {
    return absl::StrCat("replacement of rank ",
                        FormatRanks({job.held_ranks().begin(), job.held_ranks().end()}));
  }
  if (job.has_healing()) return Healing(job.healing());
  // The table of layouts shows which rank is late, and with what.
  std::vector<std::string> steps;
  for (const v1::LayoutStatus& layout : job.layouts()) {
    if (layout.waiting_for().empty()) continue;
    steps.push_back(layout.ready() ? absl::StrCat("step ", layout.step(), " of ", layout.name())
                                   : absl::StrCat("layout ", layout.name()));
  }
  return steps.empty() ? "-" : absl::StrJoin(steps, ", ");
}

// A failed job needs a look first, then one that waits.
double Badness(const v1::JobStatus& job, absl::string_view waiting_for) {
  if (job.state() == v1::JOB_STATE_FAILED) return 3;
  if (job.state() == v1::JOB_STATE_FORMING) return 2;
  return waiting_for == "-" ? (HasEnded(job) ? -1 : 0) : 1;
}

// "64 jobs: 3 FAILED, 60 running, 1 ended"; empty for one job, which needs no total.
std::string Totals(const v1::GetStatusResponse& status) {
  if (status.jobs_size() < 2) return "";
  std::vector<std::string> parts;
  for (const v1::JobState state :
       {v1::JOB_STATE_FAILED, v1::JOB_STATE_FORMING, v1::JOB_STATE_RUNNING, v1::JOB_STATE_ENDED}) {
    const auto count = std::count_if(status.jobs().begin(), status.jobs().end(),
                                     [&](const auto& job) { return job.state() == state; });
    if (count > 0) parts.push_back(absl::StrCat(count, " ", StateName(state)));
  }
  return absl::StrCat(Count(status.jobs_size(), "job"), ": ", absl::StrJoin(parts, ", "), "\n");
}

TextTable Jobs(const v1::GetStatusResponse& status, Length length) {
  TextTable table({{"JOB"},
                   {"USER", kRight},
                   {"GEN", kRight},
                   {"STATE"},
                   {"RANKS"},
                   {"MISSING"},
                   {"WAITING FOR"}});
  for (const v1::JobStatus& job : status.jobs()) {
    const std::string waiting_for = WaitingFor(job, length);
    table.AddRow({job.job_id(), absl::StrCat(job.uid()), absl::StrCat(job.generation()),
                  std::string(StateName(job.state())), RankCount(job), MissingRanks(job, length),
                  waiting_for},
                 Badness(job, waiting_for));
    if (!job.failure().empty()) table.AddNote(absl::StrCat("  failed: ", job.failure()));
    if (!job.gate().empty()) table.AddNote(absl::StrCat("  gate between its GPUs: ", job.gate()));
  }
  return table;
}

TextTable Layouts(const v1::GetStatusResponse& status) {
  TextTable table({{"LAYOUT"},
                   {"JOB"},
                   {"BUCKETS", kRight},
                   {"BYTES", kRight},
                   {"STEP", kRight},
                   {"STATE"},
                   {"WAITING FOR"}});
  for (const v1::JobStatus& job : status.jobs()) {
    if (HasEnded(job)) continue;
    for (const v1::LayoutStatus& layout : job.layouts()) {
      table.AddRow(
          {layout.name(), job.job_id(), absl::StrCat(layout.buckets()), FormatBytes(layout.bytes()),
           absl::StrCat(layout.step()), layout.ready() ? "ready" : "agreeing",
           layout.waiting_for().empty() ? "-" : layout.waiting_for()},
          layout.waiting_for().empty() ? 0 : 1);
    }
  }
  return table;
}

// A rank of another node: its process and memory are known there.
std::vector<std::string> RankRow(const std::string& job, const v1::SessionStatus& session) {
  if (!session.node().empty()) {
    return {absl::StrCat(session.rank()),
            job,
            session.state(),
            session.node(),
            "-",
            "-",
            "-",
            "-",
            "-",
            ""};
  }
  return {absl::StrCat(session.rank()),
          job,
          session.state(),
          "here",
          session.pid() == 0 ? "unknown" : absl::StrCat(session.pid()),
          absl::StrCat(session.incarnation()),
          FormatUptime(session.connected_s()),
          FormatBytes(session.arena_bytes()),
          session.gpu_bytes() == 0 ? "-" : FormatBytes(session.gpu_bytes()),
          session.client()};
}

TextTable Ranks(const v1::GetStatusResponse& status) {
  TextTable table({{"RANK", kRight},
                   {"JOB"},
                   {"STATE"},
                   {"NODE"},
                   {"PID"},
                   {"INCARNATION", kRight},
                   {"CONNECTED"},
                   {"ARENA", kRight},
                   {"ON GPUS", kRight},
                   {"CLIENT"}});
  for (const v1::JobStatus& job : status.jobs()) {
    for (const v1::SessionStatus& session : job.sessions()) {
      table.AddRow(RankRow(job.job_id(), session));
    }
  }
  for (const v1::RemoteJobStatus& job : status.remote_jobs()) {
    for (const v1::SessionStatus& session : job.sessions()) {
      table.AddRow(RankRow(job.job_id(), session));
    }
  }
  return table;
}

TextTable Users(const v1::GetStatusResponse& status) {
  TextTable table({{"USER", kRight},
                   {"ARENAS", kRight},
                   {"ON GPUS", kRight},
                   {"ENGINES", kRight},
                   {"ENGINE QUOTA", kRight},
                   {"IN THE DAEMON", kRight},
                   {"DAEMON QUOTA", kRight},
                   {"CONNECTIONS", kRight},
                   {"CALLS", kRight},
                   {"REFUSED", kRight}});
  for (const v1::UserMemory& user : status.users()) {
    const std::string pod =
        user.pod().empty() ? "" : absl::StrCat(" in pod ", Printable(user.pod()));
    table.AddRow({absl::StrCat(user.uid(), pod), FormatBytes(user.arena_bytes()),
                  FormatBytes(user.gpu_bytes()), FormatBytes(user.engine_bytes()),
                  FormatBytes(user.engine_quota_bytes()), FormatBytes(user.control_bytes()),
                  FormatBytes(user.control_quota_bytes()), absl::StrCat(user.connections()),
                  absl::StrCat(user.calls()), absl::StrCat(user.connections_refused())},
                 static_cast<double>(user.control_bytes()));
  }
  return table;
}

}  // namespace

std::string RenderStatus(const v1::GetStatusResponse& status, bool with_ranks, Length length) {
  std::string text =
      absl::StrCat("gradsyncd ", Printable(status.version()), ": ", StateName(status.state()),
                   ", up ", FormatUptime(status.uptime_s()), ", pid ", status.pid(), ", socket ",
                   Printable(status.socket()), "\n", status.reduce_threads(),
                   status.reduce_threads() == 1 ? " reduce thread" : " reduce threads", " (",
                   Printable(status.simd()), "), arenas ", FormatBytes(status.arena_bytes()), "\n");
  if (!status.peer_address().empty()) {
    absl::StrAppend(&text, "node ", Printable(status.node_name()), ", listens for other nodes at ",
                    Printable(status.peer_address()), "\n");
  }
  const bool no_jobs = status.jobs().empty() && status.remote_jobs().empty();
  absl::StrAppend(&text, no_jobs ? "\nno jobs\n" : Totals(status));
  std::vector<Section> sections = {{"jobs", Jobs(status, length), ""},
                                   {"layouts", Layouts(status), ""}};

  for (Section& section : NodeSections(status)) sections.push_back(std::move(section));
  for (Section& section : GpuSections(status)) sections.push_back(std::move(section));
  sections.push_back({"users", Users(status), ""});
  if (with_ranks) sections.push_back({"ranks", Ranks(status), ""});
  TextTable remarks({});
  for (const std::string& warning : status.warnings()) remarks.AddNote("WARN  " + warning);
  for (const std::string& notice : status.notices()) remarks.AddNote("NOTE  " + notice);
  sections.push_back({"warnings and notices", std::move(remarks), ""});
  LeftOut left_out;
  absl::StrAppend(&text, RenderSections(sections, CountLines(text), length, &left_out));
  return absl::StrCat(text, left_out.Line());
}

}  // namespace gradsync
