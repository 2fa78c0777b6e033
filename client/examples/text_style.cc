#include "client/examples/text_style.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

namespace gradsync::examples {
namespace {

absl::string_view Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Where no locale is set (a bare container) the terminal nearly always takes UTF-8.
bool LocaleIsAscii() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const absl::string_view value = Variable(name);
    if (!value.empty()) return value == "C" || value == "POSIX";
  }
  return false;
}

}  // namespace

TextStyle TextStyle::OfStandardOutput() {
  TextStyle style;
  style.unicode = !LocaleIsAscii();
  style.terminal = isatty(STDOUT_FILENO) != 0 && Variable("TERM") != "dumb";
  style.color = style.terminal && Variable("NO_COLOR").empty();
  winsize size;
  if (style.terminal && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    style.columns = std::clamp<std::size_t>(size.ws_col, 60, 140);
  }
  return style;
}

}  // namespace gradsync::examples
