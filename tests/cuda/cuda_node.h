// A real gradsyncd on a fake machine with GPUs, for tests that take its trainers away.

#ifndef TESTS_CUDA_CUDA_NODE_H_
#define TESTS_CUDA_CUDA_NODE_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "client/include/gradsync/client.h"
#include "tests/fakes/control.h"
#include "tests/fault/test_daemon.h"

namespace gradsync {

// Its job is warm: on every GPU there is its worker with staging memory for CudaLayout(_, kBuckets,
// kCount), and on several GPUs their communicator. The trainers that did this have left.
//
// For the process of an ISOLATED_TEST, whose machine it is on. Fails the test at its end if the
// daemon has initialized CUDA itself, or anything undefined was
// seen.
class CudaNode {
 public:
  static constexpr std::size_t kBuckets = 2;
  static constexpr std::size_t kCount = 1000;

  explicit CudaNode(int gpus = 1);
  ~CudaNode();
  CudaNode(const CudaNode&) = delete;
  CudaNode& operator=(const CudaNode&) = delete;

  fault::TestDaemon& daemon() { return daemon_; }
  fakes::FakeMachine& machine() { return machine_; }

  // Of the job. The step's deadline is the default if `step_timeout` is 0.
  SessionOptions Options(std::uint32_t rank, std::uint32_t world_size,
                         absl::Duration step_timeout = absl::ZeroDuration()) const;

  // Workers started so far: each loads the kernels once.
  std::uint64_t Workers() const { return machine_.Calls("cuModuleLoadData"); }
  // The processes of the workers of `job` that run.
  std::vector<pid_t> WorkerPids(const std::string& job = "job") const;
  // Of the trainers; at the end, no other one.
  void ExpectViolation(const std::string& what) { violations_.push_back(what); }

  // Fails the test unless the GPUs' memory becomes what it was before there were trainers.
  void ExpectNothingKept();

 private:
  fakes::FakeMachine machine_;
  fault::TestDaemon daemon_;
  std::vector<std::string> violations_;
  std::vector<std::size_t> idle_bytes_;  // by GPU: contexts, staging, the communicator
};

}  // namespace gradsync

#endif  // TESTS_CUDA_CUDA_NODE_H_
