// The memory of a rank through which its broadcasts, its small all-reduces and the state of the
// model move.

#ifndef DAEMON_JOB_STAGING_MEMORY_H_
#define DAEMON_JOB_STAGING_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>

namespace gradsync::daemon {

// One rank's staging memory, mapped and populated as a whole. `data` is null for a rank on another
// node.
struct StagingMemory {
  std::shared_ptr<void> keep;
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_STAGING_MEMORY_H_
