// How many bytes of a GPU are in use. CUDA's driver tells this only to a process with a context on
// the GPU; NVML, NVIDIA's management library, tells every process.

#ifndef DAEMON_CUDA_USED_MEMORY_H_
#define DAEMON_CUDA_USED_MEMORY_H_

#include <cstdint>
#include <optional>
#include <string>

namespace gradsync::daemon {

// Bytes of the GPU or MIG instance `uuid` that all processes together use. Opens `library`, which
// is part of the driver (libnvidia-ml.so.1), and makes no context. Nullopt if the library is
// missing or returns an error.
std::optional<std::uint64_t> UsedGpuBytes(const std::string& library, const std::string& uuid);

}  // namespace gradsync::daemon

#endif  // DAEMON_CUDA_USED_MEMORY_H_
