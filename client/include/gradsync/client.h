// gradsync's C++ client: how a training process hands its gradients to the daemon of its node.
//
//   gradsync::SessionOptions options;                  // or SessionOptions::FromEnvironment()
//   auto session = gradsync::Session::Join(options);   // one per rank
//   auto layout = (*session)->RegisterLayout(spec);    // cuts the parameters into buckets
//   for (;;) {
//     const uint64_t step = (*layout)->next_step();
//     // The backward pass writes (*layout)->gradient(i); then, as each bucket is complete:
//     (*layout)->MarkReady(step, bucket);              // never blocks
//     (*layout)->EndStep(step);
//     (*layout)->WaitStep(step);                       // OK: averages over the ranks
//   }
//   (*session)->Leave();
//
// Everything here is thread-safe unless said otherwise. Nothing aborts, prints, throws or installs
// signal handlers. In the child of a fork(2) every call fails FAILED_PRECONDITION and destructors
// do nothing.
//
// Besides what each method lists, every method returns the session's end once it has ended:
//   ABORTED              another rank was lost or a newer generation took over (the message names
//                        rank, step, bucket and how it is known); join again.
//   UNAVAILABLE          the daemon is gone or drains. Reason DAEMON_LOST, or STEP_IN_DOUBT when
//                        EndStep was sent, or on a GPU every bucket marked, and no verdict came.
//   FAILED_PRECONDITION  LEFT (this rank has left, or waits in LeaveAndStay), CLOSED (the Session
//                        was destroyed).
// One error is not the session's end: UNAVAILABLE with reason DAEMON_SILENT, from WaitStep,
// WaitBucket, LeaveAndStay, Barrier, Broadcast and AllReduce, when the daemon was not heard for two
// of its leases: it is stopped or hangs. The first three can be repeated and go on where the daemon
// does. The others may still be done on other ranks; the session takes no more of them.
//
// ErrorReason() and ErrorField() read the machine-readable part of any of them.

#ifndef GRADSYNC_CLIENT_H_
#define GRADSYNC_CLIENT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "gradsync/data_type.h"
#include "gradsync/nccl_settings.h"

namespace gradsync {

// A CUstream, which is also a cudaStream_t; null is the legacy default stream.
using CudaStream = void*;

enum class ReduceOp : std::uint8_t { kSum = 1, kAverage = 2 };
enum class Divisor : std::uint8_t { kLiveRanks = 1, kWorld = 2 };
enum class LossPolicy : std::uint8_t { kAbort = 1, kHold = 2, kContinue = 3 };

// Instead of a root of Broadcast.
inline constexpr std::uint32_t kLowestLiveRank = 0xFFFFFFFF;

struct SessionOptions {
  // From torchrun's RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and TORCHELASTIC_RUN_ID (missing:
  // "none", torchrun's default), and from GRADSYNC_SOCKET and GRADSYNC_JOB_TOKEN if they are set;
  // GRADSYNC_COORDINATOR, if it is not set, is MASTER_ADDR, or empty if LOCAL_WORLD_SIZE says that
  // every rank is on this node.
  // INVALID_ARGUMENT names a variable that is missing or malformed.
  static absl::StatusOr<SessionOptions> FromEnvironment();

