#include "tests/kit/memory_cgroup.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "gtest/gtest.h"

namespace gradsync {
namespace {

struct Root {
  const char* path;
  bool unified;
};
constexpr Root kRoots[] = {{"/sys/fs/cgroup/memory", false}, {"/sys/fs/cgroup", true}};

// Files of a cgroup, by its version.
const char* LimitFile(bool unified) { return unified ? "memory.max" : "memory.limit_in_bytes"; }
const char* BytesFile(bool unified) { return unified ? "memory.current" : "memory.usage_in_bytes"; }

}  // namespace

std::unique_ptr<MemoryCgroup> MemoryCgroup::Make(const std::string& name, std::string* why) {
  *why = "no cgroups that limit memory can be made here";
  for (const auto& [root, unified] : kRoots) {
    const std::string parent(root);
    if (access((parent + "/cgroup.procs").c_str(), W_OK) != 0) continue;
    if (unified) std::ofstream(parent + "/cgroup.subtree_control") << "+memory" << std::flush;
    std::string path = parent + "/gradsync-test-";
    path.append(std::to_string(getpid())).append("-").append(name);
    if (mkdir(path.c_str(), 0755) != 0) {
      *why = "mkdir " + path + ": " + std::strerror(errno);
      continue;
    }
    if (access((path + "/" + LimitFile(unified)).c_str(), W_OK) == 0) {
      return std::unique_ptr<MemoryCgroup>(new MemoryCgroup(path, unified));
    }
    rmdir(path.c_str());
  }
  return nullptr;
}

MemoryCgroup::~MemoryCgroup() {
  EXPECT_EQ(rmdir(path_.c_str()), 0) << path_ << ": " << std::strerror(errno);
}

std::vector<std::string> MemoryCgroup::CommandPrefix() const {
  return {"/bin/sh", "-c", "echo $$ > \"$0/cgroup.procs\" && exec \"$@\"", path_};
}

std::uint64_t MemoryCgroup::Bytes() const {
  std::uint64_t bytes = 0;
  std::ifstream(path_ + "/" + BytesFile(unified_)) >> bytes;
  return bytes;
}

bool MemoryCgroup::Limit(std::uint64_t bytes) {
  if (!Write(LimitFile(unified_), std::to_string(bytes))) return false;
  // A kernel without swap accounting lacks these files.
  if (unified_) {
    Write("memory.swap.max", "0");
  } else {
    Write("memory.memsw.limit_in_bytes", std::to_string(bytes));
  }
  return true;
}

bool MemoryCgroup::Write(const std::string& file, const std::string& value) const {
  std::ofstream out(path_ + "/" + file);
  out << value << std::flush;
  return out.good();
}

}  // namespace gradsync
