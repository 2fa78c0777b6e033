#include "tools/gradsyncctl/text_table.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"

namespace gradsync {
namespace {

constexpr absl::string_view kGap = "  ";

// Columns that UTF-8 text takes on a terminal, without wide characters.
std::size_t Width(absl::string_view text) {
  return static_cast<std::size_t>(std::count_if(
      text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) >> 6) != 2; }));
}

void AppendLine(const std::vector<TextTable::Column>& columns,
                const std::vector<std::size_t>& widths, const std::vector<std::string>& cells,
                std::string* out) {
  std::string line;
  for (std::size_t i = 0; i < columns.size(); ++i) {
    const std::string padding(widths[i] - Width(cells[i]), ' ');
    if (i > 0) absl::StrAppend(&line, kGap);
    if (columns[i].align == TextTable::Align::kRight) {
      absl::StrAppend(&line, padding, cells[i]);
    } else {
      absl::StrAppend(&line, cells[i], padding);
    }
  }
  line.erase(line.find_last_not_of(' ') + 1);
  absl::StrAppend(out, line, "\n");
}

}  // namespace

std::string Printable(absl::string_view text) {
  std::string result;
  result.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0;
    if (byte < 0x20 || byte == 0x7F) {
      result += '?';
    } else if (byte == 0xC2 && next >= 0x80 && next <= 0x9F) {  // U+0080..U+009F
      result += '?';
      ++i;
    } else {
      result += text[i];
    }
  }
  return result;
}

TextTable::TextTable(std::vector<Column> columns) : columns_(std::move(columns)) {}

void TextTable::AddRow(std::vector<std::string> cells, double badness) {
  cells.resize(columns_.size());
  for (std::string& cell : cells) cell = Printable(cell);
  rows_.push_back({std::move(cells), {}, badness});
}

void TextTable::AddNote(absl::string_view text) {
  if (columns_.empty() || rows_.empty()) rows_.push_back({{}, {}, 0});
  rows_.back().notes.push_back(Printable(text));
}

std::size_t TextTable::line_count() const {
  std::size_t count = 0;
  for (const Row& row : rows_) count += (row.cells.empty() ? 0 : 1) + row.notes.size();
  return count;
}

std::vector<const TextTable::Row*> TextTable::Choose(std::size_t most_lines) const {
  std::vector<const Row*> chosen;
  for (const Row& row : rows_) chosen.push_back(&row);
  if (line_count() <= most_lines) return chosen;
  std::stable_sort(chosen.begin(), chosen.end(),
                   [](const Row* a, const Row* b) { return a->badness > b->badness; });
  std::size_t lines = 0;
  std::size_t count = 0;
  while (count < chosen.size()) {
    lines += (chosen[count]->cells.empty() ? 0 : 1) + chosen[count]->notes.size();
    if (count > 0 && lines > most_lines) break;
    ++count;
  }
  chosen.resize(count);
  return chosen;
}

std::size_t TextTable::RowsBeyond(std::size_t most_lines) const {
  return rows_.size() - Choose(most_lines).size();
}

std::string TextTable::Render(std::size_t most_lines) const {
  const std::vector<const Row*> rows = Choose(most_lines);
  Cells titles;
  std::vector<std::size_t> widths;
  for (const Column& column : columns_) {
    titles.push_back(column.title);
    widths.push_back(Width(column.title));
  }
  for (const Row* row : rows) {
    for (std::size_t i = 0; i < row->cells.size(); ++i) {
      widths[i] = std::max(widths[i], Width(row->cells[i]));
    }
  }
  std::string text;
  if (!columns_.empty()) AppendLine(columns_, widths, titles, &text);
  for (const Row* row : rows) {
    if (!row->cells.empty()) AppendLine(columns_, widths, row->cells, &text);
    for (const std::string& note : row->notes) absl::StrAppend(&text, note, "\n");
  }
  return text;
}

}  // namespace gradsync
