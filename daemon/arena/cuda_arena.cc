#include "daemon/arena/cuda_arena.h"

#include <fcntl.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {
namespace {

// The driver exports cudaMalloc'ed memory in blocks of this size. Smaller allocations would share a
// block, and a trainer could see the memory of another one.
constexpr std::size_t kLegacyGranularity = std::size_t{2} << 20;

std::size_t RoundUp(std::size_t bytes, std::size_t unit) {
  return (std::max<std::size_t>(bytes, 1) + unit - 1) / unit * unit;
}

CUmemAllocationProp Properties(CUdevice device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

// Empty if allocations can be exported as descriptors, else the reason.
std::string WhyNoDescriptors(const CudaDriver& driver, CUdevice device) {
  int managed = 0;
  int exported = 0;
  if (driver.cuDeviceGetAttribute.Result(&managed,
                                         CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                                         device) != CUDA_SUCCESS ||
      managed == 0) {
    return "the device has no virtual memory management";
  }
  if (driver.cuDeviceGetAttribute.Result(
          &exported, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device) !=
          CUDA_SUCCESS ||
      exported == 0) {
    return "the device exports no allocation as a file descriptor";
  }
  return "";
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaArena>> CudaArena::Create(const CudaDriver* driver,
                                                             CUdevice device, std::size_t bytes,
                                                             CUstream stream) {
  auto arena = std::unique_ptr<CudaArena>(new CudaArena(driver, bytes));
  arena->why_legacy_ = WhyNoDescriptors(*driver, device);
  absl::Status status;
  if (arena->why_legacy_.empty()) {
    status = arena->Allocate(Properties(device));
    // This is the first call that fails if a container or a virtual GPU forbids the export.
    if (absl::IsFailedPrecondition(status) && !arena->created_) {
      arena->why_legacy_ = std::string(status.message());
    }
  }
  if (!arena->why_legacy_.empty()) status = arena->AllocateLegacy();
  if (status.ok()) status = arena->Zero(stream);
  if (absl::IsResourceExhausted(status)) {
    std::size_t free = 0;
    std::size_t total = 0;
    driver->cuMemGetInfo.Result(&free, &total);
    return MakeError(absl::StatusCode::kResourceExhausted, reason::kGpuOutOfMemory,
                     absl::StrCat("an arena needs ", arena->bytes_, " bytes of the GPU, which has ",
                                  free, " free of ", total,
                                  "; limit what other programs take of it (PyTorch: "
                                  "torch.cuda.set_per_process_memory_fraction)"));
  }
  if (!status.ok()) return status;
  return arena;
}

CudaArena::CudaArena(const CudaDriver* driver, std::size_t bytes)
    : driver_(driver), bytes_(bytes) {}

// Errors are ignored: a destructor cannot return them, and the process ends soon after the first.
CudaArena::~CudaArena() {
  if (sharing_ == CudaSharing::kLegacyIpc) {
    if (address_ != 0) driver_->cuMemFree.Result(address_);
    return;
  }
  if (mapped_) driver_->cuMemUnmap.Result(address_, bytes_);
  if (address_ != 0) driver_->cuMemAddressFree.Result(address_, bytes_);
  if (created_) driver_->cuMemRelease.Result(handle_);
}

absl::Status CudaArena::Allocate(const CUmemAllocationProp& properties) {
  std::size_t granularity = 0;
  absl::Status status = driver_->cuMemGetAllocationGranularity(
      &granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  if (!status.ok()) return status;
  bytes_ = RoundUp(bytes_, granularity);
  status = driver_->cuMemCreate(&handle_, bytes_, &properties, 0);
  if (!status.ok()) return status;
  created_ = true;
  status = driver_->cuMemAddressReserve(&address_, bytes_, granularity, 0, 0);
  if (!status.ok()) return status;
  status = driver_->cuMemMap(address_, bytes_, 0, handle_, 0);
  if (!status.ok()) return status;
  mapped_ = true;
  CUmemAccessDesc access{};
  access.location = properties.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return driver_->cuMemSetAccess(address_, bytes_, &access, 1);
}

absl::Status CudaArena::AllocateLegacy() {
  sharing_ = CudaSharing::kLegacyIpc;
  bytes_ = RoundUp(bytes_, kLegacyGranularity);
  return driver_->cuMemAlloc(&address_, bytes_);
}

absl::Status CudaArena::Zero(CUstream stream) {
  const absl::Status status = driver_->cuMemsetD8Async(address_, 0, bytes_, stream);
  return status.ok() ? driver_->cuStreamSynchronize(stream) : status;
}

absl::StatusOr<UniqueFd> CudaArena::Export() const {
  int fd = -1;
  const absl::Status status = driver_->cuMemExportToShareableHandle(
      &fd, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  if (!status.ok()) return status;
  UniqueFd exported(fd);
  fcntl(fd, F_SETFD, FD_CLOEXEC);
  return exported;
}

absl::StatusOr<std::array<char, CU_IPC_HANDLE_SIZE>> CudaArena::IpcHandle() const {
  CUipcMemHandle handle{};
  const absl::Status status = driver_->cuIpcGetMemHandle(&handle, address_);
  if (!status.ok()) return status;
  std::array<char, CU_IPC_HANDLE_SIZE> bytes;
  std::memcpy(bytes.data(), handle.reserved, bytes.size());
  return bytes;
}

}  // namespace gradsync::daemon
