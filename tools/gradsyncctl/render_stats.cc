#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "tools/gradsyncctl/quantity.h"
#include "tools/gradsyncctl/render.h"
#include "tools/gradsyncctl/text_table.h"

namespace gradsync {
namespace {

constexpr auto kRight = TextTable::Align::kRight;

std::string Plural(std::uint64_t count, absl::string_view noun) {
  return absl::StrCat(count, " ", noun, count == 1 ? "" : "s");
}

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

// Of the last complete step.
std::string Numbers(const v1::LayoutStats& layout) {
  TextTable table(
      {{"GRADIENT NORM", kRight}, {"NON-FINITE", kRight}, {"STEPS NON-FINITE", kRight}});
  table.AddRow({absl::StrFormat("%.4g", layout.gradient_norm()), absl::StrCat(layout.non_finite()),
                absl::StrCat(layout.steps_non_finite())});
  return table.Render();
}

std::string Stragglers(const v1::LayoutStats& layout) {
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
  return table.empty() ? "no stragglers\n" : table.Render();
}

std::string Indented(absl::string_view text) {
  std::string result;
  for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    absl::StrAppend(&result, "  ", line, "\n");
  }
  return result;
}

}  // namespace

std::string RenderStats(const v1::GetStatsResponse& stats) {
  std::string text = absl::StrCat(
      "since the daemon started: ", Plural(stats.sessions_opened(), "session"), " opened, ",
      stats.sessions_lost(), " lost; ", Plural(stats.jobs_failed(), "job"), " failed\n");
  if (stats.jobs().empty()) absl::StrAppend(&text, "\nno jobs\n");
  for (const v1::JobStats& job : stats.jobs()) {
    absl::StrAppend(&text, "\njob ", Printable(job.job_id()), " (user ", job.uid(), ", generation ",
                    job.generation(), "): ", Plural(job.operations(), "operation"), ", ",
                    job.operations_failed(), " failed\n",
                    job.layouts().empty() ? "  no layouts\n" : Indented(Totals(job)));
    for (const v1::LayoutStats& layout : job.layouts()) {
      if (layout.buckets_reduced() == 0) continue;
      absl::StrAppend(&text, "\n  layout ", Printable(layout.name()), "\n",
                      Indented(Latencies(layout)), "\n",
                      layout.steps_complete() > 0 ? Indented(Numbers(layout)) + "\n" : "",
                      Indented(Stragglers(layout)));
    }
  }
  return text;
}

}  // namespace gradsync
