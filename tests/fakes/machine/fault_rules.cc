#include "tests/fakes/machine/fault_rules.h"

#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <sstream>
#include <utility>

namespace gradsync::fakes {
namespace {

std::vector<std::string> Lines(const std::string& text, char separator) {
  std::vector<std::string> lines;
  std::istringstream input(text);
  for (std::string line; std::getline(input, line, separator);) lines.push_back(line);
  return lines;
}

}  // namespace

FaultRules::FaultRules(const StateFolder& folder) : folder_(folder) {
  daemon::MutexLock lock(&mutex_);
  if (const char* const rules = std::getenv(kFaultsVariable)) {
    for (const std::string& line : Lines(rules, ';')) from_environment_.push_back(Parse(line));
  }
  ReloadLocked();
}

FaultRules::Rule FaultRules::Parse(const std::string& line) {
  Rule rule;
  std::istringstream words(line);
  words >> rule.function >> rule.first;
  if (words.peek() == '+') rule.open_ended = words.get() == '+';
  words >> rule.action;
  const bool has_code = rule.action == "error" || rule.action == "sticky" || rule.action == "async";
  if (has_code) words >> rule.code;
  if (!words) rule.function.clear();
  std::string owner;
  if (words >> owner && owner != "pid=" + std::to_string(getpid())) rule.function.clear();
  rule.line = line;
  return rule;
}

// A rule that is in the old and the new list keeps its count.
void FaultRules::ReloadLocked() {
  generation_ = folder_.board().fault_generation.load();
  std::vector<Rule> rules;
  for (const std::string& line : Lines(folder_.ReadFile("faults"), '\n')) {
    const std::size_t index = rules.size();
    if (index < from_file_.size() && from_file_[index].line == line) {
      rules.push_back(std::move(from_file_[index]));
    } else {
      rules.push_back(Parse(line));
    }
  }
  from_file_ = std::move(rules);
}

bool FaultRules::Stands(const std::string& line) const {
  for (const std::string& standing : Lines(folder_.ReadFile("faults"), '\n')) {
    if (standing == line) return true;
  }
  return false;
}

Fault FaultRules::Meet(const char* function) {
  Rule met;
  bool from_file = false;
  {
    daemon::MutexLock lock(&mutex_);
    if (folder_.board().fault_generation.load() != generation_) ReloadLocked();
    for (std::vector<Rule>* rules : {&from_environment_, &from_file_}) {
      for (Rule& rule : *rules) {
        if (rule.function != function) continue;
        ++rule.calls;
        if (rule.calls == rule.first || (rule.open_ended && rule.calls > rule.first)) {
          met = rule;
          from_file = rules == &from_file_;
        }
      }
    }
  }
  if (met.function.empty()) return {};
  folder_.Note(kFault, met.line);
  if (met.action == "kill") {
    kill(getpid(), SIGKILL);
  } else if (met.action == "stop") {
    kill(getpid(), SIGSTOP);
  } else if (met.action == "hang") {
    for (;;) {
      const std::uint32_t generation = folder_.board().fault_generation.load();
      if (from_file && !Stands(met.line)) return {};
      FutexWait(folder_.board().fault_generation, generation, -1);
    }
  } else if (met.action == "error") {
    return {Fault::Kind::kError, met.code};
  } else if (met.action == "sticky") {
    return {Fault::Kind::kSticky, met.code};
  } else if (met.action == "async") {
    return {Fault::Kind::kAsync, met.code};
  }
  return {};
}

}  // namespace gradsync::fakes
