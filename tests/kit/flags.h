// The command lines of test programs.

#ifndef TESTS_KIT_FLAGS_H_
#define TESTS_KIT_FLAGS_H_

#include <cstddef>
#include <map>
#include <string>
#include <utility>

namespace gradsync {

// The words after the program's name, "--name=value" or "--name", over `defaults`. A name without a
// value has "". A test starts the program: unknown names are not refused.
inline std::map<std::string, std::string> FlagsOf(
    int argc, char** argv, std::map<std::string, std::string> defaults = {}) {
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const std::size_t equals = word.find('=');
    defaults[word.substr(0, equals)] = equals == std::string::npos ? "" : word.substr(equals + 1);
  }
  return defaults;
}

}  // namespace gradsync

#endif  // TESTS_KIT_FLAGS_H_
