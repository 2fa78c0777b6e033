// Aligned columns for a terminal.

#ifndef TOOLS_GRADSYNCCTL_TEXT_TABLE_H_
#define TOOLS_GRADSYNCCTL_TEXT_TABLE_H_

#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace gradsync {

// `text` with every control character replaced by '?': names and messages come from other users'
// processes and must not steer the terminal.
std::string Printable(absl::string_view text);

// Thread-compatible.
class TextTable {
 public:
  enum class Align { kLeft, kRight };
  static constexpr std::size_t kAllLines = std::numeric_limits<std::size_t>::max();
  struct Column {
    std::string title;
    Align align = Align::kLeft;
  };

  // Without columns there are only notes, and no titles.
  explicit TextTable(std::vector<Column> columns);

  // As many cells as columns. Cells are made Printable(). A table that is cut keeps its worst rows.
  void AddRow(std::vector<std::string> cells, double badness = 0);
  // An unaligned line below the last row. Without columns: a row of its own.
  void AddNote(absl::string_view text);

  bool empty() const { return rows_.empty(); }
  // Rows and notes.
  std::size_t line_count() const;
  // Titles, then the rows; two spaces between columns, none at the end of a line. With more than
  // `most_lines` lines: the worst rows that fit, the worst first.
  std::string Render(std::size_t most_lines = kAllLines) const;
  // How many rows Render() leaves out.
  std::size_t RowsBeyond(std::size_t most_lines) const;

 private:
  using Cells = std::vector<std::string>;
  struct Row {
    Cells cells;  // empty: only notes
    std::vector<std::string> notes;
    double badness;
  };

  // Those that fit, in the order in which they are shown.
  std::vector<const Row*> Choose(std::size_t most_lines) const;

  std::vector<Column> columns_;
  std::vector<Row> rows_;
};

}  // namespace gradsync

#endif  // TOOLS_GRADSYNCCTL_TEXT_TABLE_H_
