#include "tools/bench/cuda_rank.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"

namespace gradsync::bench {
namespace {

// The driver cannot allocate 0 bytes.
constexpr std::size_t kLeastBytes = 16;

// With unified addressing the driver knows host addresses from its own.
CUdeviceptr AddressOf(const std::byte* host) { return reinterpret_cast<CUdeviceptr>(host); }

}  // namespace

absl::StatusOr<std::unique_ptr<CudaRank>> CudaRank::Open(const ContestantOptions& options) {
  absl::StatusOr<std::unique_ptr<const daemon::CudaDriver>> opened =
      daemon::CudaDriver::Open(options.cuda_library);
  if (!opened.ok()) return opened.status();
  auto rank = absl::WrapUnique(new CudaRank(*std::move(opened)));
  const daemon::CudaDriver& driver = rank->driver();
  if (auto status = driver.StatusOfInit(driver.cuInit.Result(0)); !status.ok()) return status;
  absl::StatusOr<std::vector<daemon::CudaDevice>> devices = daemon::VisibleCudaDevices(driver);
  if (!devices.ok()) return devices.status();
  if (devices->size() < options.gpus) {
    return absl::FailedPreconditionError(
        absl::StrCat("--gpus ", options.gpus, ": this machine shows ", devices->size()));
  }
  rank->device_ = (*devices)[options.rank % options.gpus];
  absl::Status status = driver.cuDevicePrimaryCtxRetain(&rank->context_, rank->device_.handle);
  if (status.ok()) status = driver.cuCtxSetCurrent(rank->context_);
  if (status.ok()) {
    status = driver.cuStreamCreateWithPriority(&rank->stream_, CU_STREAM_NON_BLOCKING, 0);
  }
  if (status.ok()) status = driver.cuEventCreate(&rank->begin_, CU_EVENT_DEFAULT);
  if (status.ok()) status = driver.cuEventCreate(&rank->end_, CU_EVENT_DEFAULT);
  if (!status.ok()) return status;
  return rank;
}

// Ignores results: the process ends.
CudaRank::~CudaRank() {
  if (context_ == nullptr) return;
  FreeDevice();
  if (host_ != nullptr) driver_->cuMemFreeHost.Result(host_);
  if (begin_ != nullptr) driver_->cuEventDestroy.Result(begin_);
  if (end_ != nullptr) driver_->cuEventDestroy.Result(end_);
  if (stream_ != nullptr) driver_->cuStreamDestroy.Result(stream_);
  driver_->cuDevicePrimaryCtxRelease.Result(device_.handle);
}

absl::Status CudaRank::AllocateHost(std::size_t bytes) {
  if (host_ != nullptr) driver_->cuMemFreeHost.Result(host_);
  host_ = nullptr;
  host_bytes_ = bytes;
  void* memory = nullptr;
  absl::Status status = driver_->cuMemHostAlloc(&memory, std::max(bytes, kLeastBytes), 0);
  host_ = static_cast<std::byte*>(memory);
  return status;
}

absl::StatusOr<CUdeviceptr> CudaRank::AllocateDevice(std::size_t bytes) {
  CUdeviceptr address = 0;
  absl::Status status = driver_->cuMemAlloc(&address, std::max(bytes, kLeastBytes));
  if (!status.ok()) return status;
  allocations_.push_back(address);
  return address;
}

void CudaRank::FreeDevice() {
  for (const CUdeviceptr address : allocations_) driver_->cuMemFree.Result(address);
  allocations_.clear();
}

absl::Status CudaRank::Upload(CUdeviceptr to) {
  absl::Status status = driver_->cuMemcpyAsync(to, AddressOf(host_), host_bytes_, stream_);
  return status.ok() ? Synchronize() : status;
}

absl::Status CudaRank::Download(CUdeviceptr from) {
  absl::Status status = driver_->cuMemcpyAsync(AddressOf(host_), from, host_bytes_, stream_);
  return status.ok() ? Synchronize() : status;
}

absl::StatusOr<std::int64_t> CudaRank::StopNs() {
  absl::Status status = driver_->cuEventRecord(end_, stream_);
  if (status.ok()) status = Synchronize();
  float milliseconds = 0;
  if (status.ok()) status = driver_->cuEventElapsedTime(&milliseconds, begin_, end_);
  if (!status.ok()) return status;
  return std::max<std::int64_t>(static_cast<std::int64_t>(milliseconds * 1e6F), 1);
}

}  // namespace gradsync::bench
