// A rank on a GPU that speaks the protocol without the client library and its checks, and without
// CUDA: the CPU writes the semaphores that its streams would write.

#ifndef TESTS_CUDA_CUDA_RAW_RANK_H_
#define TESTS_CUDA_CUDA_RAW_RANK_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "gradsync/shared_memory.h"
#include "tests/fault/raw_session.h"

namespace gradsync {

// The calls before the steps come in this order; Join makes all of them. A call returns false if
// the daemon does not send the expected message.
class CudaRawRank {
 public:
  CudaRawRank(const std::string& socket, const std::string& side_socket)
      : side_socket_(side_socket), session_(socket) {}

  bool Open(std::uint32_t rank, std::uint32_t world_size, std::uint64_t step_timeout_ms = 0);
  // Requests CudaLayout's layout on `device`.
  bool RequestLayout(const std::string& device, std::size_t buckets, std::uint64_t count);
  bool AwaitAssignment();
  bool ClaimMemory();
  bool SayMapped() { return session_.Mapped(assigned_.channel()); }
  bool AwaitLayoutReady();
  bool Join(std::uint32_t rank, std::uint32_t world_size, const std::string& device,
            std::size_t buckets, std::uint64_t count, std::uint64_t step_timeout_ms = 0);

  // Waits for the refusal of the requested layout, and returns its error.
  std::optional<fault::RawStatus> AwaitRefusal();

  bool SayReady(std::uint64_t step, std::uint32_t bucket) {
    return session_.Ready(assigned_.channel(), step, {bucket});
  }
  bool SayEnd(std::uint64_t step, bool ready_rest = false) {
    return session_.EndStep(assigned_.channel(), step, ready_rest);
  }
  // Waits for the next StepDone, and returns its status.
  std::optional<fault::RawStatus> AwaitStep();

  SemaphorePageHeader& header();
  BucketSemaphore& semaphore(std::size_t bucket);

 private:
  const std::string side_socket_;
  fault::RawSession session_;
  v1::LayoutAssigned assigned_;
  std::shared_ptr<fault::RawMemory> arena_;
};

}  // namespace gradsync

#endif  // TESTS_CUDA_CUDA_RAW_RANK_H_
