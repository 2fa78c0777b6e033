// Device memory that a trainer and a worker share: the buckets of a layout on a GPU.

#ifndef DAEMON_ARENA_CUDA_ARENA_H_
#define DAEMON_ARENA_CUDA_ARENA_H_

#include <array>
#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cuda.h"
#include "daemon/base/unique_fd.h"
#include "daemon/cuda/cuda_driver.h"

namespace gradsync::daemon {

// How a trainer maps an arena.
enum class CudaSharing : unsigned char {
  // A descriptor for cuMemImportFromShareableHandle. The memory lives until both sides have
  // unmapped it and the descriptor is closed. So either side may end first.
  kFileDescriptor,
  // A handle for cuIpcOpenMemHandle. It works only in the same PID namespace, and the memory must
  // not be freed while the trainer has it open.
  kLegacyIpc,
};

// A zeroed allocation on one GPU, mapped there for reading and writing. Only a worker process has
// such objects. An arena belongs to the context that was current at its creation. Not thread-safe:
// only the issuing thread uses it.
//
// Owns the memory. With kLegacyIpc it may be destroyed only after the trainer has closed the memory
// or ended.
class CudaArena {
 public:
  // Allocates at least `bytes`, rounded up to the granularity that the driver recommends. Uses
  // virtual memory management if device and driver can export its allocations, else legacy IPC.
  // sharing() and why_legacy() tell the choice, for log and status. Zeroes the memory on `stream`
  // and waits for it. RESOURCE_EXHAUSTED with reason GPU_OUT_OF_MEMORY names the requested and the
  // free bytes.
  static absl::StatusOr<std::unique_ptr<CudaArena>> Create(const CudaDriver* driver,
                                                           CUdevice device, std::size_t bytes,
                                                           CUstream stream);
  ~CudaArena();
  CudaArena(const CudaArena&) = delete;
  CudaArena& operator=(const CudaArena&) = delete;

  CUdeviceptr address() const { return address_; }
  std::size_t bytes() const { return bytes_; }
  CudaSharing sharing() const { return sharing_; }
  // The reason for kLegacyIpc; empty with kFileDescriptor.
  const std::string& why_legacy() const { return why_legacy_; }

  // A new descriptor of the memory, closed on exec. Only with kFileDescriptor.
  absl::StatusOr<UniqueFd> Export() const;
  // Only with kLegacyIpc.
  absl::StatusOr<std::array<char, CU_IPC_HANDLE_SIZE>> IpcHandle() const;

 private:
  CudaArena(const CudaDriver* driver, std::size_t bytes);

  absl::Status Allocate(const CUmemAllocationProp& properties);
  absl::Status AllocateLegacy();
  absl::Status Zero(CUstream stream);

  const CudaDriver* const driver_;
  std::size_t bytes_;
  CudaSharing sharing_ = CudaSharing::kFileDescriptor;
  std::string why_legacy_;
  CUmemGenericAllocationHandle handle_ = 0;
  bool created_ = false;  // handle_ is valid
  bool mapped_ = false;   // address_ is mapped to it
  CUdeviceptr address_ = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_ARENA_CUDA_ARENA_H_
