#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "tools/gradsyncctl/quantity.h"
#include "tools/gradsyncctl/render.h"
#include "tools/gradsyncctl/text_table.h"

namespace gradsync {
namespace {

constexpr auto kRight = TextTable::Align::kRight;
// The most layouts in a short answer.
constexpr std::size_t kMostLayouts = 12;
constexpr std::size_t kMostStragglers = 6;
constexpr std::size_t kMostWarnings = 5;

std::string Totals(const v1::JobStats& job) {
  TextTable table({{"LAYOUT"},
                   {"STEPS", kRight},
                   {"VOID", kRight},
                   {"BUCKETS", kRight},
                   {"BYTES", kRight},
                   {"GB/S", kRight}});
  for (const v1::LayoutStats& layout : job.layouts()) {
    table.AddRow({layout.name(), absl::StrCat(layout.steps_complete()),
                  absl::StrCat(layout.steps_void()), absl::StrCat(layout.buckets_reduced()),
                  FormatBytes(layout.bytes_reduced()),
                  absl::StrFormat("%.2f", layout.reduce_gbps())});
  }
  return table.Render();
}

std::string Latencies(const v1::LayoutStats& layout) {
  TextTable table({{"LATENCY"}, {"P50", kRight}, {"P99", kRight}, {"MAX", kRight}});
  const auto add = [&table](const char* name, const v1::Latency& latency) {
    table.AddRow({name, FormatMicroseconds(latency.p50_us()), FormatMicroseconds(latency.p99_us()),
                  FormatMicroseconds(latency.max_us())});
  };
  add("ready skew", layout.ready_skew());
  add("queue", layout.queue());
  add("reduce", layout.reduce());
  add("total", layout.total());
  add("exposed", layout.exposed());
  return table.Render();
}

// The gradients' numbers in the last complete step.
std::string Numbers(const v1::LayoutStats& layout) {
  TextTable table(
      {{"GRADIENT NORM", kRight}, {"NON-FINITE", kRight}, {"STEPS NON-FINITE", kRight}});
  table.AddRow({absl::StrFormat("%.4g", layout.gradient_norm()), absl::StrCat(layout.non_finite()),
                absl::StrCat(layout.steps_non_finite())});
  return table.Render();
}

// The most frequent first, as the daemon sorts them.
std::string Stragglers(const v1::LayoutStats& layout, std::size_t most, LeftOut* left_out) {
  TextTable table(
      {{"STRAGGLER"}, {"LAST", kRight}, {"OF ALL", kRight}, {"BEHIND", kRight}, {"TOTAL", kRight}});
  for (const v1::Straggler& straggler : layout.stragglers()) {
    const auto times = static_cast<double>(straggler.times_last());
    const auto buckets = static_cast<double>(layout.buckets_reduced());
    table.AddRow({absl::StrCat("rank ", straggler.rank()), absl::StrCat(straggler.times_last()),
                  buckets > 0 ? absl::StrFormat("%.0f %%", 100.0 * times / buckets) : "-",
                  times > 0 ? FormatMicroseconds(straggler.behind_us_total() / times) : "-",
                  FormatMicroseconds(straggler.behind_us_total())});
  }
  left_out->Add(table.RowsBeyond(most), "stragglers");
  return table.empty() ? "no stragglers\n" : table.Render(most);
}

std::string Indented(absl::string_view text) {
  std::string result;
  for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    absl::StrAppend(&result, "  ", line, "\n");
  }
  return result;
}

// What its steps cost, and which ranks are late.
std::string Details(const v1::LayoutStats& layout, std::size_t most_stragglers, LeftOut* left_out) {
  return absl::StrCat("\n  layout ", Printable(layout.name()), "\n", Indented(Latencies(layout)),
                      "\n", layout.steps_complete() > 0 ? Indented(Numbers(layout)) + "\n" : "",
                      Indented(Stragglers(layout, most_stragglers, left_out)));
}

std::string JobTitle(const v1::JobStats& job) {
  return absl::StrCat("\njob ", Printable(job.job_id()), " (user ", job.uid(), ", generation ",
                      job.generation(), "): ", Count(job.operations(), "operation"), ", ",
                      job.operations_failed(), " failed\n");
}

std::string EveryJob(const v1::GetStatsResponse& stats, std::size_t most_stragglers,
                     LeftOut* left_out) {
  std::string text;
  for (const v1::JobStats& job : stats.jobs()) {
    absl::StrAppend(&text, JobTitle(job),
                    job.layouts().empty() ? "  no layouts\n" : Indented(Totals(job)));
    for (const v1::LayoutStats& layout : job.layouts()) {
      if (layout.buckets_reduced() == 0) continue;
      absl::StrAppend(&text, Details(layout, most_stragglers, left_out));
    }
  }
  return text;
}

// The totals of all jobs, a line for each of the layouts with the longest exposed times, and the
// details of the first of these.
std::string WorstLayouts(const v1::GetStatsResponse& stats, LeftOut* left_out) {
  TextTable table({{"JOB"},
                   {"LAYOUT"},
                   {"STEPS", kRight},
                   {"VOID", kRight},
                   {"BYTES", kRight},
                   {"GB/S", kRight},
                   {"EXPOSED P50", kRight},
                   {"P99", kRight},
                   {"STRAGGLER"}});
  const v1::JobStats* worst_job = nullptr;
  const v1::LayoutStats* worst = nullptr;
  std::size_t layouts = 0;
  std::uint64_t complete = 0;
  std::uint64_t voided = 0;
  std::uint64_t bytes = 0;
  for (const v1::JobStats& job : stats.jobs()) {
    for (const v1::LayoutStats& layout : job.layouts()) {
      ++layouts;
      complete += layout.steps_complete();
      voided += layout.steps_void();
      bytes += layout.bytes_reduced();
      const double exposed = layout.exposed().p99_us();
      if (worst == nullptr || exposed > worst->exposed().p99_us()) {
        worst_job = &job;
        worst = &layout;
      }
      table.AddRow(
          {job.job_id(), layout.name(), absl::StrCat(layout.steps_complete()),
           absl::StrCat(layout.steps_void()), FormatBytes(layout.bytes_reduced()),
           absl::StrFormat("%.2f", layout.reduce_gbps()),
           FormatMicroseconds(layout.exposed().p50_us()), FormatMicroseconds(exposed),
           layout.stragglers().empty() ? "-" : absl::StrCat("rank ", layout.stragglers(0).rank())},
          exposed);
    }
  }
  std::string text = absl::StrCat(Count(stats.jobs_size(), "job"), ", ", Count(layouts, "layout"),
                                  ": ", Count(complete, "step"), " complete, ", voided, " void, ",
                                  FormatBytes(bytes), " averaged\n");
  if (worst == nullptr) return text;
  absl::StrAppend(&text, "\n", table.Render(kMostLayouts), JobTitle(*worst_job),
                  Details(*worst, kMostStragglers, left_out));
  left_out->Add(table.RowsBeyond(kMostLayouts), "layouts");
  left_out->Add(layouts - 1, "layouts' details");
  return text;
}

}  // namespace

std::string RenderStats(const v1::GetStatsResponse& stats, const std::vector<std::string>& warnings,
                        Length length) {
  std::string text = absl::StrCat(
      "since the daemon started: ", Count(stats.sessions_opened(), "session"), " opened, ",
      stats.sessions_lost(), " lost; ", Count(stats.jobs_failed(), "job"), " failed\n");
  if (stats.jobs().empty()) absl::StrAppend(&text, "\nno jobs\n");
  const bool full = length == Length::kFull;
  LeftOut left_out;
  std::string jobs = EveryJob(stats, full ? TextTable::kAllLines : kMostStragglers, &left_out);
  if (!full && CountLines(jobs) > kMostLines) {
    left_out = LeftOut();
    jobs = WorstLayouts(stats, &left_out);
  }
  TextTable remarks({});
  for (const std::string& warning : warnings) remarks.AddNote("WARN  " + warning);
  const std::size_t most = full ? TextTable::kAllLines : kMostWarnings;
  left_out.Add(remarks.RowsBeyond(most), "warnings");
  return absl::StrCat(text, jobs, remarks.empty() ? "" : "\n", remarks.Render(most),
                      left_out.Line());
}

}  // namespace gradsync
