// What combines the local ranks' copies of a bucket. The job room speaks to this interface;
// HostReducer is the one for host memory, and tests hold operations back and complete them in any
// order.

#ifndef DAEMON_REDUCE_REDUCER_H_
#define DAEMON_REDUCE_REDUCER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "daemon/reduce/bucket_numbers.h"
#include "proto/gradsync/data_type.h"
#include "proto/gradsync/nccl_settings.h"

namespace gradsync {

class GpuArena;  // daemon/worker

// CLOCK_MONOTONIC nanoseconds.
struct ReduceTimes {
  std::uint64_t start_ns = 0;
  std::uint64_t finish_ns = 0;
};

// Where a bucket lies on GPUs. Empty: it does not.
struct GpuBucket {
  absl::InlinedVector<GpuArena*, 8> arenas;  // rank order; the owner keeps them until done
  std::uint64_t layout = 0;                  // among all of the daemon's, never used twice
  std::uint64_t offset = 0;                  // bytes from each arena's start
  std::uint64_t verdict_offset = 0;          // of the float that takes the step's verdict
  std::uint32_t step_buckets = 0;            // buckets of a step
  NcclSettings nccl;                         // the job's
  // Set before done(): some rank's gradients never came, and where they were to go holds nothing of
  // value. Of a step's last bucket this is the verdict that the trainers' streams have seen; if it
  // has failed and this is false, they may have seen either.
  bool is_void = false;
};

// One bucket's reduction: buffers[0] + buffers[1] + ... in this order, times `scale`, written back
// into every buffer. Made once per bucket and submitted once per step: nothing is allocated on the
// way.
struct ReduceOperation {
  DataType dtype = DataType::kUnspecified;
  std::size_t count = 0;  // elements of each buffer
  double scale = 1.0;
  absl::InlinedVector<std::byte*, 8>
      buffers;  // rank order; 64-byte aligned; the owner keeps them mapped until done
  // Their ranks, and what is reduced, for reducers that speak to other nodes about it: bucket of
  // the layout on `channel` in step `number`, or operation `number` of channel 0.
  absl::InlinedVector<std::uint32_t, 8> ranks;
  std::uint32_t channel = 0;
  std::uint32_t bucket = 0;
  std::uint64_t number = 0;
  // Some buffers lie on other nodes, and are null here.
  bool between_nodes = false;
  // If its arenas are not empty, `buffers` is.
  GpuBucket gpu;
  // 0 or more, between nodes only: no reduction, but a copy of that rank's buffer to the others;
  // `count` bytes.
  int root = -1;
  std::uint64_t flow = 0;  // reduce threads are shared fairly between flows; a flow is a job
  bool measure = false;    // gather `numbers` on the way
  // Of the result if `measure`, from before done() until the next submission.
  BucketNumbers numbers;
  // Set before done() by a reducer that can fail: the buffers hold nothing of value, and the job
  // ends with this.
  absl::Status failure;
  // Called once per submission, after the last write, on a reduce thread or on the submitter's own
  // thread from within Reduce(). Must not block.
  std::function<void(const ReduceTimes&)> done;

  // The reducer's own, between Reduce() and done().
  std::atomic<std::uint32_t> slices_left{0};
  std::atomic<std::uint64_t> start_ns{0};
  std::vector<BucketNumbers> slice_numbers;  // by slice, added up in this order; grows once
};

// A step on GPUs that is void. Numbers as in GpuBucket.
struct GivenUpStep {
  std::uint64_t layout = 0;
  std::uint64_t step = 0;
  std::vector<std::shared_ptr<GpuArena>> arenas;
};

// Thread-safe.
class Reducer {
 public:
  virtual ~Reducer() = default;
  // Begins the reduction. `operation` stays alive and untouched until its done() has been called.
  virtual void Reduce(ReduceOperation* operation) = 0;
  // Operations of this step that wait for the gradients of some rank are done soon, without them.
  // Those that wait for nobody go on as they would have.
  virtual void GiveUp(const GivenUpStep& /*step*/) {}
};

}  // namespace gradsync

#endif  // DAEMON_REDUCE_REDUCER_H_
