#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/gradsyncctl/quantity.h"
#include "tools/gradsyncctl/render.h"
#include "tools/gradsyncctl/text_table.h"

namespace gradsync {
namespace {

constexpr auto kRight = TextTable::Align::kRight;
constexpr std::size_t kWidth = 50;  // characters that stand for a step's time
// Behind a step's end, for what comes in the same moment: reduction and end keep their character.
constexpr std::size_t kMargin = 2;
constexpr std::size_t kMostDigits = 10;  // with more ranks only the first and the last are drawn
// The most buckets in a short answer.
constexpr std::size_t kMostBuckets = 24;
constexpr std::size_t kMostBucketsBelowSteps = 16;
constexpr std::size_t kMostSteps = 12;

// When a bucket's ranks were ready. Times are CLOCK_MONOTONIC nanoseconds; 0: it did not happen.
struct Ready {
  explicit Ready(const v1::BucketTimes& bucket) {
    for (int rank = 0; rank < bucket.ready_ns_size(); ++rank) {
      const std::uint64_t ns = bucket.ready_ns(rank);
      if (ns == 0) {
        missing.push_back(static_cast<std::uint32_t>(rank));
        continue;
      }
      if (first_ns == 0 || ns < first_ns) first_ns = ns;
      if (ns >= last_ns) {
        before_last_ns = last_ns;
        last_ns = ns;
        last_rank = rank;
      } else {
        before_last_ns = std::max(before_last_ns, ns);
      }
    }
  }

  std::uint64_t first_ns = 0;
  std::uint64_t before_last_ns = 0;  // of the rank before the last one
  std::uint64_t last_ns = 0;
  int last_rank = 0;
  std::vector<std::uint32_t> missing;  // ranks
};

std::string FormatNs(std::uint64_t ns) { return FormatMicroseconds(static_cast<double>(ns) / 1e3); }

std::uint64_t Difference(std::uint64_t from, std::uint64_t to) { return to - std::min(from, to); }

// The time of one step: from its first ready to its commit.
class Axis {
 public:
  explicit Axis(const v1::StepTimeline& step) : last_ns_(step.commit_ns()) {
    for (const v1::BucketTimes& bucket : step.buckets()) {
      const Ready ready(bucket);
      if (ready.first_ns != 0 && (first_ns_ == 0 || ready.first_ns < first_ns_)) {
        first_ns_ = ready.first_ns;
      }
      last_ready_ns_ = std::max(last_ready_ns_, ready.last_ns);
      last_ns_ = std::max({last_ns_, ready.last_ns, bucket.finish_ns()});
    }
    if (first_ns_ == 0) first_ns_ = last_ns_;
  }

  std::uint64_t length_ns() const { return last_ns_ - first_ns_; }
  // After the last ready: what the backward pass cannot hide.
  std::uint64_t exposed_ns() const {
    return last_ready_ns_ == 0 ? 0 : Difference(last_ready_ns_, last_ns_);
  }

  // 0 up to kWidth - 1.
  std::size_t Column(std::uint64_t ns) const {
    if (length_ns() == 0 || ns <= first_ns_) return 0;
    const double share = static_cast<double>(ns - first_ns_) / static_cast<double>(length_ns());
    return std::min(static_cast<std::size_t>(share * kWidth), kWidth - 1);
  }

  std::string Since(std::uint64_t ns) const {
    return ns == 0 ? "-" : FormatNs(Difference(first_ns_, ns));
  }

  // Numbers at 1, 2 or 5 times a power of ten, at most one in ten columns: "0 ms     1        2".
  std::string Scale() const {
    std::string scale(kWidth, ' ');
    const double length = static_cast<double>(length_ns());
    const double unit = length < 1e6 ? 1e3 : length < 1e9 ? 1e6 : 1e9;
    const char* const name = length < 1e6 ? " us" : length < 1e9 ? " ms" : " s";
    const double least = std::max(length / unit, 1.0) * 10 / kWidth;
    double tick = std::pow(10, std::floor(std::log10(least)));
    for (const double factor : {2.0, 2.5, 2.0}) {
      if (tick < least) tick *= factor;
    }
    for (int i = 0; i * tick * unit <= length; ++i) {
      const std::size_t column = Column(first_ns_ + static_cast<std::uint64_t>(i * tick * unit));
      const std::string number = absl::StrCat(absl::StrFormat("%g", i * tick), i == 0 ? name : "");
      if (column + number.size() <= kWidth) scale.replace(column, number.size(), number);
    }
    scale.erase(scale.find_last_not_of(' ') + 1);
    return scale;
  }

