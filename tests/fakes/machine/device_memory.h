// The memory of a fake GPU: one file in shared memory per allocation.
//
// Every open file description of such a file holds a shared flock(2). The kernel drops it when the
// last descriptor and the last mapping end, in any process, however the process ends. So an
// allocation lives as long as CUDA says. Any process can see which allocations live: an exclusive
// lock succeeds only on the file of an allocation that no process has.
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
  kContext,       // the memory of a primary context
  kCommunicator,  // the memory of an NCCL communicator
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

// One reference to an allocation. A mapping of fd() at offset kHeaderBytes is another reference.
class Allocation {
 public:
  // nullptr if the GPU lacks free memory.
  static std::shared_ptr<Allocation> Create(const StateFolder& folder, std::uint32_t gpu,
                                            MemoryKind kind, std::size_t bytes);
  // Shares the open file description. nullptr if `fd` is not an allocation of this machine.
  static std::shared_ptr<Allocation> Adopt(const StateFolder& folder, daemon::UniqueFd fd);
  // nullptr if no process has the allocation any more.
  static std::shared_ptr<Allocation> Find(const StateFolder& folder, std::uint32_t gpu,
                                          std::uint64_t id);

  const AllocationHeader& header() const { return header_; }
  int fd() const { return fd_.get(); }

 private:
  Allocation(daemon::UniqueFd fd, const AllocationHeader& header)
      : fd_(std::move(fd)), header_(header) {}

  const daemon::UniqueFd fd_;
  const AllocationHeader header_;
};

// The live allocations of a GPU, in any order. Removes the files of all others.
std::vector<AllocationHeader> LiveAllocations(const StateFolder& folder, std::uint32_t gpu);
std::size_t UsedBytes(const StateFolder& folder, std::uint32_t gpu);

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_MACHINE_DEVICE_MEMORY_H_
