// Aligned columns for a terminal.

#ifndef TOOLS_GRADSYNCCTL_TEXT_TABLE_H_
#define TOOLS_GRADSYNCCTL_TEXT_TABLE_H_

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
  struct Column {
    std::string title;
    Align align = Align::kLeft;
  };

  explicit TextTable(std::vector<Column> columns);

  // As many cells as columns. Cells are made Printable().
  void AddRow(std::vector<std::string> cells);
  // An unaligned line below the last row.
  void AddNote(absl::string_view text);

  bool empty() const { return lines_.empty(); }
  // Titles, then the lines; two spaces between columns, none at the end of a line.
  std::string Render() const;

 private:
  using Cells = std::vector<std::string>;
  struct Line {
    Cells cells;  // empty: a note
    std::string note;
  };

  std::vector<Column> columns_;
  std::vector<Line> lines_;
};

}  // namespace gradsync

#endif  // TOOLS_GRADSYNCCTL_TEXT_TABLE_H_
