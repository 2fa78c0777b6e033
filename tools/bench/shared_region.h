// Memory of the bench's buffers: private, or shared by the ranks.

#ifndef TOOLS_BENCH_SHARED_REGION_H_
#define TOOLS_BENCH_SHARED_REGION_H_

#include <cstddef>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

namespace gradsync::bench {

// Move-only; unmaps in its destructor. Every page is populated on mapping.
class SharedRegion {
 public:
  // A file that several processes map; it gets a size of `bytes`.
  static absl::StatusOr<SharedRegion> Open(const std::string& path, std::size_t bytes);
  // `bytes` zeroed bytes of private memory, for an implementation that shares none.
  static absl::StatusOr<SharedRegion> Private(std::size_t bytes);

  SharedRegion() = default;
  SharedRegion(SharedRegion&& other) noexcept { *this = std::move(other); }
  SharedRegion& operator=(SharedRegion&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~SharedRegion();

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  static absl::StatusOr<SharedRegion> Map(int fd, std::size_t bytes, int flags);

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  int fd_ = -1;
};

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_SHARED_REGION_H_
