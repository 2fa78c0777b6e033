// The interface that combines the ranks' copies of a bucket. The job room knows only this
// interface. HostReducer implements it for host memory of this node, GpuReducer (daemon/worker) for
// GPUs, and NodeGroup (daemon/peer) between nodes. Tests have implementations that hold operations
// back and complete them in any order.

#ifndef DAEMON_REDUCE_REDUCER_H_
#define DAEMON_REDUCE_REDUCER_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <variant>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "daemon/arena/device_arena.h"
#include "daemon/base/tenant.h"
#include "daemon/reduce/gradient_stats.h"
#include "proto/gradsync/data_type.h"
#include "proto/gradsync/nccl_settings.h"
#include "proto/gradsync/reduce_op.h"

namespace gradsync::daemon {

// CLOCK_MONOTONIC nanoseconds.
struct ReduceTimes {
  std::uint64_t start_ns = 0;
  std::uint64_t finish_ns = 0;
};

// One buffer per rank, in rank order, 64-byte aligned. The owner keeps them mapped until done().
using HostBuffers = absl::InlinedVector<std::byte*, 8>;

// The reduction of host memory when every rank is on this node.
struct HostReduction {
  HostBuffers buffers;
  // Not 0: nothing is reduced. The only buffer holds the result of an earlier reduction of this
  // many buffers, and its statistics are measured again. The same loop measures in the same slices,
  // so that the statistics are equal bit for bit.
  std::size_t measured_of = 0;

  // HostReducer's own, between Reduce() and done().
  std::atomic<std::uint32_t> slices_left{0};
  std::atomic<std::uint64_t> start_ns{0};
  std::vector<GradientStats> slice_stats;  // by slice, added up in this order; grows once
};

// The reduction of host memory when some ranks are on other nodes.
struct NodeReduction {
  HostBuffers buffers;  // null for ranks on other nodes
};

// The reduction of memory on GPUs, of this node and of others.
struct DeviceReduction {
  absl::InlinedVector<DeviceArena*, 8> arenas;  // rank order; the owner keeps them until done()
  std::uint64_t layout = 0;          // identifies this layout in the daemon; never used twice
  std::uint64_t offset = 0;          // bytes from each arena's start
  std::uint64_t verdict_offset = 0;  // of the float that takes the step's verdict
  std::uint32_t step_buckets = 0;    // buckets of a step
  NcclSettings nccl;                 // the job's

  // Set before done(). True if a rank's gradients never arrived; then the output is undefined. For
  // the last bucket of a step this is the verdict that the trainers' streams have seen. If that
  // bucket has failed and this is false, the streams may have seen either verdict.
  bool is_void = false;
};

// No reduction: a copy of one rank's buffer to the others. Ranks may be on several nodes.
struct NodeBroadcast {
  HostBuffers buffers;  // null for ranks on other nodes; `count` bytes each
  std::uint32_t root = 0;
};

// One bucket's reduction: the sum of the ranks' buffers, in rank order, times `scale`, or their
// minimum or maximum, is written back into every buffer. With NodeBroadcast it is a broadcast
// instead.
//
// Made once per bucket and submitted once per step; a submission allocates nothing. Not
// thread-safe: it belongs to the submitter, and to the reducer between Reduce() and done().
struct ReduceOperation {
  DataType dtype = DataType::kUnspecified;
  std::size_t count = 0;         // elements of each buffer
  ReduceOp op = ReduceOp::kSum;  // sum, min or max: an average is a sum with a scale
  double scale = 1.0;            // 1.0 if IsOrderFree(op, dtype)
  // Where the buffers are. This also decides which reducer carries the operation out.
  std::variant<HostReduction, NodeReduction, DeviceReduction, NodeBroadcast> work;

  // The ranks of the buffers, and the name of the operation, for reducers that speak to other
  // nodes or to workers: bucket `bucket` of the layout on `channel` in step `number`, or operation
  // `number` of channel 0.
  absl::InlinedVector<std::uint32_t, 8> ranks;
  std::uint32_t channel = 0;
  std::uint32_t bucket = 0;
  std::uint64_t number = 0;

  // Reduce threads are shared fairly between users, and between the flows of a user. A flow is a
  // job.
  Tenant user;
  std::uint64_t flow = 0;
  bool measure = false;  // also fill `stats`; false if IsOrderFree(op, dtype)

  // Statistics of the result, if `measure`. Valid from done() until the next submission.
  GradientStats stats;
  // Set before done() by a reducer that can fail. The buffers are then undefined, and the job ends
  // with this error.
  absl::Status failure;
  // Called once per submission, after the last write: on a thread of the reducer, or on a thread
  // that is in Reduce() or GiveUp(). Must not block.
  std::function<void(const ReduceTimes&)> done;

  // Makes this the reduction of `buffers`: between nodes if some of them are null.
  void SetBuffers(const HostBuffers& buffers) {
    if (std::find(buffers.begin(), buffers.end(), nullptr) != buffers.end()) {
      work.emplace<NodeReduction>().buffers = buffers;
      return;
    }
    // Keeps what HostReducer has allocated.
    if (!std::holds_alternative<HostReduction>(work)) work.emplace<HostReduction>();
    host().buffers = buffers;
  }

  // `work`. Requires that it is of this kind.
  HostReduction& host() { return std::get<HostReduction>(work); }
  const HostReduction& host() const { return std::get<HostReduction>(work); }
  DeviceReduction& device() { return std::get<DeviceReduction>(work); }
  const DeviceReduction& device() const { return std::get<DeviceReduction>(work); }
};

// A step on GPUs that is void, although some of its operations may still wait for gradients.
struct GivenUpStep {
  std::uint64_t layout = 0;  // DeviceReduction::layout
  std::uint64_t step = 0;
  std::vector<std::shared_ptr<DeviceArena>> arenas;
};

// Thread-safe. Owns no operation.
class Reducer {
 public:
  virtual ~Reducer() = default;
  // Begins the reduction. `operation` stays alive and untouched until its done() has been called.
  virtual void Reduce(ReduceOperation* operation) = 0;
  // Begins several operations, which one change of a job has caused. A reducer may limit the time
  // that all of them together cost the caller.
  virtual void ReduceAll(absl::Span<ReduceOperation* const> operations) {
    for (ReduceOperation* operation : operations) Reduce(operation);
  }
  // Ends the operations of this step that still wait for the gradients of some rank: each calls
  // done() soon, with is_void set. An operation whose gradients have all arrived continues.
  virtual void GiveUp(const GivenUpStep& /*step*/) {}
};

}  // namespace gradsync::daemon

#endif  // DAEMON_REDUCE_REDUCER_H_
