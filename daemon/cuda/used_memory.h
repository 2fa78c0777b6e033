// How much of a GPU is in use. CUDA's driver tells only a process that has a context there; NVML,
// its management library, tells everybody.

#ifndef DAEMON_CUDA_USED_MEMORY_H_
#define DAEMON_CUDA_USED_MEMORY_H_

#include <cstdint>
#include <optional>
#include <string>

namespace gradsync {

// Bytes of the GPU or MIG instance `uuid` that all processes together use. Opens `library`
// (libnvidia-ml.so.1, which comes with the driver) for as long as it takes; makes no context.
// Nothing if there is no such library, or it does not say.
std::optional<std::uint64_t> UsedGpuBytes(const std::string& library, const std::string& uuid);

}  // namespace gradsync

#endif  // DAEMON_CUDA_USED_MEMORY_H_
