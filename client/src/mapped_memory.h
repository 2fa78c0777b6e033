// Memory that the daemon created and this process maps.

#ifndef CLIENT_SRC_MAPPED_MEMORY_H_
#define CLIENT_SRC_MAPPED_MEMORY_H_

#include <cstddef>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace gradsync::client {

// One shared, writable mapping of a memfd; unmapped with the object. Its contents are everybody's;
// the object itself is immutable.
class MappedMemory {
 public:
  // Maps the first `bytes` bytes; 0 maps nothing and gives a null `data()`. `what` names it in
  // errors.
  //   INTERNAL            the memfd is smaller, or may still shrink (which would kill this process
  //   with SIGBUS). RESOURCE_EXHAUSTED  no address space.
  static absl::StatusOr<std::shared_ptr<MappedMemory>> Map(int memfd, std::size_t bytes,
                                                           absl::string_view what);
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;
  ~MappedMemory();

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

  // Makes the kernel allocate the pages of the first `bytes` bytes now: near this process, and
  // charged to it.
  //   RESOURCE_EXHAUSTED  the machine or the cgroup has no memory left.
  absl::Status Populate(std::size_t bytes) const;

 private:
  MappedMemory(std::byte* data, std::size_t size) : data_(data), size_(size) {}

  std::byte* const data_;
  const std::size_t size_;
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_MAPPED_MEMORY_H_
