#include "daemon/arena/cuda_semaphore_page.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cassert>

#include "absl/strings/str_cat.h"
#include "proto/gradsync/shared_memory.h"

namespace gradsync::daemon {
namespace {

std::size_t BucketOffset(std::size_t bucket) {
  return sizeof(SemaphorePageHeader) + bucket * sizeof(BucketSemaphore);
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaSemaphorePage>> CudaSemaphorePage::Register(
    const CudaDriver* driver, UniqueFd memory, std::size_t buckets) {
  struct stat file;
  if (fstat(memory.get(), &file) != 0) return absl::ErrnoToStatus(errno, "fstat of semaphores");
  const auto bytes = static_cast<std::size_t>(file.st_size);
  if (bytes < BucketOffset(buckets)) {
    return absl::InvalidArgumentError(
        absl::StrCat(bytes, " bytes of semaphores are too few for ", buckets, " buckets"));
  }
  void* const address =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, memory.get(), 0);
  if (address == MAP_FAILED) return absl::ErrnoToStatus(errno, "mmap of semaphores");
  auto page =
      std::unique_ptr<CudaSemaphorePage>(new CudaSemaphorePage(driver, buckets, address, bytes));
  absl::Status status = driver->cuMemHostRegister(
      address, bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
  if (!status.ok()) return status;
  page->registered_ = true;
  status = driver->cuMemHostGetDevicePointer(&page->device_address_, address, 0);
  if (!status.ok()) return status;
  return page;
}

CudaSemaphorePage::CudaSemaphorePage(const CudaDriver* driver, std::size_t buckets, void* address,
                                     std::size_t bytes)
    : driver_(driver), buckets_(buckets), address_(address), bytes_(bytes) {}

CudaSemaphorePage::~CudaSemaphorePage() {
  if (registered_) driver_->cuMemHostUnregister.Result(address_);
  munmap(address_, bytes_);
}

bool CudaSemaphorePage::Ready(std::size_t bucket, std::uint64_t step) const {
  assert(bucket < buckets_);
  const auto* const semaphore = reinterpret_cast<const BucketSemaphore*>(
      static_cast<const std::byte*>(address_) + BucketOffset(bucket));
  return SemaphoreReleased(semaphore->ready.load(std::memory_order_acquire), step);
}

CUdeviceptr CudaSemaphorePage::DoneAddress(std::size_t bucket) const {
  assert(bucket < buckets_);
  return device_address_ + BucketOffset(bucket) + offsetof(BucketSemaphore, done);
}

}  // namespace gradsync::daemon
