// One rank of one implementation, inside that rank's process.

#ifndef TOOLS_BENCH_PEER_H_
#define TOOLS_BENCH_PEER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "proto/gradsync/data_type.h"
#include "tools/bench/control_block.h"
#include "tools/bench/implementation.h"

namespace gradsync::bench {

struct PeerOptions {
  std::uint32_t rank = 0;
  std::uint32_t ranks = 0;  // of all nodes
  std::uint32_t node = 0;
  DataType dtype = DataType::kFloat32;
  std::string directory;    // the team's meeting place
  std::string address;      // of this rank's node, for the other nodes
  std::string coordinator;  // of gradsync's job; empty on one node
  // On which the ranks lie, in turns; 0: host memory.
  std::uint32_t gpus = 0;
  std::string cuda_library;
  std::string nccl_library;
};

// Called by one thread: Connect (SetUp (Upload AllReduce EndStep Download)* TearDown)* destructor.
// All ranks make the same calls; each call but Upload and Download may wait for the other ranks.
class Peer {
 public:
  virtual ~Peer() = default;

  virtual absl::Status Connect() { return absl::OkStatus(); }
  // A buffer of order.bytes, in the kind of memory that this implementation reduces.
  virtual absl::Status SetUp(const Order& order) = 0;
  // Valid from SetUp to TearDown; elements of the dtype.
  virtual std::byte* buffer() = 0;
  // Copies buffer() to the memory that is reduced and back, where that is a GPU's.
  virtual absl::Status Upload() { return absl::OkStatus(); }
  virtual absl::Status Download() { return absl::OkStatus(); }
  // False for what only does work to compare with: its results are not checked.
  virtual bool averages() const { return true; }
  // Averages every rank's buffer in place. Timed by the caller, who sees what a trainer sees.
  // gradsync fills `times.marked_ns`.
  virtual absl::Status AllReduce(HandoffTimes* times) = 0;
  // What else a step needs; untimed, but its CPU time counts. gradsync fills the rest of `times`.
  virtual absl::Status EndStep(HandoffTimes*) { return absl::OkStatus(); }
  virtual absl::Status TearDown() = 0;
};

std::unique_ptr<Peer> MakePeer(Implementation implementation, const PeerOptions& options);

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_PEER_H_
