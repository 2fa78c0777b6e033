// A rank on a GPU that speaks the protocol by itself, without the client library's scruples, and
// without CUDA: what its streams would write into the semaphores it writes from the CPU.

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

// The calls before the steps come in this order; Join is all of them. False: the daemon has said
// something else, or nothing any more.
class CudaRawRank {
 public:
  CudaRawRank(const std::string& socket, const std::string& side_socket)
      : side_socket_(side_socket), session_(socket) {}

  bool Open(std::uint32_t rank, std::uint32_t world_size, std::uint64_t step_timeout_ms = 0);
  // A layout as CudaLayout's, on `device`.
  bool RequestLayout(const std::string& device, std::size_t buckets, std::uint64_t count);
  bool AwaitAssignment();
  bool ClaimMemory();
  bool SayMapped() { return session_.Mapped(assigned_.channel()); }
  bool AwaitLayoutReady();
  bool Join(std::uint32_t rank, std::uint32_t world_size, const std::string& device,
            std::size_t buckets, std::uint64_t count, std::uint64_t step_timeout_ms = 0);

  // Why RequestLayout was refused.
  std::optional<fault::RawStatus> AwaitRefusal();

  bool SayReady(std::uint64_t step, std::uint32_t bucket) {
    return session_.Ready(assigned_.channel(), step, {bucket});
  }
  bool SayEnd(std::uint64_t step, bool ready_rest = false) {
    return session_.EndStep(assigned_.channel(), step, ready_rest);
  }
  // The next StepDone's status.
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
