#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/gradsyncctl/quantity.h"
#include "tools/gradsyncctl/render.h"
#include "tools/gradsyncctl/text_table.h"

namespace gradsync {
namespace {

constexpr auto kRight = TextTable::Align::kRight;
constexpr std::size_t kWidth = 48;     // characters of a picture
constexpr std::size_t kMaxLines = 64;  // with more, the ranks of a bucket share one

// What is drawn on one line; 0 = did not happen.
struct Span {
  std::string rank;
  std::uint64_t ready_ns = 0;
  std::uint64_t last_ready_ns = 0;  // of shared lines
  std::uint64_t start_ns = 0;
  std::uint64_t finish_ns = 0;
};

// The time that a picture's width stands for.
class Axis {
 public:
  explicit Axis(const v1::StepTimeline& step) : last_ns_(step.commit_ns()) {
    for (const v1::BucketTimes& bucket : step.buckets()) {
      for (const std::uint64_t ns : bucket.ready_ns()) {
        if (ns != 0 && (first_ns_ == 0 || ns < first_ns_)) first_ns_ = ns;
        last_ns_ = std::max(last_ns_, ns);
      }
      last_ns_ = std::max(last_ns_, bucket.finish_ns());
    }
    if (first_ns_ == 0) first_ns_ = last_ns_;
  }

  std::uint64_t length_ns() const { return last_ns_ - first_ns_; }

  // 0 up to kWidth - 1.
  std::size_t Column(std::uint64_t ns) const {
    if (length_ns() == 0 || ns <= first_ns_) return 0;
    const double share = static_cast<double>(ns - first_ns_) / static_cast<double>(length_ns());
    return std::min(static_cast<std::size_t>(share * kWidth), kWidth - 1);
  }

  std::string Since(std::uint64_t ns) const {
    if (ns == 0) return "-";
    return FormatMicroseconds(static_cast<double>(ns - std::min(ns, first_ns_)) / 1e3);
  }

 private:
  std::uint64_t first_ns_ = 0;
  std::uint64_t last_ns_ = 0;
};

std::string Draw(const Span& span, const Axis& axis) {
  std::string picture(kWidth, ' ');
  if (span.ready_ns == 0) return picture;
  const std::size_t ready = axis.Column(span.ready_ns);
  // A bucket that was never reduced is drawn waiting to the end.
  const std::size_t start = span.start_ns == 0 ? kWidth : axis.Column(span.start_ns);
  for (std::size_t i = ready; i < start; ++i) picture[i] = '.';
  picture[ready] = 'r';
  if (span.last_ready_ns != 0 && span.last_ready_ns != span.ready_ns) {
    picture[axis.Column(span.last_ready_ns)] = 'R';
  }
  if (span.start_ns == 0 || span.finish_ns == 0) return picture;
  // The reduction gets a character of its own, also a very short one.
  const std::size_t first = std::min(std::max(start, ready + 1), kWidth - 2);
  const std::size_t done = std::max(first + 1, axis.Column(span.finish_ns));
  for (std::size_t i = first; i < done; ++i) picture[i] = '#';
  picture[done] = 'd';
  return picture;
}

std::vector<Span> Spans(const v1::BucketTimes& bucket, bool shared) {
  std::vector<Span> spans;
  Span all{"all", 0, 0, bucket.start_ns(), bucket.finish_ns()};
  for (int rank = 0; rank < bucket.ready_ns_size(); ++rank) {
    const std::uint64_t ns = bucket.ready_ns(rank);
    if (!shared) {
      spans.push_back({absl::StrCat(rank), ns, 0, bucket.start_ns(), bucket.finish_ns()});
    } else if (ns != 0) {
      if (all.ready_ns == 0 || ns < all.ready_ns) all.ready_ns = ns;
      all.last_ready_ns = std::max(all.last_ready_ns, ns);
    }
  }
  if (shared) spans.push_back(all);
  return spans;
}

std::string Picture(const v1::StepTimeline& step) {
  std::size_t lines = 0;
  for (const v1::BucketTimes& bucket : step.buckets()) {
    lines += static_cast<std::size_t>(bucket.ready_ns_size());
  }
  const Axis axis(step);
  // "|0 us        3.41 ms|" above the pictures.
  const std::string length = axis.Since(axis.length_ns() == 0 ? 0 : step.commit_ns());
  const std::string scale = absl::StrCat(
      "|0", std::string(kWidth - 3 - std::min(length.size(), kWidth - 3), ' '), length, "|");
  TextTable table({{"BUCKET", kRight},
                   {"RANK", kRight},
                   {scale},
                   {"READY", kRight},
                   {"REDUCE", kRight},
                   {"DONE", kRight}});
  for (const v1::BucketTimes& bucket : step.buckets()) {
    for (const Span& span : Spans(bucket, lines > kMaxLines)) {
      table.AddRow({absl::StrCat(bucket.bucket()), span.rank, Draw(span, axis),
                    axis.Since(std::max(span.ready_ns, span.last_ready_ns)),
                    axis.Since(span.start_ns), axis.Since(span.finish_ns)});
    }
  }
  return table.Render();
}

}  // namespace

std::string RenderTimeline(absl::string_view job, absl::string_view layout,
                           const v1::GetTimelineResponse& timeline) {
  if (timeline.steps().empty()) {
    return absl::StrCat("no step of ", Printable(layout), " of job ", Printable(job),
                        " is committed yet\n");
  }
  std::string text;
  for (const v1::StepTimeline& step : timeline.steps()) {
    absl::StrAppend(&text, text.empty() ? "" : "\n", "step ", step.step(), " of ",
                    Printable(layout), ", job ", Printable(job), ": ",
                    step.verdict() == v1::VERDICT_COMPLETE ? "complete" : "VOID", "\n",
                    Picture(step));
  }
  return absl::StrCat(text,
                      "\nr ready  . waiting  # reducing  d done; times since the step's "
                      "first ready, until its commit\n");
}

}  // namespace gradsync
