// The memory of a fake GPU: a file in shared memory per allocation, shared by processes.
//
// Every open file description of such a file holds a shared flock(2), which the kernel drops when
// the last descriptor AND the last mapping of it are gone, in whichever process, however that
// ended. So an allocation lives exactly as long as CUDA says, and what lives can be told from
// outside: a file that can be locked exclusively is dead.
//
// Thread-safe and process-safe: files are made, counted and removed under a lock per GPU.

#ifndef TESTS_FAKES_MACHINE_DEVICE_MEMORY_H_
#define TESTS_FAKES_MACHINE_DEVICE_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "daemon/base/unique_fd.h"
#include "tests/fakes/machine/state_folder.h"

namespace gradsync::fakes {

enum class MemoryKind : std::uint32_t {
  kVirtual,       // cuMemCreate
  kLegacy,        // cuMemAlloc
  kContext,       // what a primary context takes
  kCommunicator,  // what NCCL takes
};

// The first page of the file; the memory follows it.
struct AllocationHeader {
  std::uint64_t magic;
  std::uint64_t id;  // the file's name
  std::uint64_t bytes;
  std::uint32_t gpu;
  MemoryKind kind;
  std::int32_t pid;  // of the process that allocated it
  std::uint32_t uid;
};
inline constexpr std::size_t kHeaderBytes = 4096;

// One reference to an allocation. What is mapped from fd() at offset kHeaderBytes is one too.
class Allocation {
 public:
  // nullptr: the GPU has not so much free memory.
  static std::shared_ptr<Allocation> Create(const StateFolder& folder, std::uint32_t gpu,
                                            MemoryKind kind, std::size_t bytes);
  // Shares the open file description; nullptr if `fd` is not of an allocation of this machine.
  static std::shared_ptr<Allocation> Adopt(const StateFolder& folder, UniqueFd fd);
  // nullptr if it is dead.
  static std::shared_ptr<Allocation> Find(const StateFolder& folder, std::uint32_t gpu,
                                          std::uint64_t id);

  const AllocationHeader& header() const { return header_; }
  int fd() const { return fd_.get(); }

 private:
  Allocation(UniqueFd fd, const AllocationHeader& header) : fd_(std::move(fd)), header_(header) {}

  const UniqueFd fd_;
  const AllocationHeader header_;
};

// What lives on a GPU, in any order. Dead files are removed.
std::vector<AllocationHeader> LiveAllocations(const StateFolder& folder, std::uint32_t gpu);
std::size_t UsedBytes(const StateFolder& folder, std::uint32_t gpu);

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_MACHINE_DEVICE_MEMORY_H_
