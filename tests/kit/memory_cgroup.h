// A cgroup whose memory is limited, for processes of a test.

#ifndef TESTS_KIT_MEMORY_CGROUP_H_
#define TESTS_KIT_MEMORY_CGROUP_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace gradsync {

// Needs root, outside Bazel's sandbox. Works with cgroups of version 1 and 2. Declare it before its
// processes: the destructor removes the cgroup, and fails the test if a process is left. Not
// thread-safe.
class MemoryCgroup {
 public:
  // `name` tells the cgroups of this process apart. Null: it cannot be made, and `why` says why.
  static std::unique_ptr<MemoryCgroup> Make(const std::string& name, std::string* why);
  ~MemoryCgroup();
  MemoryCgroup(const MemoryCgroup&) = delete;
  MemoryCgroup& operator=(const MemoryCgroup&) = delete;

  // The words before a command that run it in this cgroup.
  std::vector<std::string> CommandPrefix() const;
  // What its processes have allocated.
  std::uint64_t Bytes() const;
  // From now on they may allocate so much, swap included. The kernel ends one that wants more.
  // False: the kernel does not take it.
  bool Limit(std::uint64_t bytes);

 private:
  MemoryCgroup(std::string path, bool unified) : path_(std::move(path)), unified_(unified) {}
  bool Write(const std::string& file, const std::string& value) const;

  const std::string path_;
  const bool unified_;  // version 2
};

}  // namespace gradsync

#endif  // TESTS_KIT_MEMORY_CGROUP_H_
