// A real gradsyncd on a fake machine with GPUs, for tests in which trainers die.

#ifndef TESTS_CUDA_CUDA_NODE_H_
#define TESTS_CUDA_CUDA_NODE_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "client/include/gradsync/client.h"
#include "tests/fakes/control.h"
#include "tests/kit/test_daemon.h"

namespace gradsync {

// The job has run before: every GPU has its worker, with staging memory for CudaLayout(_, kBuckets,
// kCount). If there are several GPUs, they have a communicator. The trainers of that first life
// have left.
//
// For the process of an ISOLATED_TEST, on the test's machine. The destructor fails the test if the
// daemon itself has initialized CUDA, or if there was a violation.
class CudaNode {
 public:
  static constexpr std::size_t kBuckets = 2;
  static constexpr std::size_t kCount = 1000;

  explicit CudaNode(int gpus = 1);
  ~CudaNode();
  CudaNode(const CudaNode&) = delete;
  CudaNode& operator=(const CudaNode&) = delete;

  TestDaemon& daemon() { return daemon_; }
  fakes::FakeMachine& machine() { return machine_; }

  // Options to join the job. A `step_timeout` of 0 means the default.
  SessionOptions Options(std::uint32_t rank, std::uint32_t world_size,
                         absl::Duration step_timeout = absl::ZeroDuration()) const;

  // The number of workers started so far: each loads the kernels once. On a real machine, as the
  // daemon counts them.
  std::uint64_t Workers() const;
  // The pids of the running workers of `job`.
  std::vector<pid_t> WorkerPids(const std::string& job = "job") const;
  // The trainers cause this violation. The destructor expects no other one.
  void ExpectViolation(const std::string& what) { violations_.push_back(what); }

  // Fails the test unless the use of the GPUs' memory becomes what it was without trainers. On a
  // real machine: unless the daemon counts no byte of an arena.
  void ExpectNothingKept();

 private:
  fakes::FakeMachine machine_;
  TestDaemon daemon_;
  std::vector<std::string> violations_;
  std::vector<std::size_t> idle_bytes_;  // by GPU: contexts, staging, the communicator; only fakes
};

}  // namespace gradsync

#endif  // TESTS_CUDA_CUDA_NODE_H_
