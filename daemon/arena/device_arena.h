// A rank's gradient memory on a GPU, as the code of the daemon process sees it.

#ifndef DAEMON_ARENA_DEVICE_ARENA_H_
#define DAEMON_ARENA_DEVICE_ARENA_H_

#include <string>

namespace gradsync::daemon {

// A handle of an allocation on a GPU of this node or another one. The job and the Reducer interface
// only pass the handle on. The reducer for GPUs knows the implementation (GpuArena, daemon/worker).
//
// Thread-safe. Every user of the memory holds a reference; the last one frees it.
class DeviceArena {
 public:
  virtual ~DeviceArena() = default;
  // UUID of the GPU.
  virtual const std::string& device() const = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_ARENA_DEVICE_ARENA_H_
