// Flags of the example programs: --name VALUE or --name=VALUE. Strict, and --help is made from the
// same declarations. (Abseil's flags end a program with 1 on a usage error; these programs
// promise 2.)

#ifndef CLIENT_EXAMPLES_COMMAND_LINE_H_
#define CLIENT_EXAMPLES_COMMAND_LINE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace gradsync::examples {

// Declare the flags, then Parse() once. The variables outlive this and hold the defaults before.
// Not thread-safe.
class CommandLine {
 public:
  // `introduction` stands above the flags in Help().
  explicit CommandLine(absl::string_view introduction);

  void Text(absl::string_view name, absl::string_view placeholder, absl::string_view help,
            std::string* value);
  void Number(absl::string_view name, absl::string_view help, std::uint64_t least,
              std::uint64_t most, std::uint64_t* value);
  void Choice(absl::string_view name, std::vector<std::string> choices, absl::string_view help,
              std::string* value);
  void Switch(absl::string_view name, absl::string_view help, bool* value);

  // False: --help was asked for. INVALID_ARGUMENT names the flag and says what it takes.
  absl::StatusOr<bool> Parse(int argc, char** argv) const;
  std::string Help() const;

 private:
  struct Flag {
    std::string name;
    std::string placeholder;  // "": a switch, which takes no value
    std::string help;
    std::function<absl::Status(absl::string_view)> set;
  };

  const std::string introduction_;
  std::vector<Flag> flags_;
};

}  // namespace gradsync::examples

#endif  // CLIENT_EXAMPLES_COMMAND_LINE_H_