  // Path of the daemon's gRPC socket; descriptors come over "X-fd.sock" beside "X.sock".
  std::string socket = "/run/gradsync/gradsyncd.sock";
  // Same on every rank of the job; 1-128 printable characters.
  std::string job_id;
  // Optional secret that keeps jobs of one user apart.
  std::string token;
  std::uint32_t rank = 0;
  std::uint32_t world_size = 1;
  LossPolicy on_rank_loss = LossPolicy::kAbort;
  Divisor divisor = Divisor::kLiveRanks;
  // A step not committed this long after its first MarkReady is void on every rank. Zero: the
  // daemon's default, 30 min.
  absl::Duration step_timeout = absl::ZeroDuration();
  // How long to retry while the daemon is not there yet (a sidecar may start late).
  absl::Duration connect_timeout = absl::Seconds(60);
  // "host" or "host:port" of the daemon on rank 0's node, the same on every rank; by default the
  // port of peer_listen of this node's daemon. Daemons without it take no notice. Empty: the job is
  // on this node.
  std::string coordinator;
  // How gradients are summed between GPUs, the same on every rank; left to NCCL by default.
  NcclSettings nccl;
};

struct ParameterSpec {
  std::string name;                  // unique within the layout
  std::vector<std::uint64_t> shape;  // elements per dimension; empty: a scalar
  DataType dtype = DataType::kFloat32;
};

struct BucketSpec {
  DataType dtype = DataType::kFloat32;
  std::uint64_t count = 0;  // elements; may be 0
};

// A named set of parameters. Either `parameters` in the order of the forward pass, cut into buckets
// by the paper's rule (reverse order, `bucket_cap_bytes`, a smaller first bucket; then
// `last_bucket_cap_bytes`), or `explicit_buckets`.
struct LayoutSpec {
  std::string name = "default";
  std::vector<ParameterSpec> parameters;
  std::vector<BucketSpec> explicit_buckets;
  std::uint64_t bucket_cap_bytes = 25u << 20;
  std::uint64_t first_bucket_cap_bytes = 1u << 20;
  // Most bytes of the bucket that is ready last, which the rule may fill up to bucket_cap_bytes; 0:
  // no such cap. What is reduced last is waited for, as no backward pass is left to hide it: if
  // that bucket is larger, as many of its last parameters as fit, at least one, become a bucket of
  // their own. A daemon of before protocol 1.3 does not split.
  std::uint64_t last_bucket_cap_bytes = 0;
  ReduceOp op = ReduceOp::kAverage;
  // GPU on which the buckets lie, by UUID as nvidia-smi -L prints it (CudaDeviceUuid): every rank
  // names one, its own, or none does. Empty: host memory.
  std::string device;
  // How long to wait for the other ranks to register the same.
  absl::Duration timeout = absl::Minutes(5);
};

// One bucket's memory in this rank's arena. Valid as long as the Layout or a Mapping() of it lives.
struct BucketView {
  DataType dtype;
  std::uint64_t count;  // elements, padding between parameters included
  void* data;           // 128-byte aligned; on a GPU its address there
};

// One parameter's gradient inside its bucket. 64-byte aligned, zero-initialised.
struct GradientView {
  DataType dtype;
  std::uint64_t count;   // elements
  std::uint32_t bucket;  // the bucket it lies in
  void* data;
};

// When things happened to one bucket of a step. CLOCK_MONOTONIC nanoseconds.
struct BucketTimes {
  std::vector<std::uint64_t> ready_ns;  // per rank
  std::uint64_t start_ns = 0;           // reduction
  std::uint64_t finish_ns = 0;
};

// What the reduction saw of one bucket's result, for free.
struct BucketNumbers {
  double sum_of_squares = 0;     // of the result's elements; NaN or Inf if one is
  std::uint64_t non_finite = 0;  // elements that are NaN or Inf
};

struct StepResult {
  std::uint64_t step = 0;
  std::uint32_t live_ranks = 0;
  std::uint32_t divisor = 0;  // what averages were divided by
  // Per parameter, true if some rank used it. Empty: every parameter was used by every rank.
  std::vector<bool> used;
  std::vector<BucketTimes> buckets;
  std::vector<BucketNumbers> numbers;  // one per bucket; empty: a daemon that is too old to say
};

// Gradient clipping without a pass over the gradients: the same norm on every rank, and one factor
// for the whole update. Fold it into what the optimizer multiplies by anyway:
//
//   auto result = (*layout)->WaitStep(step);
//   const double norm = gradsync::GradientNorm(*result);
//   if (!std::isfinite(norm)) ...                      // skip the update, lower the loss scale
//   const double clip = gradsync::ClipCoefficient(norm, max_norm);
//   // SGD: weight -= (learning_rate * clip) * gradient
//
// The norm over several layouts is the root of the sum of their norms' squares.

// L2 norm of the step's result over all buckets. NaN if an element is NaN, else Inf if one is Inf;
// NaN also if `numbers` is empty. What WaitStep puts back for MarkUnused is not in it: nobody used
// it, and the reduction saw zeros.
double GradientNorm(const StepResult& result);
// min(1, max_norm / (norm + 1e-6)), as PyTorch's clip_grad_norm_. A norm of NaN gives NaN, one of
// Inf gives 0: neither makes a usable gradient of one that is not finite.
double ClipCoefficient(double norm, double max_norm);

struct SessionStatistics {
  std::uint64_t steps_complete = 0;
  std::uint64_t steps_void = 0;
  std::uint64_t buckets_marked = 0;
  std::uint64_t bytes_reduced = 0;  // of this rank's arenas, complete steps only
  absl::Duration mark_ready_total;  // time spent inside MarkReady, and FinishStep that marks
  absl::Duration exposed_total;     // last mark to StepDone, summed over the steps
};

class Session;

// Only the library derives from these two, and its overriders have no defaults of their own.
// NOLINTBEGIN(google-default-arguments)

// A registered layout: an arena of buckets, and the sequence of its steps. May outlive the Session:
// its calls then return the session's end, and its memory stays readable.
//
// A layout on a GPU is handed over in the order of the trainer's streams, and the host waits for
// nothing on the way:
//
//   (*layout)->MarkReady(step, bucket, {stream});   // behind the kernels that write its gradients
//   (*layout)->FinishStep(step, {}, {stream});
//   (*layout)->WaitOnStream(step, stream);          // what follows on `stream` sees the averages
//   (*layout)->WaitStep(step);                      // the verdict: only then the optimizer
//
// Being released tells a stream nothing about the verdict. Where the host shall not wait for it
// either, an optimizer that takes `found_inf` reads device_verdict(step) behind WaitOnStream and
// leaves out the update of a void step; WaitStep(step) is then called a step later. Two steps may
// be under way: the one being marked, and the one before it that is ended and not decided yet.
//
// Such calls enqueue on streams of this process, any stream of the layout's GPU. Besides what each
// lists they return
//   INVALID_ARGUMENT     MALFORMED: the layout is in host memory; BAD_STREAM: no such stream.
//   FAILED_PRECONDITION  CAPTURING: the stream is being captured into a CUDA graph; nothing was
//                        enqueued.
//   UNAVAILABLE          GPU_FAULT: the process can use the GPU no more.
// When the session ends, every parked stream is released. Destroying the Layout waits for the GPU.
class Layout {
 public:
  virtual ~Layout() = default;
  Layout(const Layout&) = delete;
  Layout& operator=(const Layout&) = delete;

