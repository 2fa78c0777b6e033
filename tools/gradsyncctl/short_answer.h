// Answers that stay readable however much there is to say: totals, the worst rows of each table,
// and one line that says what was left out.

#ifndef TOOLS_GRADSYNCCTL_SHORT_ANSWER_H_
#define TOOLS_GRADSYNCCTL_SHORT_ANSWER_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "tools/gradsyncctl/text_table.h"

namespace gradsync {

enum class Length { kShort, kFull };

// About the most lines of a short answer. With many tables it has more: a few rows of each.
inline constexpr std::size_t kMostLines = 40;

// The parts of an answer that a short answer leaves out. Thread-compatible.
class LeftOut {
 public:
  // `noun` is a plural, such as "jobs". A count of 0 adds nothing.
  void Add(std::size_t count, absl::string_view noun);

  // "left out: 54 jobs, 12 warnings (--all shows them)\n" behind an empty line, or "" if nothing
  // is.
  std::string Line() const;

 private:
  std::vector<std::string> parts_;
};

// A table of an answer, its worst rows first.
struct Section {
  std::string noun;  // of the rows, a plural
  TextTable table;
  std::string text;  // lines above the table, which are always shown
};

// Sections with an empty line before each; those without text and rows are skipped. A short answer
// shows the first rows of each table, and adds the number of other rows to `left_out`.
// `lines_before`: lines of the answer before the sections.
std::string RenderSections(const std::vector<Section>& sections, std::size_t lines_before,
                           Length length, LeftOut* left_out);

// "1 job", "2 jobs".
std::string Count(std::size_t count, absl::string_view noun);

std::size_t CountLines(absl::string_view text);

}  // namespace gradsync

#endif  // TOOLS_GRADSYNCCTL_SHORT_ANSWER_H_
