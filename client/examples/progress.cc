#include "client/examples/progress.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace gradsync::examples {
namespace {

constexpr std::size_t kBarColumns = 32;
constexpr std::uint64_t kPlainLines = 6;

std::string Repeat(const std::string& glyph, std::size_t times) {
  std::string text;
  for (std::size_t i = 0; i < times; ++i) text += glyph;
  return text;
}

}  // namespace

std::string Progress::Update(const ProgressReport& report) {
  const std::string figures =
      absl::StrFormat("loss %.4f   test accuracy %.1f %%", report.loss, report.accuracy);
  if (!style_.terminal) {
    if (report.step < next_line_ && report.step < steps_) return "";
    next_line_ = report.step + std::max<std::uint64_t>(1, steps_ / kPlainLines);
    return absl::StrFormat("  step %d of %d   %s\n", report.step, steps_, figures);
  }
  const std::size_t filled =
      static_cast<std::size_t>(std::min(report.step, steps_) * kBarColumns / steps_);
  const std::string done = style_.unicode ? "━" : "=";
  const std::string left = style_.unicode ? "─" : "-";
  return absl::StrCat("\r\033[K  ", style_.Green(Repeat(done, filled)),
                      style_.Dim(Repeat(left, kBarColumns - filled)), "  ", report.step, "/",
                      steps_, "   ", figures, report.step >= steps_ ? "\n" : "");
}

}  // namespace gradsync::examples
