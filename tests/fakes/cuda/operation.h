// One piece of work on a stream.

#ifndef TESTS_FAKES_CUDA_OPERATION_H_
#define TESTS_FAKES_CUDA_OPERATION_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/fakes/cuda/cuda_declarations.h"

namespace gradsync::fakes {

// Device memory that an operation will touch.
struct Access {
  CUdeviceptr address = 0;
  std::size_t bytes = 0;
  bool write = false;
  std::size_t alignment = 1;  // that a kernel needs; otherwise CUDA_ERROR_MISALIGNED_ADDRESS
};

struct Operation {
  enum class Kind {
    kWork,        // ends by itself
    kWordWait,    // parks its stream until somebody writes a word
    kCollective,  // spins until every rank has launched
  };

  // Constant once enqueued.
  std::string name;
  Kind kind = Kind::kWork;
  std::vector<Access> accesses;
  // Runs on the queue's thread without a lock. An error becomes the process's sticky error. May be
  // empty.
  std::function<CUresult()> work;

  // Guarded by the scheduler's lock.
  std::vector<std::shared_ptr<Operation>> after;  // these operations must be done first
  bool done = false;
  std::uint64_t done_ns = 0;  // CLOCK_MONOTONIC
};

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_CUDA_OPERATION_H_
