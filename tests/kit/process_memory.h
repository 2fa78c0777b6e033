// How much memory a process has.

#ifndef TESTS_KIT_PROCESS_MEMORY_H_
#define TESTS_KIT_PROCESS_MEMORY_H_

#include <sys/types.h>

#include <cstdint>
#include <fstream>
#include <string>

namespace gradsync {

// A size in /proc/PID/status: "VmRSS" is now, "VmHWM" the most ever. 0: the process has ended.
inline std::uint64_t MemoryBytes(pid_t pid, const std::string& field) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(field + ":", 0) == 0) return std::stoull(line.substr(field.size() + 1)) * 1024;
  }
  return 0;
}

}  // namespace gradsync

#endif  // TESTS_KIT_PROCESS_MEMORY_H_
