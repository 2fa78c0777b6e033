// The memory that the bench and its rank processes share: orders one way, reports the other.
//
// The bench's main process, the conductor, lets one team of ranks work at a time: it writes the
// team's order, posts it, and waits for every rank's arrival. Between orders a rank sleeps in the
// kernel.

#ifndef TOOLS_BENCH_CONTROL_BLOCK_H_
#define TOOLS_BENCH_CONTROL_BLOCK_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/gradsync/data_type.h"
#include "tools/bench/gate.h"
#include "tools/bench/implementation.h"
#include "tools/bench/shared_region.h"

namespace gradsync::bench {

// Of all nodes. One machine's GPUs; beyond it sums of the pattern would not be exact in bfloat16.
inline constexpr std::uint32_t kMaxRanks = 8;
// Room for an address with its port.
inline constexpr std::size_t kMaxAddress = 64;
// Room for a library's path.
inline constexpr std::size_t kMaxPath = 512;

enum class Phase : std::uint32_t {
  kConnect,   // join the other ranks
  kSetUp,     // a buffer of `bytes`
  kFill,      // rewrite it
  kCall,      // barrier, the timed all-reduce, the end of the step
  kCheck,     // count wrong elements
  kTearDown,  // free the buffer
  kQuit,
};

// Written by the conductor before it posts.
struct Order {
  Phase phase;
  bool check_all;  // every element instead of a sample
  std::uint64_t bytes;
  std::uint64_t iteration;
  char memory_path[64];  // kSetUp of the roofline: the memfd of all ranks' buffers
};

// What happens between a trainer's call and its return, CLOCK_MONOTONIC. Gradsync alone, but for
// what a GPU does.
struct HandoffTimes {
  std::int64_t marked_ns;  // MarkReady has returned
  std::int64_t ready_ns;   // the daemon has the last rank's message
  std::int64_t start_ns;   // of the reduction
  std::int64_t finish_ns;  // of the reduction
  // On a GPU.
  std::int64_t enqueued_ns;             // the caller may enqueue what needs the average
  std::int64_t gpu_ns;                  // what the GPU took, by its own clock; 0: not known
  std::uint64_t host_synchronizations;  // until enqueued_ns
};

// Written by one rank before it arrives.
struct alignas(128) RankReport {
  std::int64_t call_ns;    // kCall: CLOCK_MONOTONIC before the call
  std::int64_t return_ns;  // the average is there
  HandoffTimes handoff;
  std::int64_t cpu_ns;  // of the rank's process in kCall, its --busy thread excluded
  std::uint64_t wrong;  // kCheck
  std::uint32_t failed;
  char error[512];  // NUL-terminated; why
};

struct Team {
  Signal orders;
  Arrivals arrivals;
  Barrier barrier;
  Order order;
  RankReport reports[kMaxRanks];
};

struct ControlBlock {
  // Constant once the first process has been started.
  std::uint32_t ranks;  // of all nodes, node by node
  std::uint32_t nodes;
  DataType dtype;
  bool busy;
  std::uint32_t gpus;           // on which the ranks lie, in turns; 0: host memory
  char cuda_library[kMaxPath];  // names or paths, for dlopen
  char nccl_library[kMaxPath];
  char directory[128];                     // for sockets and rendezvous files
  char addresses[kMaxRanks][kMaxAddress];  // by node
  char coordinator[kMaxAddress];           // of gradsync's job; empty on one node

  Team teams[kImplementations];

  std::uint32_t NodeOf(std::uint32_t rank) const { return rank / (ranks / nodes); }
  Team& team(Implementation implementation) {
    return teams[static_cast<std::size_t>(implementation)];
  }
};

// Maps a zeroed control block of its own, for the conductor.
absl::StatusOr<SharedRegion> CreateControlBlock();

inline ControlBlock* AsControlBlock(const SharedRegion& region) {
  return reinterpret_cast<ControlBlock*>(region.data());
}

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_CONTROL_BLOCK_H_
