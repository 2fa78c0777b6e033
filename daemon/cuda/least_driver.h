// The oldest CUDA driver that runs gradsync's kernels. Includes no header of CUDA, because programs
// that are built without CUDA use it.

#ifndef DAEMON_CUDA_LEAST_DRIVER_H_
#define DAEMON_CUDA_LEAST_DRIVER_H_

namespace gradsync::daemon {

// CUDA 13.0, in cuDriverGetVersion's form. tools/find_cuda accepts no older compiler, and compiled
// kernels run on drivers of the compiler's major release or newer (NVIDIA's "CUDA Compatibility":
// CUDA 13.x needs driver 580).
inline constexpr int kLeastCudaDriver = 13000;

inline constexpr char kCudaDriverRemedy[] =
    "install NVIDIA's driver for CUDA 13.0 or newer (580 or newer)";

}  // namespace gradsync::daemon

#endif  // DAEMON_CUDA_LEAST_DRIVER_H_
