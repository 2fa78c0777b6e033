#include "client/src/cuda_arena.h"

#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "client/src/error.h"
#include "client/src/fork_guard.h"

namespace gradsync::client {

absl::StatusOr<std::shared_ptr<CudaArena>> CudaArena::Import(std::shared_ptr<CudaContext> context,
                                                             int descriptor, std::size_t bytes) {
  const CudaDriver& driver = context->driver();
  const CudaContext::Scope scope(*context);
  if (!scope.status().ok()) return scope.status();

  CUmemGenericAllocationHandle allocation = 0;
  if (auto status =
          driver.Check(driver.cuMemImportFromShareableHandle(
                           &allocation, reinterpret_cast<void*>(std::intptr_t{descriptor}),
                           CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                       "cuMemImportFromShareableHandle");
      !status.ok()) {
    return status;
  }
  // The mapping keeps the memory from here on.
  const auto release = absl::MakeCleanup([&] { driver.cuMemRelease(allocation); });

  CUdeviceptr address = 0;
  if (auto status =
          driver.Check(driver.cuMemAddressReserve(&address, bytes, 0, 0, 0), "cuMemAddressReserve");
      !status.ok()) {
    return status;
  }
  auto free = absl::MakeCleanup([&] { driver.cuMemAddressFree(address, bytes); });
  if (auto status = driver.Check(driver.cuMemMap(address, bytes, 0, allocation, 0), "cuMemMap");
      !status.ok()) {
    return status;
  }
  auto unmap = absl::MakeCleanup([&] { driver.cuMemUnmap(address, bytes); });
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = context->device();
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  if (auto status =
          driver.Check(driver.cuMemSetAccess(address, bytes, &access, 1), "cuMemSetAccess");
      !status.ok()) {
    return status;
  }
  std::move(unmap).Cancel();
  std::move(free).Cancel();
  return absl::WrapUnique(new CudaArena(std::move(context), address, bytes));
}

absl::StatusOr<std::shared_ptr<CudaArena>> CudaArena::OpenIpc(std::shared_ptr<CudaContext> context,
                                                              const std::string& handle) {
  CUipcMemHandle copy{};
  if (handle.size() != sizeof(copy)) {
    return MakeError(absl::StatusCode::kInternal, reason::kProtocolViolation,
                     absl::StrCat("the daemon's IPC handle has ", handle.size(), " bytes"));
  }
  std::memcpy(&copy, handle.data(), sizeof(copy));
  const CudaDriver& driver = context->driver();
  const CudaContext::Scope scope(*context);
  if (!scope.status().ok()) return scope.status();
  CUdeviceptr address = 0;
  if (auto status = driver.Check(
          driver.cuIpcOpenMemHandle(&address, copy, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
          "cuIpcOpenMemHandle");
      !status.ok()) {
    return status;
  }
  return absl::WrapUnique(new CudaArena(std::move(context), address, 0));
}

CudaArena::~CudaArena() {
  if (InForkedChild()) return;
  const CudaDriver& driver = context_->driver();
  const CudaContext::Scope scope(*context_);
  // Unmapping does not wait by itself for kernels that use the memory.
  if (!scope.status().ok() || driver.cuCtxSynchronize() != CUDA_SUCCESS) return;
  if (mapped_ == 0) {
    driver.cuIpcCloseMemHandle(address_);
    return;
  }
  driver.cuMemUnmap(address_, mapped_);
  driver.cuMemAddressFree(address_, mapped_);
}

}  // namespace gradsync::client
