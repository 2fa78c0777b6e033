// One rank of a job whose layout lies on a GPU, with a stream of its own: of this process, against
// a real gradsyncd and a fake of the driver.

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
#include "tests/fault/deadline.h"

namespace gradsync {

inline constexpr absl::Duration kCudaPatience = absl::Milliseconds(fault::kPatienceMs);

// `buckets` float32 buckets of `count` elements, on a GPU.
LayoutSpec CudaLayout(int gpu, std::size_t buckets, std::size_t count);

// Calls of one thread at a time. Memory and streams of several ranks of a process are apart.
class CudaRank {
 public:
  // The process's context on `gpu`, and a stream there.
  explicit CudaRank(int gpu, std::unique_ptr<Session> session = nullptr);

  absl::Status Join(const SessionOptions& options);
  // Drops the layout that it had.
  absl::Status Register(const LayoutSpec& spec);
  // In its place, with its steps. If that is refused, it goes on.
  absl::Status Replace(const LayoutSpec& spec);
  absl::Status Leave() { return session_->Leave(); }
  // Without a Leave: the others lose it. Its memory stays.
  void EndSession() { session_.reset(); }
  // Unmaps the memory. Waits for the GPU, so only when no stream is parked any more.
  void DropLayout() { layout_.reset(); }
  void End();

  int gpu() const { return gpu_; }
  Layout& layout() { return *layout_; }
  CUstream stream() const { return stream_; }
  // What follows in this thread is this rank's.
  void Enter() const;

  // Enqueues the kernels that write a bucket's gradients.
  void Write(std::size_t bucket, float value);
  // One step, up to its stream's wait for the averages; nothing waits on the host. Bucket i gets
  // value + i.
  absl::Status Step(std::uint64_t step, float value);

  // What the stream sees, behind all that is on it.
  std::vector<float> Read(std::size_t bucket);
  float Verdict(std::uint64_t step);
  // The host's.
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
