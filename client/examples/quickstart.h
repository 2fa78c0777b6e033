// The quick start: a daemon, some trainers, on one node or several, and proof that they learned
// what one process would have learned.

#ifndef CLIENT_EXAMPLES_QUICKSTART_H_
#define CLIENT_EXAMPLES_QUICKSTART_H_

#include <cstdint>
#include <string>

#include "client/examples/launcher.h"
#include "client/examples/recipe.h"
#include "client/examples/text_style.h"

namespace gradsync::examples {

struct QuickstartOptions {
  Programs programs;
  std::uint64_t nodes = 1;
  std::uint64_t ranks = 2;  // on each node
  std::uint64_t steps = Recipe().steps;
  std::string json;                         // "": no file
  std::string gradsyncctl = "gradsyncctl";  // how to call it
  bool keep = false;                        // the daemon stays up until Enter or Ctrl-C
};

// Runs it, printing to standard output and errors to standard error. Returns the exit code: 0 all
// is as it has to be, 1 not (said why), 128 + the signal's number if one ended it. Leaves no
// process, socket, file or shared memory behind.
int RunQuickstart(const QuickstartOptions& options, const TextStyle& style);

}  // namespace gradsync::examples

#endif  // CLIENT_EXAMPLES_QUICKSTART_H_
