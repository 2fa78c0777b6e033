// How the example draws on a terminal.

#ifndef CLIENT_EXAMPLES_TEXT_STYLE_H_
#define CLIENT_EXAMPLES_TEXT_STYLE_H_

#include <cstddef>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace gradsync::examples {

struct TextStyle {
  bool terminal = false;  // a person watches: lines may be redrawn
  bool color = false;     // ANSI escapes
  bool unicode = true;    // UTF-8, else ASCII
  std::size_t columns = 100;

  // Of standard output: is it a terminal, how wide, does NO_COLOR or TERM=dumb forbid colour, is
  // the locale plain C.
  static TextStyle OfStandardOutput();

  // `text` in an ANSI style such as "1" (bold) or "32" (green), if there is colour.
  std::string Paint(absl::string_view ansi, absl::string_view text) const {
    return color ? absl::StrCat("\033[", ansi, "m", text, "\033[0m") : std::string(text);
  }
  std::string Bold(absl::string_view text) const { return Paint("1", text); }
  std::string Dim(absl::string_view text) const { return Paint("2", text); }
  std::string Green(absl::string_view text) const { return Paint("32", text); }
  std::string Red(absl::string_view text) const { return Paint("31", text); }
};

}  // namespace gradsync::examples

#endif  // CLIENT_EXAMPLES_TEXT_STYLE_H_
