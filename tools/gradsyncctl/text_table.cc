#include "tools/gradsyncctl/text_table.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"

namespace gradsync {
namespace {

constexpr absl::string_view kGap = "  ";

// Of UTF-8 without wide characters.
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

void TextTable::AddRow(std::vector<std::string> cells) {
  cells.resize(columns_.size());
  for (std::string& cell : cells) cell = Printable(cell);
  lines_.push_back({std::move(cells), ""});
}

void TextTable::AddNote(absl::string_view text) { lines_.push_back({{}, Printable(text)}); }

std::string TextTable::Render() const {
  Cells titles;
  std::vector<std::size_t> widths;
  for (const Column& column : columns_) {
    titles.push_back(column.title);
    widths.push_back(Width(column.title));
  }
  for (const Line& line : lines_) {
    for (std::size_t i = 0; i < line.cells.size(); ++i) {
      widths[i] = std::max(widths[i], Width(line.cells[i]));
    }
  }
  std::string text;
  AppendLine(columns_, widths, titles, &text);
  for (const Line& line : lines_) {
    if (line.cells.empty()) {
      absl::StrAppend(&text, line.note, "\n");
    } else {
      AppendLine(columns_, widths, line.cells, &text);
    }
  }
  return text;
}

}  // namespace gradsync
