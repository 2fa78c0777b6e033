// What a layout on a GPU needs from CUDA. In a build without CUDA's headers everything here fails
// UNIMPLEMENTED CUDA_UNAVAILABLE.

#ifndef CLIENT_SRC_DEVICE_LAYOUT_H_
#define CLIENT_SRC_DEVICE_LAYOUT_H_

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/src/layout_plan.h"
#include "client/src/mapped_memory.h"
#include "client/src/stream_handoff.h"

namespace gradsync::client {

class CudaContext;

// Opens the GPU `uuid` in this process. Statuses: those of CudaContext::Open.
absl::StatusOr<std::shared_ptr<CudaContext>> OpenDevice(const std::string& uuid);

// True if this process shares the GPU through MPS.
bool SharesThroughMps(const CudaContext& context);

// A layout's memory, mapped by this process.
struct LayoutMemory {
  // The arena's first byte; on a GPU, its device address. The last reference unmaps the arena.
  std::shared_ptr<std::byte> arena;
  std::unique_ptr<StreamHandoff> handoff;  // null in host memory
};

// Maps the arena of `plan` and registers the semaphores with the driver. `arena`: its descriptor;
// unused if the plan has an IPC handle. Statuses: those of CudaDriver::Check.
absl::StatusOr<LayoutMemory> MapDeviceLayout(const std::shared_ptr<CudaContext>& context,
                                             const LayoutPlan& plan, int arena,
                                             std::shared_ptr<MappedMemory> semaphores);

}  // namespace gradsync::client

#endif  // CLIENT_SRC_DEVICE_LAYOUT_H_
