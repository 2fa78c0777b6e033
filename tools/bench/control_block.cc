#include "tools/bench/control_block.h"

#include <new>

namespace gradsync::bench {

absl::StatusOr<SharedRegion> CreateControlBlock() {
  absl::StatusOr<SharedRegion> region = SharedRegion::Create(sizeof(ControlBlock));
  if (region.ok()) new (region->data()) ControlBlock();
  return region;
}

}  // namespace gradsync::bench
