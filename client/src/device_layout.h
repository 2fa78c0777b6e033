// The door to CUDA: what a layout on a GPU has that one in host memory has not. In a build without
// CUDA's headers everything here fails UNIMPLEMENTED, reason CUDA_UNAVAILABLE.

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

// The GPU `uuid`, made ready for this process. Statuses: those of CudaContext::Open.
absl::StatusOr<std::shared_ptr<CudaContext>> OpenDevice(const std::string& uuid);

// Whether this process shares it through MPS.
bool SharesThroughMps(const CudaContext& context);

// A layout's memory, as mapped by this process.
struct LayoutMemory {
  // Where the arena begins, on a GPU its address there. Unmapped with the last reference, by
  // whoever drops it.
  std::shared_ptr<std::byte> arena;
  std::unique_ptr<StreamHandoff> handoff;  // null in host memory
};

// Maps the arena that `plan` describes, which `arena` describes unless it came by IPC handle, and
// registers the semaphores with the driver. Statuses: those of CudaDriver::Check.
absl::StatusOr<LayoutMemory> MapDeviceLayout(const std::shared_ptr<CudaContext>& context,
                                             const LayoutPlan& plan, int arena,
                                             std::shared_ptr<MappedMemory> semaphores);

}  // namespace gradsync::client

#endif  // CLIENT_SRC_DEVICE_LAYOUT_H_
