// Replaces the cuda_* files in a build without CUDA's headers.

#include "client/include/gradsync/client.h"
#include "client/src/device_layout.h"
#include "client/src/error.h"

namespace gradsync {
namespace client {
namespace {

absl::Status Absent() {
  return MakeError(absl::StatusCode::kUnimplemented, reason::kCudaUnavailable,
                   "this gradsync client was built without CUDA; build it where tools/find_cuda "
                   "finds a toolkit, or use host memory");
}

}  // namespace

class CudaContext {};

absl::StatusOr<std::shared_ptr<CudaContext>> OpenDevice(const std::string&) { return Absent(); }

bool SharesThroughMps(const CudaContext&) { return false; }

absl::StatusOr<LayoutMemory> MapDeviceLayout(const std::shared_ptr<CudaContext>&, const LayoutPlan&,
                                             int, std::shared_ptr<MappedMemory>) {
  return Absent();
}

}  // namespace client

absl::StatusOr<std::string> CudaDeviceUuid(int) { return client::Absent(); }

}  // namespace gradsync
