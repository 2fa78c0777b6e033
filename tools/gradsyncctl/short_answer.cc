#include "tools/gradsyncctl/short_answer.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace gradsync {
namespace {

// Fewer rows show nothing of a table.
constexpr std::size_t kLeastRows = 3;

// How many lines each table may have so that all tables together have `budget`: small tables are
// shown whole, large ones share what is left.
std::size_t LinesPerTable(std::vector<std::size_t> sizes, std::size_t budget) {
  std::sort(sizes.begin(), sizes.end());
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const std::size_t share = budget / (sizes.size() - i);
    if (sizes[i] > share) return std::max(share, kLeastRows);
    budget -= sizes[i];
  }
  return TextTable::kAllLines;
}

}  // namespace

void LeftOut::Add(std::size_t count, absl::string_view noun) {
  if (count > 0) parts_.push_back(absl::StrCat(count, " ", noun));
}

std::string LeftOut::Line() const {
  if (parts_.empty()) return "";
  return absl::StrCat("\nleft out: ", absl::StrJoin(parts_, ", "), " (--all shows them)\n");
}

std::string RenderSections(const std::vector<Section>& sections, std::size_t lines_before,
                           Length length, LeftOut* left_out) {
  std::size_t fixed = lines_before;
  std::vector<std::size_t> sizes;
  for (const Section& section : sections) {
    if (section.text.empty() && section.table.empty()) continue;
    // The empty line, the text and the titles.
    fixed += 1 + CountLines(section.text) + (section.table.empty() ? 0 : 1);
    sizes.push_back(section.table.line_count());
  }
  const std::size_t most = length == Length::kFull
                               ? TextTable::kAllLines
                               : LinesPerTable(sizes, kMostLines - std::min(kMostLines, fixed));
  std::string text;
  for (const Section& section : sections) {
    if (section.text.empty() && section.table.empty()) continue;
    absl::StrAppend(&text, "\n", section.text);
    if (section.table.empty()) continue;
    absl::StrAppend(&text, section.table.Render(most));
    left_out->Add(section.table.RowsBeyond(most), section.noun);
  }
  return text;
}

std::string Count(std::size_t count, absl::string_view noun) {
  return absl::StrCat(count, " ", noun, count == 1 ? "" : "s");
}

std::size_t CountLines(absl::string_view text) {
  return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
}

}  // namespace gradsync
