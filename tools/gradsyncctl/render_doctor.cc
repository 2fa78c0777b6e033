#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/gradsyncctl/render.h"
#include "tools/gradsyncctl/text_table.h"

namespace gradsync {
namespace {

absl::string_view Mark(Verdict verdict) {
  switch (verdict) {
    case Verdict::kOk:
      return "ok";
    case Verdict::kWarning:
      return "WARN";
    case Verdict::kFailure:
      break;
  }
  return "FAIL";
}

}  // namespace

std::string RenderDoctor(const std::vector<Finding>& findings) {
  std::string text;
  std::size_t warnings = 0;
  std::size_t failures = 0;
  for (const Finding& finding : findings) {
    warnings += finding.verdict == Verdict::kWarning ? 1 : 0;
    failures += finding.verdict == Verdict::kFailure ? 1 : 0;
    absl::StrAppendFormat(&text, "%-4s  %-14s  %s\n", Mark(finding.verdict), finding.check,
                          Printable(finding.what));
    if (!finding.remedy.empty()) {
      absl::StrAppendFormat(&text, "%22s-> %s\n", "", Printable(finding.remedy));
    }
  }
  absl::StrAppend(&text, "\n",
                  warnings + failures == 0
                      ? "all well"
                      : absl::StrCat(Count(failures, "failure"), ", ", Count(warnings, "warning")),
                  "\n");
  return text;
}

}  // namespace gradsync