  virtual const std::string& name() const = 0;
  // UUID of the GPU it lies on; empty: host memory.
  virtual const std::string& device() const = 0;
  virtual std::uint64_t fingerprint() const = 0;
  virtual std::size_t bucket_count() const = 0;
  virtual std::size_t parameter_count() const = 0;
  // Bounds are the caller's duty (bucket < bucket_count(), parameter < parameter_count()).
  virtual BucketView bucket(std::size_t bucket) const = 0;
  virtual GradientView gradient(std::size_t parameter) const = 0;
  // Keeps the arena mapped; for views that may outlive the Layout.
  virtual std::shared_ptr<const void> Mapping() const = 0;

  // The step to run now: one more than the last one that was decided or, on a GPU, that this rank
  // has ended.
  virtual std::uint64_t next_step() const = 0;

  // "This rank did not use the parameter in this step." Called before its bucket is marked ready;
  // once is enough. Its gradient becomes zeros, and EndStep says that it is unused. If no rank has
  // used it, the WaitStep that says that the step is complete puts back what the gradient held
  // before: what nobody used is untouched, unless the next step's first MarkReady came before that
  // WaitStep. Allocates only if the gradient was not zero. Explicit layouts have no parameters.
  // On a GPU the gradient becomes zeros on the stream with which its bucket is marked, and nothing
  // is put back: who accumulates over micro-batches keeps a copy.
  //   INVALID_ARGUMENT     UNKNOWN_PARAMETER.
  //   FAILED_PRECONDITION  ALREADY_READY (its bucket was marked), STALE_STEP, PROTOCOL_VIOLATION.
  //   ABORTED              the step is void already; says who and why.
  virtual absl::Status MarkUnused(std::uint64_t step, std::size_t parameter) = 0;