 private:
  std::uint64_t first_ns_ = 0;
  std::uint64_t last_ready_ns_ = 0;
  std::uint64_t last_ns_ = 0;
};

void DrawReady(const v1::BucketTimes& bucket, const Ready& ready, const Axis& axis,
               std::string* picture) {
  if (static_cast<std::size_t>(bucket.ready_ns_size()) > kMostDigits) {
    (*picture)[axis.Column(ready.first_ns)] = 'r';
    if (ready.last_ns != ready.first_ns) (*picture)[axis.Column(ready.last_ns)] = 'R';
    return;
  }
  for (int rank = 0; rank < bucket.ready_ns_size(); ++rank) {
    if (bucket.ready_ns(rank) == 0) continue;
    char& cell = (*picture)[axis.Column(bucket.ready_ns(rank))];
    const bool shared = cell != '.' && cell != ' ';
    cell = shared ? '+' : static_cast<char>('0' + rank);
  }
}

std::string Draw(const v1::BucketTimes& bucket, const Ready& ready, const Axis& axis) {
  std::string picture(kWidth + kMargin, ' ');
  if (ready.first_ns == 0) return picture;
  // A bucket that was never reduced is drawn waiting to the end. Columns are coarse: what follows
  // stands behind what it waited for.
  const bool reduced = bucket.start_ns() != 0 && bucket.finish_ns() != 0;
  const std::size_t start =
      reduced ? std::max(axis.Column(bucket.start_ns()), axis.Column(ready.last_ns) + 1) : kWidth;
  for (std::size_t i = axis.Column(ready.first_ns); i < start; ++i) picture[i] = '.';
  DrawReady(bucket, ready, axis, &picture);
  if (!reduced) return picture;
  const std::size_t done = std::max(start + 1, axis.Column(bucket.finish_ns()));
  for (std::size_t i = start; i < done; ++i) picture[i] = '#';
  picture[done] = 'd';
  return picture;
}

// The rank that the others waited for: "1 by 300 us", or those that never were ready.
std::string LateRank(const v1::BucketTimes& bucket, const Ready& ready) {
  if (!ready.missing.empty()) return absl::StrCat(FormatRanks(ready.missing), " missing");
  if (bucket.ready_ns_size() < 2 || ready.last_ns == ready.before_last_ns) return "-";
  return absl::StrCat(ready.last_rank, " by ", FormatNs(ready.last_ns - ready.before_last_ns));
}

// The longer a bucket took from its first ready to its end, the worse; one that was not reduced is
// the worst.
double Badness(const v1::BucketTimes& bucket, const Ready& ready) {
  return bucket.finish_ns() == 0
             ? HUGE_VAL
             : static_cast<double>(Difference(ready.first_ns, bucket.finish_ns()));
}

std::string Picture(const v1::StepTimeline& step, std::size_t most_buckets, LeftOut* left_out) {
  const Axis axis(step);
  std::string text =
      absl::StrCat(step.verdict() == v1::VERDICT_COMPLETE ? "complete" : "VOID", ", ",
                   Count(step.buckets_size(), "bucket"), " in ", FormatNs(axis.length_ns()),
                   "; exposed ", FormatNs(axis.exposed_ns()), "\n");
  TextTable table(
      {{"BUCKET", kRight}, {axis.Scale()}, {"READY", kRight}, {"DONE", kRight}, {"LATE RANK"}});
  for (const v1::BucketTimes& bucket : step.buckets()) {
    const Ready ready(bucket);
    table.AddRow(
        {absl::StrCat(bucket.bucket()), Draw(bucket, ready, axis), axis.Since(ready.last_ns),
         axis.Since(bucket.finish_ns()), LateRank(bucket, ready)},
        Badness(bucket, ready));
  }
  left_out->Add(table.RowsBeyond(most_buckets), "buckets");
  return absl::StrCat(text, table.Render(most_buckets));
}

// Void steps, then the longest ones.
double Badness(const v1::StepTimeline& step) {
  return step.verdict() == v1::VERDICT_COMPLETE ? static_cast<double>(Axis(step).length_ns())
                                                : HUGE_VAL;
}

std::string Steps(const v1::GetTimelineResponse& timeline, LeftOut* left_out) {
  TextTable table({{"STEP", kRight},
                   {"VERDICT"},
                   {"TIME", kRight},
                   {"EXPOSED", kRight},
                   {"LONGEST BUCKET", kRight},
                   {"LATE RANK"}});
  for (const v1::StepTimeline& step : timeline.steps()) {
    const Axis axis(step);
    const auto longest = std::max_element(
        step.buckets().begin(), step.buckets().end(),
        [](const auto& a, const auto& b) { return Badness(a, Ready(a)) < Badness(b, Ready(b)); });
    const bool any = longest != step.buckets().end();
    table.AddRow(
        {absl::StrCat(step.step()), step.verdict() == v1::VERDICT_COMPLETE ? "complete" : "VOID",
         FormatNs(axis.length_ns()), FormatNs(axis.exposed_ns()),
         any ? absl::StrCat(longest->bucket()) : "-",
         any ? LateRank(*longest, Ready(*longest)) : "-"},
        Badness(step));
  }
  left_out->Add(table.RowsBeyond(kMostSteps), "steps");
  return table.Render(kMostSteps);
}

std::string Legend(const v1::GetTimelineResponse& timeline) {
  std::size_t ranks = 0;
  for (const v1::StepTimeline& step : timeline.steps()) {
    for (const v1::BucketTimes& bucket : step.buckets()) {
      ranks = std::max(ranks, static_cast<std::size_t>(bucket.ready_ns_size()));
    }
  }
  const std::string ready = ranks > kMostDigits ? "r first rank ready  R last rank ready"
                            : ranks > 1
                                ? absl::StrCat("0-", ranks - 1, " that rank is ready (+ several)")
                                : "0 the rank is ready";
  return absl::StrCat("\n", ready, "  . waiting  # reducing  d done\n");
}

}  // namespace

std::string RenderTimeline(absl::string_view job, absl::string_view layout,
                           const v1::GetTimelineResponse& timeline, Length length) {
  if (timeline.steps().empty()) {
    return absl::StrCat("no step of ", Printable(layout), " of job ", Printable(job),
                        " is decided yet\n");
  }
  const auto title = [&](const v1::StepTimeline& step) {
    return absl::StrCat("step ", step.step(), " of ", Printable(layout), ", job ", Printable(job),
                        ": ");
  };
  LeftOut left_out;
  std::string text;
  for (const v1::StepTimeline& step : timeline.steps()) {
    absl::StrAppend(
        &text, text.empty() ? "" : "\n", title(step),
        Picture(step, length == Length::kFull ? TextTable::kAllLines : kMostBuckets, &left_out));
  }
  if (length == Length::kShort && timeline.steps_size() > 1 && CountLines(text) > kMostLines) {
    const auto worst =
        std::max_element(timeline.steps().begin(), timeline.steps().end(),
                         [](const auto& a, const auto& b) { return Badness(a) < Badness(b); });
    left_out = LeftOut();
    text = Steps(timeline, &left_out);
    absl::StrAppend(&text, "\n", title(*worst), Picture(*worst, kMostBucketsBelowSteps, &left_out));
    left_out.Add(timeline.steps_size() - 1, "steps' pictures");
  }
  return absl::StrCat(text, Legend(timeline), left_out.Line());
}

}  // namespace gradsync
