// The oldest CUDA driver that gradsync's kernels run on. Without CUDA's headers, for programs that
// are built without them too.

#ifndef DAEMON_CUDA_LEAST_DRIVER_H_
#define DAEMON_CUDA_LEAST_DRIVER_H_

namespace gradsync {

// CUDA 13.0, as cuDriverGetVersion says it: tools/find_cuda takes no older compiler, and what a
// compiler has made runs on drivers of its own major release or newer ones (NVIDIA's "CUDA
// Compatibility": CUDA 13.x needs 580).
inline constexpr int kLeastCudaDriver = 13000;

inline constexpr char kCudaDriverRemedy[] =
    "install NVIDIA's driver for CUDA 13.0 or newer (580 or newer)";

}  // namespace gradsync

#endif  // DAEMON_CUDA_LEAST_DRIVER_H_