  // "Every gradient of this bucket is written." From here until done the bucket belongs to the
  // daemon, error or not. Never blocks and never waits for the daemon: one small message.
  //   INVALID_ARGUMENT     UNKNOWN_BUCKET.
  //   FAILED_PRECONDITION  ALREADY_READY (a second time in this step), STALE_STEP (decided
  //                        already), PROTOCOL_VIOLATION (a step ahead of next_step(), or after
  //                        EndStep).
  //   ABORTED              the step is void already; says who and why.
  virtual absl::Status MarkReady(std::uint64_t step, std::size_t bucket) = 0;
  // The same on a GPU: "every gradient of this bucket is written once these streams get here". They
  // are joined on the first of them. A stream may be destroyed as soon as this returns. Also
  //   FAILED_PRECONDITION  PROTOCOL_VIOLATION: two steps are under way; wait for the first.
  virtual absl::Status MarkReady(std::uint64_t step, std::size_t bucket,
                                 absl::Span<const CudaStream> streams) = 0;

  // "This rank has marked every bucket ready." `used`: per parameter, whether this rank used it;
  // empty: all. What MarkUnused named is unused as well.
  //   FAILED_PRECONDITION  names the first bucket that was not marked ready.
  virtual absl::Status EndStep(std::uint64_t step, const std::vector<bool>& used = {}) = 0;

  // MarkReady of every bucket that was not, and EndStep, in one message: one less for the last
  // bucket, or for all of them. To a daemon of before protocol 1.3 they are said one by one.
  //   the statuses of MarkReady and EndStep, but for those that name a bucket. If it fails, no
  //   bucket is marked.
  virtual absl::Status FinishStep(std::uint64_t step, const std::vector<bool>& used = {}) = 0;
  // The same on a GPU; the streams as of MarkReady.
  virtual absl::Status FinishStep(std::uint64_t step, const std::vector<bool>& used,
                                  absl::Span<const CudaStream> streams) = 0;

  // This rank cannot finish the step: void for every rank, who are told `reason`. Then wait for the
  // step as usual.
  virtual absl::Status AbandonStep(std::uint64_t step, std::string_view reason) = 0;

  // On a GPU: what is enqueued on `stream` from now on runs when the bucket, or every bucket, is
  // reduced: provisional, as WaitBucket. Enqueued after MarkReady and before or after the
  // reduction.
  //   INVALID_ARGUMENT     UNKNOWN_BUCKET.
  //   FAILED_PRECONDITION  PROTOCOL_VIOLATION: it was not marked ready, so that nothing might ever
  //                        release the stream; STALE_STEP.
  //   ABORTED              the step is void.
  virtual absl::Status WaitOnStream(std::uint64_t step, std::size_t bucket, CudaStream stream) = 0;
  virtual absl::Status WaitOnStream(std::uint64_t step, CudaStream stream) = 0;
  // Address, on the GPU, of a float that is 0 if the step is complete and 1 if it is void: what
  // optimizers take as `found_inf`. To be read on a stream behind WaitOnStream(step, stream), and
  // until the first MarkReady of step + 2. Null in host memory. It contradicts no WaitStep of any
  // rank: where one GPU may have said complete, no rank is told that the step is void, but complete
  // or STEP_IN_DOUBT.
  virtual const float* device_verdict(std::uint64_t step) const = 0;

