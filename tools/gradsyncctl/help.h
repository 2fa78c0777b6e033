// What --help prints.

#ifndef TOOLS_GRADSYNCCTL_HELP_H_
#define TOOLS_GRADSYNCCTL_HELP_H_

#include "absl/strings/string_view.h"
#include "tools/gradsyncctl/arguments.h"

namespace gradsync {

// The help of one command; kNone: of the program.
absl::string_view HelpText(CtlCommand command);

}  // namespace gradsync

#endif  // TOOLS_GRADSYNCCTL_HELP_H_
