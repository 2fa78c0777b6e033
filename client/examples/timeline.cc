#include "client/examples/timeline.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace gradsync::examples {
namespace {

constexpr std::size_t kLabelColumns = 24;
constexpr std::uint64_t kShortestNs = 1000;  // so that the scale has ticks

// One column of the picture: a glyph (UTF-8) and its ANSI style.
struct Cell {
  std::string glyph = " ";
  const char* ansi = nullptr;
};

// A row whose columns are spans of time.
class Row {
 public:
  Row(std::uint64_t begin_ns, std::uint64_t end_ns, std::size_t columns)
      : begin_ns_(begin_ns), end_ns_(end_ns), cells_(columns) {}

  std::size_t Column(std::uint64_t ns) const {
    const double part =
        (static_cast<double>(std::clamp(ns, begin_ns_, end_ns_)) - static_cast<double>(begin_ns_)) /
        static_cast<double>(end_ns_ - begin_ns_);
    return std::min(cells_.size() - 1, static_cast<std::size_t>(part * cells_.size()));
  }

  // From `from` up to but not including `to`; at least one column.
  void Fill(std::size_t from, std::size_t to, const std::string& glyph, const char* ansi) {
    for (std::size_t i = from; i < std::max(to, from + 1) && i < cells_.size(); ++i) {
      cells_[i] = {glyph, ansi};
    }
  }
  void FillTime(std::uint64_t from_ns, std::uint64_t to_ns, const std::string& glyph,
                const char* ansi) {
    Fill(Column(from_ns), Column(to_ns), glyph, ansi);
  }

  const Cell& At(std::size_t column) const { return cells_[column]; }
  std::size_t columns() const { return cells_.size(); }

  std::string Text(const TextStyle& style) const {
    std::size_t used = cells_.size();
    while (used > 0 && cells_[used - 1].glyph == " ") --used;
    std::string text;
    for (std::size_t i = 0; i < used;) {
      std::string run;
      const char* ansi = cells_[i].ansi;
      for (; i < used && cells_[i].ansi == ansi; ++i) run += cells_[i].glyph;
      absl::StrAppend(&text, ansi == nullptr ? run : style.Paint(ansi, run));
    }
    return text;
  }