  // Waits until one bucket is reduced: provisional, for inspection or clipping; only WaitStep
  // commits. Blocks on a futex; on a GPU it looks again every 200 us.
  //   ABORTED              the step is void.
  //   DEADLINE_EXCEEDED    says who is missing what; changes nothing.
  //   FAILED_PRECONDITION  STALE_STEP: decided long ago (only the last verdict is kept, on a GPU
  //                        the last two).
  virtual absl::Status WaitBucket(std::uint64_t step, std::size_t bucket,
                                  absl::Duration timeout = absl::InfiniteDuration()) = 0;

  // Waits for the step's verdict, the same on every rank. OK: every bucket holds the reduction.
  //   ABORTED              void: a rank abandoned it (names the rank and its reason) or was lost.
  //                        Zero the gradients and redo the step from its first micro-batch under
  //                        next_step(). Reason STEP_IN_DOUBT: complete on some ranks, perhaps, and
  //                        void on others; the session is about to end. Compare the ranks' last
  //                        steps, or go on from a checkpoint on every rank.
  //   DEADLINE_EXCEEDED    reason STEP_TIMEOUT: void, the job's step_timeout ran out; names who is
  //                        missing what. Reason WAIT_TIMEOUT: `timeout` ran out first; nothing
  //                        changed.
  //   FAILED_PRECONDITION  STALE_STEP: decided long ago (only the last verdict is kept, on a GPU
  //                        the last two).
  virtual absl::StatusOr<StepResult> WaitStep(
      std::uint64_t step, absl::Duration timeout = absl::InfiniteDuration()) = 0;

 protected:
  Layout() = default;
};

// One rank's live membership in a job. Destroying it without Leave() is a loss to the other ranks.
class Session {
 public:
  // Connects, retrying until connect_timeout, and joins.
  //   INVALID_ARGUMENT     an option is malformed (named).
  //   UNAVAILABLE          no daemon at `socket` within connect_timeout; or none that answers at
  //                        `coordinator` within 20 s, which is not retried.
  //   PERMISSION_DENIED    the socket's permissions, a missing token.
  //   ALREADY_EXISTS       the rank is held while the job is still forming.
  //   FAILED_PRECONDITION  world size or options differ from the other ranks', no protocol or
  //                        shared-memory ABI in common.
  //   UNIMPLEMENTED        a loss policy that the daemon does not have.
  //   RESOURCE_EXHAUSTED   a quota.
  static absl::StatusOr<std::unique_ptr<Session>> Join(const SessionOptions& options);

  virtual ~Session() = default;
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  virtual std::uint32_t rank() const = 0;
  virtual std::uint32_t world_size() const = 0;
  virtual std::uint64_t generation() const = 0;
  virtual std::uint64_t incarnation() const = 0;

  // Registers, maps and populates; returns when every rank has done the same. Each layout has its
  // own arena and steps.
  //   INVALID_ARGUMENT     a malformed spec.
  //   FAILED_PRECONDITION  LAYOUT_MISMATCH: names the first difference and both ranks.
  //   DEADLINE_EXCEEDED    names the ranks that did not come.
  //   FAILED_PRECONDITION  RANKS_LEFT: some ranks wait in LeaveAndStay; names them.
  //   RESOURCE_EXHAUSTED   a quota; GPU_OUT_OF_MEMORY; MPS_FULL: no more clients.
  //   UNIMPLEMENTED        CUDA_UNAVAILABLE: `device` is given, and this library or the daemon has
  //                        no CUDA.
  //   FAILED_PRECONDITION  CUDA_DRIVER_MISSING, CUDA_DRIVER_TOO_OLD; GPU_NOT_VISIBLE to this
  //   process
  //                        or the daemon; GPU_UNUSABLE, GPU_UNSUPPORTED: what to do.
  virtual absl::StatusOr<std::unique_ptr<Layout>> RegisterLayout(const LayoutSpec& spec) = 0;
  // Registers `spec` in the place of `old`, a layout of this session, between two of its steps:
  // buckets in another order, or other ones, that were learned while training. Called by every
  // rank, normally with the name of the old one. The new layout has memory of its own and goes on
  // with the old one's step numbers. Then the calls of `old` return FAILED_PRECONDITION
  // LAYOUT_REPLACED (but for its last verdict), and its memory stays readable. If this fails, `old`
  // is as before, on every rank.
  //   FAILED_PRECONDITION  PROTOCOL_VIOLATION: a step of `old` is open, or it is being replaced
  //                        already; LAYOUT_REPLACED; LAYOUT_MISMATCH, also if the ranks do not
  //                        replace the same layout.
  //   and the statuses of RegisterLayout.
  virtual absl::StatusOr<std::unique_ptr<Layout>> ReplaceLayout(Layout& old,
                                                                const LayoutSpec& spec) = 0;

