// A contestant of a bench: one rank of one implementation, inside that rank's process.

#ifndef TOOLS_BENCH_CONTESTANT_H_
#define TOOLS_BENCH_CONTESTANT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/gradsync/data_type.h"
#include "tools/bench/barrier.h"

namespace gradsync::bench {

struct ContestantOptions {
  std::uint32_t rank = 0;
  std::uint32_t ranks = 0;  // of all nodes
  DataType dtype = DataType::kFloat32;
  std::string directory;      // where the ranks of this implementation meet
  std::string address;        // of this rank's node, for the other nodes
  std::string socket;         // of gradsyncd on this rank's node
  std::string coordinator;    // of gradsync's job; empty on one node
  std::string memory;         // path of shared memory, for the roofline
  std::uint32_t threads = 1;  // of the roofline
  Barrier* barrier = nullptr;
  // The number of GPUs that the ranks share in turns; 0: host memory.
  std::uint32_t gpus = 0;
  std::string cuda_library;
  std::string nccl_library;
};

// One all-reduce: when its parts ended (CLOCK_MONOTONIC, nanoseconds). An implementation sets the
// times that it knows.
struct Turn {
  std::int64_t marked_ns = 0;  // MarkReady has returned
  std::int64_t ready_ns = 0;   // the daemon has the last rank's message
  std::int64_t start_ns = 0;   // the reduction starts
  std::int64_t finish_ns = 0;  // the reduction ends
  // If rank 0 alone works: how long it took, by a better clock than the caller's; otherwise 0.
  std::int64_t own_ns = 0;
  // CPU time, if that of the whole process would include waiting.
  std::optional<std::int64_t> cpu_ns;
  // On a GPU: from this time on the caller may enqueue what needs the average.
  std::int64_t enqueued_ns = 0;
  // On a GPU: how often the host waited until then.
  std::uint64_t host_synchronizations = 0;
};

// Called by one thread: Connect (SetUp (Upload AllReduce EndStep Download)* TearDown)* destructor.
// All ranks make the same calls; each call but Upload and Download may wait for the other ranks.
class Contestant {
 public:
  virtual ~Contestant() = default;

  virtual absl::Status Connect() { return absl::OkStatus(); }
  // A buffer of `bytes`, in the kind of memory that this implementation reduces.
  virtual absl::Status SetUp(std::size_t bytes) = 0;
  // Valid from SetUp to TearDown; elements of the dtype.
  virtual std::byte* buffer() = 0;
  // If the memory that is reduced is a GPU's: copy buffer() to it, and back.
  virtual absl::Status Upload() { return absl::OkStatus(); }
  virtual absl::Status Download() { return absl::OkStatus(); }
  // False for an implementation that only does comparable work: its results are not checked.
  virtual bool averages() const { return true; }
  // Averages every rank's buffer in place. The caller measures its time, as a trainer sees it.
  virtual absl::Status AllReduce(Turn* turn) = 0;
  // What else a step needs. Its time is not measured, but its CPU time is.
  virtual absl::Status EndStep(Turn*) { return absl::OkStatus(); }
  virtual absl::Status TearDown() = 0;
};

// INVALID_ARGUMENT if there is no implementation of that name in that kind of memory.
absl::StatusOr<std::unique_ptr<Contestant>> MakeContestant(const std::string& name,
                                                           const ContestantOptions& options);

// A faulty one leaves one bit of each rank's last element wrong: it shows that wrong elements are
// counted.
std::unique_ptr<Contestant> MakeGlooContestant(const ContestantOptions& options, bool faulty);

// A loop that reads and writes every rank's buffer once, by threads of rank 0: see RooflineThreads.
std::unique_ptr<Contestant> MakeRooflineContestant(const ContestantOptions& options);

// MPI_Allreduce in place, through shared memory on one machine. Null if built without Open MPI.
std::unique_ptr<Contestant> MakeOpenMpiContestant(const ContestantOptions& options);

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_CONTESTANT_H_
