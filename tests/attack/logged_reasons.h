// The reasons that a daemon's log gives.

#ifndef TESTS_ATTACK_LOGGED_REASONS_H_
#define TESTS_ATTACK_LOGGED_REASONS_H_

#include <cstddef>
#include <set>
#include <sstream>
#include <string>

namespace gradsync::attack {

// The fields `why` of the lines with these words.
inline std::set<std::string> LoggedReasons(const std::string& log, const std::string& words) {
  const std::string begin = " why=\"";
  std::set<std::string> reasons;
  std::istringstream lines(log);
  for (std::string line; std::getline(lines, line);) {
    if (line.find(words) == std::string::npos) continue;
    const std::size_t found = line.find(begin);
    if (found == std::string::npos) continue;
    const std::size_t first = found + begin.size();
    reasons.insert(line.substr(first, line.find('"', first) - first));
  }
  return reasons;
}

}  // namespace gradsync::attack

#endif  // TESTS_ATTACK_LOGGED_REASONS_H_
