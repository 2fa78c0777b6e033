// Memory that the daemon created and this process maps.

#ifndef CLIENT_SRC_MAPPED_MEMORY_H_
#define CLIENT_SRC_MAPPED_MEMORY_H_

#include <cstddef>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace gradsync::client {

// One shared, writable mapping of a memfd; the destructor unmaps it. The object is immutable, so
// thread-safe. Other processes write its contents.
class MappedMemory {
 public:
  // Maps the memfd, whose first `bytes` bytes are used. If `bytes` is 0, data() is null. `what`
  // names the memory in errors.
  //   INTERNAL            PROTOCOL_VIOLATION: the memfd is smaller, or can still shrink, so that
  //                       this process could get SIGBUS.
  //   RESOURCE_EXHAUSTED  MEMORY: no address space.
  static absl::StatusOr<std::shared_ptr<MappedMemory>> Map(int memfd, std::size_t bytes,
                                                           absl::string_view what);
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;
  ~MappedMemory();

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

  // Makes the kernel allocate every page of the memfd now, near this process and charged to its
  // cgroup. Then seals the pages, as the daemon demands: nobody can free a page or map the memfd
  // writable any more. `memfd`: the one that is mapped.
  //   RESOURCE_EXHAUSTED  MEMORY: the machine or the cgroup has no memory left.
  //   UNIMPLEMENTED       the kernel is older than Linux 5.1.
  absl::Status PopulateAndSeal(int memfd) const;

 private:
  MappedMemory(std::byte* data, std::size_t size, std::size_t mapped)
      : data_(data), size_(size), mapped_(mapped) {}

  std::byte* const data_;
  const std::size_t size_;
  const std::size_t mapped_;  // the memfd's size, which may be larger
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_MAPPED_MEMORY_H_
