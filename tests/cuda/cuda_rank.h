// A rank of this process whose layout is on a GPU, with a stream of its own. It uses a real
// gradsyncd and a fake of the driver.

#ifndef TESTS_CUDA_CUDA_RANK_H_
#define TESTS_CUDA_CUDA_RANK_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/include/gradsync/client.h"
#include "tests/kit/deadline.h"

namespace gradsync {

inline constexpr absl::Duration kCudaPatience = absl::Milliseconds(kPatienceMs);

// `buckets` float32 buckets of `count` elements, on a GPU.
LayoutSpec CudaLayout(int gpu, std::size_t buckets, std::size_t count);

// Not thread-safe. Several ranks of one process share no memory and no stream.
class CudaRank {
 public:
  // Enters the process's context on `gpu` and makes a stream.
  explicit CudaRank(int gpu, std::unique_ptr<Session> session = nullptr);

  absl::Status Join(const SessionOptions& options);
  // Removes the rank's layout, if it has one.
  absl::Status Register(const LayoutSpec& spec);
  // Replaces the layout. If that is refused, the old layout stays.
  absl::Status Replace(const LayoutSpec& spec);
  absl::Status Leave() { return session_->Leave(); }
  // Ends the session without Leave, so the others lose this rank. Its memory stays mapped.
  void EndSession() { session_.reset(); }
  // Unmaps the memory. Waits for the GPU, so no stream may be parked.
  void DropLayout() { layout_.reset(); }
  void End();

  int gpu() const { return gpu_; }
  Layout& layout() { return *layout_; }
  CUstream stream() const { return stream_; }
  // Makes the rank's context current in this thread.
  void Enter() const;

  // Enqueues the kernels that write a bucket's gradients.
  void Write(std::size_t bucket, float value);
  // One step, up to the stream's wait for the averages. The host does not wait. The gradients of
  // bucket i are value + i.
  absl::Status Step(std::uint64_t step, float value);

  // The values as the stream sees them, behind all its operations.
  std::vector<float> Read(std::size_t bucket);
  float Verdict(std::uint64_t step);
  // Waits on the host.
  absl::StatusOr<StepResult> WaitStep(std::uint64_t step);

 private:
  const int gpu_;
  CUcontext context_;
  CUstream stream_;
  std::unique_ptr<Session> session_;
  std::unique_ptr<Layout> layout_;
};

}  // namespace gradsync

#endif  // TESTS_CUDA_CUDA_RANK_H_
