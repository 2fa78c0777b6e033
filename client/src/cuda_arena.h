// Device memory that a worker of the daemon created and this process maps.

#ifndef CLIENT_SRC_CUDA_ARENA_H_
#define CLIENT_SRC_CUDA_ARENA_H_

#include <cuda.h>

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/src/cuda_context.h"

namespace gradsync::client {

// One mapping. Immutable, so thread-safe. The destructor waits until no stream of the context can
// touch the memory, and unmaps the memory. In a forked child it does nothing.
class CudaArena {
 public:
  // Maps the cuMemCreate allocation of `bytes` bytes behind `descriptor`. The caller still owns the
  // descriptor.
  static absl::StatusOr<std::shared_ptr<CudaArena>> Import(std::shared_ptr<CudaContext> context,
                                                           int descriptor, std::size_t bytes);
  // Opens a cuMemAlloc allocation by its IPC handle.
  static absl::StatusOr<std::shared_ptr<CudaArena>> OpenIpc(std::shared_ptr<CudaContext> context,
                                                            const std::string& handle);
  ~CudaArena();
  CudaArena(const CudaArena&) = delete;
  CudaArena& operator=(const CudaArena&) = delete;

  CUdeviceptr address() const { return address_; }

 private:
  // `mapped`: bytes; 0 for an IPC handle.
  CudaArena(std::shared_ptr<CudaContext> context, CUdeviceptr address, std::size_t mapped)
      : context_(std::move(context)), address_(address), mapped_(mapped) {}

  const std::shared_ptr<CudaContext> context_;
  const CUdeviceptr address_;
  const std::size_t mapped_;
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_CUDA_ARENA_H_
