// Plays a worker of the daemon for one layout on a GPU, step by step as a test says: a process of
// its own that has the arena and the semaphores, on the same fake machine.

#ifndef TESTS_CLIENT_CUDA_WORKER_ROLE_H_
#define TESTS_CLIENT_CUDA_WORKER_ROLE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "daemon/base/unique_fd.h"
#include "daemon/worker/message_socket.h"
#include "gradsync/shared_memory.h"
#include "tests/kit/child_process.h"

namespace gradsync {

inline constexpr std::size_t kRoleArenaBytes = std::size_t{2} << 20;

class CudaWorkerRole {
 public:
  enum class Memory { kVmm, kIpc };
  // An arena of kRoleArenaBytes bytes on the machine's first GPU.
  CudaWorkerRole(Memory memory, std::size_t buckets);
  ~CudaWorkerRole();
  CudaWorkerRole(const CudaWorkerRole&) = delete;
  CudaWorkerRole& operator=(const CudaWorkerRole&) = delete;

  // The descriptors, as the side socket gives them.
  std::vector<int> descriptors() const;
  const std::string& ipc_handle() const { return ipc_handle_; }
  BucketSemaphore& semaphore(std::size_t bucket) const;
  SemaphorePageHeader& header() const { return *reinterpret_cast<SemaphorePageHeader*>(pages_); }

  // True once the trainer's stream has written a bucket's ready word.
  bool AwaitReady(std::size_t bucket, std::uint64_t step) const;

  // Enqueue on the worker's stream: `count` floats, or a bucket's done word.
  void Fill(std::size_t offset, float value, std::size_t count);
  void WriteDone(std::size_t bucket, std::uint64_t step);
  // The value of a float in the arena, after everything that was enqueued.
  float Read(std::size_t offset);

  // SIGKILL.
  void Kill();

 private:
  // The process's answer.
  std::string Call(const std::string& command);

  const std::size_t buckets_;
  std::unique_ptr<daemon::MessageSocket> socket_;
  std::unique_ptr<ChildProcess> process_;
  std::string ipc_handle_;
  daemon::UniqueFd arena_;
  daemon::UniqueFd semaphores_;
  std::byte* pages_ = nullptr;
};

}  // namespace gradsync

#endif  // TESTS_CLIENT_CUDA_WORKER_ROLE_H_
