// Where a layout's buckets and gradients are in its arena. The daemon places them, and the client
// checks the places.

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

// A span of elements in an arena.
struct PlannedSpan {
  DataType dtype = DataType::kUnspecified;
  std::uint64_t count = 0;   // elements
  std::uint64_t offset = 0;  // bytes from the arena's start
  std::uint32_t bucket = 0;  // index
};

// The numbers of v1::ArenaMemory.
enum class ArenaMemory : std::uint8_t { kHost = 0, kCudaVmm = 1, kCudaIpc = 2 };

struct LayoutPlan {
  ArenaMemory memory = ArenaMemory::kHost;
  std::uint64_t arena_bytes = 0;
  std::vector<PlannedSpan> buckets;
  std::vector<PlannedSpan> gradients;  // one per parameter
  std::uint64_t verdict_offset = 0;    // on a GPU: of `float verdict[2]`
  std::string ipc_handle;              // for kCudaIpc
};

// INVALID_ARGUMENT MALFORMED: names what is wrong.
absl::Status ValidateSpec(const LayoutSpec& spec);

// `spec` must be valid.
void FillRegisterLayout(const LayoutSpec& spec, v1::RegisterLayout* message);

// What a replacement registers for a layout that the job has.
LayoutSpec SpecOf(const v1::RegisterLayout& message);

// Trusts nothing: checks that every span is aligned, lies inside the arena, overlaps no other span,
// and is what `spec` asks for. INTERNAL PROTOCOL_VIOLATION otherwise.
absl::StatusOr<LayoutPlan> CheckedPlan(const LayoutSpec& spec, const v1::LayoutAssigned& assigned);

}  // namespace gradsync::client

#endif  // CLIENT_SRC_LAYOUT_PLAN_H_
