// Where a layout's buckets and gradients lie in its arena, as the daemon laid them out and the
// client checked.

#ifndef CLIENT_SRC_LAYOUT_PLAN_H_
#define CLIENT_SRC_LAYOUT_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/include/gradsync/client.h"

namespace gradsync::v1 {
class LayoutAssigned;
class RegisterLayout;
}  // namespace gradsync::v1

namespace gradsync::client {

// A span of elements; offsets are bytes from the arena's start.
struct PlannedSpan {
  DataType dtype = DataType::kUnspecified;
  std::uint64_t count = 0;
  std::uint64_t offset = 0;
  std::uint32_t bucket = 0;
};

// As v1::ArenaMemory.
enum class ArenaMemory : std::uint8_t { kHost = 0, kCudaVmm = 1, kCudaIpc = 2 };

struct LayoutPlan {
  ArenaMemory memory = ArenaMemory::kHost;
  std::uint64_t arena_bytes = 0;
  std::vector<PlannedSpan> buckets;
  std::vector<PlannedSpan> gradients;  // one per parameter
  std::uint64_t verdict_offset = 0;    // of `float verdict[2]`, on a GPU
  std::string ipc_handle;              // of kCudaIpc
};

// INVALID_ARGUMENT names what is malformed.
absl::Status ValidateSpec(const LayoutSpec& spec);

// `spec` must be valid.
void FillRegisterLayout(const LayoutSpec& spec, v1::RegisterLayout* message);

// Trusts nothing: every span lies inside the arena, aligned, without overlap, as `spec` asked for.
// INTERNAL otherwise.
absl::StatusOr<LayoutPlan> CheckedPlan(const LayoutSpec& spec, const v1::LayoutAssigned& assigned);

}  // namespace gradsync::client

#endif  // CLIENT_SRC_LAYOUT_PLAN_H_