  // Operations of the job's own channel: every rank calls the same ones in the same order, one at a
  // time (calls from several threads of one rank are serialized). Block until done.
  //   FAILED_PRECONDITION  OPERATION_MISMATCH: the ranks disagree; names both ranks and both
  //                        operations.
  //   DEADLINE_EXCEEDED    names the ranks that did not come; the operation failed on every rank.
  virtual absl::Status Barrier(absl::Duration timeout = absl::Minutes(30)) = 0;
  // Copies `bytes` bytes from the root's `data` into every other rank's `data`. `root` may be
  // kLowestLiveRank, on every rank: the lowest one that has not left when the last one comes.
  // FAILED_PRECONDITION also if the root has left.
  virtual absl::Status Broadcast(void* data, std::size_t bytes, std::uint32_t root,
                                 absl::Duration timeout = absl::Minutes(30)) = 0;
  // Reduces a small tensor in place, in rank order; it must fit the staging memory (32 MiB).
  virtual absl::Status AllReduce(void* data, std::size_t count, DataType dtype, ReduceOp op,
                                 absl::Duration timeout = absl::Minutes(30)) = 0;

  // No more steps from this rank; the session ends, the others go on. Waits for an operation of
  // this rank on another thread. FAILED_PRECONDITION while a step of this rank is open.
  virtual absl::Status Leave() = 0;
  // This rank has no more data in this epoch: steps and operations of the others go on without it,
  // and every call of it fails LEFT, until every rank has left; blocks until then. Then all that
  // stayed take part again: layouts go on with next_step(), operations in order. Returns the rank
  // that left last of those that stayed, whose state is the one to broadcast. A wait that timed out
  // can be repeated. No layout can be registered or replaced meanwhile (RANKS_LEFT).
  virtual absl::StatusOr<std::uint32_t> LeaveAndStay(
      absl::Duration timeout = absl::Minutes(30)) = 0;

  virtual SessionStatistics Statistics() const = 0;

 protected:
  Session() = default;
};

// NOLINTEND(google-default-arguments)

// UUID of the GPU that CUDA calls `ordinal` in this process (torch.device("cuda", ordinal)), for
// LayoutSpec::device. The driver is libcuda.so.1, or the file that GRADSYNC_CUDA_LIBRARY names.
//   UNIMPLEMENTED        CUDA_UNAVAILABLE
//   FAILED_PRECONDITION  CUDA_DRIVER_MISSING, CUDA_DRIVER_TOO_OLD; GPU_UNUSABLE: no such device,
//                        or it cannot be opened, and what to look at.
//   RESOURCE_EXHAUSTED   MPS_FULL
absl::StatusOr<std::string> CudaDeviceUuid(int ordinal);

// The reason of an error from gradsync ("RANK_LOST"), or "" for any other status.
std::string ErrorReason(const absl::Status& status);
// A field of it ("job", "rank", "channel", "step", "bucket"), or "".
std::string ErrorField(const absl::Status& status, std::string_view field);

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_H_