 private:
  const std::uint64_t begin_ns_;
  const std::uint64_t end_ns_;
  std::vector<Cell> cells_;
};

// Black letters on a colour, so that a rank's row reads as a bar.
constexpr char kForward[] = "30;44";
constexpr char kBackward[] = "30;42";
constexpr char kBackwardToo[] = "30;46";  // every other layer
constexpr char kUpdate[] = "30;45";
constexpr char kWait[] = "2";
constexpr char kReduce[] = "33";
constexpr char kDone[] = "1;32";

struct Glyphs {
  explicit Glyphs(bool unicode)
      : wait(unicode ? "·" : "."), reduce(unicode ? "█" : "#"), done(unicode ? "✓" : "|") {}
  const std::string wait;
  const std::string reduce;
  const std::string done;
};

std::string Label(const std::string& text, const std::string& detail) {
  return absl::StrFormat("  %-9s %-*s ", text, static_cast<int>(kLabelColumns - 13), detail);
}

std::string Size(std::uint64_t bytes) {
  return bytes < (1u << 20) ? absl::StrFormat("%.0f KiB", static_cast<double>(bytes) / 1024)
                            : absl::StrFormat("%.1f MiB", static_cast<double>(bytes) / (1 << 20));
}

// The scale: ticks at 1, 2 or 5 times a power of ten, at most one in ten columns.
std::string Scale(const Row& row, std::uint64_t begin_ns, std::uint64_t end_ns,
                  const TextStyle& style) {
  const double span_ms = static_cast<double>(end_ns - begin_ns) * 1e-6;
  const double least = span_ms * 10 / static_cast<double>(row.columns());
  double tick = std::pow(10, std::floor(std::log10(least)));
  for (double factor : {2.0, 2.5, 2.0}) {
    if (tick < least) tick *= factor;
  }
  std::string numbers(row.columns() + 8, ' ');
  std::string ruler;
  for (std::size_t i = 0; i < row.columns(); ++i) ruler += style.unicode ? "─" : "-";
  std::vector<std::string> marks(row.columns(), style.unicode ? "─" : "-");
  for (int i = 0; i * tick <= span_ms; ++i) {
    const std::size_t column =
        row.Column(begin_ns + static_cast<std::uint64_t>(std::llround(i * tick * 1e6)));
    marks[column] = style.unicode ? "┬" : "+";
    const std::string number = i == 0 ? "0 ms" : absl::StrFormat("%g", i * tick);
    if (column + number.size() <= row.columns()) numbers.replace(column, number.size(), number);
  }
  numbers.erase(numbers.find_last_not_of(' ') + 1);
  return absl::StrCat(std::string(kLabelColumns, ' '), style.Dim(numbers), "\n",
                      std::string(kLabelColumns, ' '), style.Dim(absl::StrJoin(marks, "")), "\n");
}

void DrawRank(const StepTrace& trace, const Glyphs& glyphs, Row* row) {
  row->FillTime(trace.begin_ns, trace.forward_end_ns, "f", kForward);
  // A short layer keeps its column: later ones begin after it.
  std::size_t from = row->Column(trace.forward_end_ns);
  for (std::size_t i = 0; i < trace.layer_end_ns.size(); ++i) {
    const std::size_t to = std::max(from + 1, row->Column(trace.layer_end_ns[i]));
    row->Fill(from, to, absl::StrCat(trace.layer_end_ns.size() - i),
              i % 2 == 0 ? kBackward : kBackwardToo);
    from = to;
  }
  const std::size_t done = row->Column(trace.done_ns);
  if (from < done) row->Fill(from, done, glyphs.wait, kWait);
  row->Fill(std::max(from, done), row->Column(trace.end_ns) + 1, "u", kUpdate);
}

void DrawBucket(const BucketTrace& bucket, const Glyphs& glyphs, Row* row) {
  if (bucket.ready_ns.empty()) return;
  const auto [first, last] = std::minmax_element(bucket.ready_ns.begin(), bucket.ready_ns.end());
  const std::size_t all_ready = row->Column(*last);
  // Columns are coarse: what follows stands behind what it waited for.
  const std::size_t start = std::max(row->Column(bucket.start_ns), all_ready + 1);
  const std::size_t finish = std::max(row->Column(bucket.finish_ns), start + 1);
  row->Fill(row->Column(*first), start, glyphs.wait, kWait);
  for (std::size_t rank = 0; rank < bucket.ready_ns.size(); ++rank) {
    const std::size_t column = row->Column(bucket.ready_ns[rank]);
    const bool shared = row->At(column).glyph != glyphs.wait;
    row->Fill(column, column + 1, shared ? "+" : absl::StrCat(rank), nullptr);
  }
  row->Fill(start, finish, glyphs.reduce, kReduce);
  row->Fill(finish, finish + 1, glyphs.done, kDone);
}

std::string Legend(const Glyphs& glyphs, std::size_t ranks, std::size_t layers, std::size_t nodes,
                   const TextStyle& style) {
  std::string backward;
  for (std::size_t i = 0; i < layers; ++i) {
    absl::StrAppend(&backward,
                    style.Paint(i % 2 == 0 ? kBackward : kBackwardToo, absl::StrCat(layers - i)));
  }
  const std::string ready = ranks == 1 ? "0" : absl::StrCat("0..", ranks - 1);
  return absl::StrCat("  ranks:    ", style.Paint(kForward, "f"), " forward   ", backward,
                      " backward of that layer   ", glyphs.wait, " wait for the step   ",
                      style.Paint(kUpdate, "u"), " update\n", "  buckets:  ", ready,
                      " ready at that rank (+ several)   ", glyphs.wait, " wait   ",
                      style.Paint(kReduce, glyphs.reduce),
                      nodes == 1 ? " reduce   " : " reduce, over all nodes   ",
                      style.Paint(kDone, glyphs.done), " done\n");
}

}  // namespace

std::string DrawTimeline(const std::vector<StepTrace>& ranks,
                         const std::vector<BucketReport>& buckets, std::size_t nodes,
                         const TextStyle& style) {
  if (ranks.empty()) return "";
  std::uint64_t begin_ns = ranks[0].begin_ns;
  std::uint64_t end_ns = ranks[0].end_ns;
  for (const StepTrace& trace : ranks) {
    begin_ns = std::min(begin_ns, trace.begin_ns);
    end_ns = std::max(end_ns, trace.end_ns);
  }
  end_ns = std::max(end_ns, begin_ns + kShortestNs);
  const Glyphs glyphs(style.unicode);
  const Row blank(begin_ns, end_ns, style.columns - kLabelColumns);

  std::string text = Scale(blank, begin_ns, end_ns, style);
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    Row row = blank;
    DrawRank(ranks[rank], glyphs, &row);
    const std::string detail =
        nodes == 1 ? "computes" : absl::StrCat("on node ", rank * nodes / ranks.size());
    absl::StrAppend(&text, Label(absl::StrCat("rank ", rank), detail), row.Text(style), "\n");
  }
  for (std::size_t i = 0; i < buckets.size() && i < ranks[0].buckets.size(); ++i) {
    Row row = blank;
    DrawBucket(ranks[0].buckets[i], glyphs, &row);
    const std::string detail =
        absl::StrCat(absl::StrJoin(buckets[i].parameters, " "), " ", Size(buckets[i].bytes));
    absl::StrAppend(&text, Label(absl::StrCat("bucket ", i), detail), row.Text(style), "\n");
  }
  return absl::StrCat(text, "\n",
                      Legend(glyphs, ranks.size(), ranks[0].layer_end_ns.size(), nodes, style));
}

}  // namespace gradsync::examples
