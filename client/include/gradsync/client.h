// gradsync's C++ client: a training process hands its gradients to the daemon of its node.
//
//   gradsync::SessionOptions options;                  // or SessionOptions::FromEnvironment()
//   auto session = gradsync::Session::Join(options);   // one per rank
//   auto layout = (*session)->RegisterLayout(spec);    // cuts the parameters into buckets
//   for (;;) {
//     const uint64_t step = (*layout)->next_step();
//     // The backward pass writes (*layout)->gradient(i). Then, as each bucket is complete:
//     (*layout)->MarkReady(step, bucket);              // never blocks
//     (*layout)->EndStep(step);
//     (*layout)->WaitStep(step);                       // OK: averages over the ranks
//   }
//   (*session)->Leave();
//
// Everything here is thread-safe unless it says otherwise. Nothing aborts, prints, throws or
// installs signal handlers. In the child of a fork(2) every call fails FAILED_PRECONDITION FORKED,
// and destructors do nothing.
//
// With a timeout of zero or below, WaitBucket, WaitStep, LeaveAndStay and ConfirmState return at
// once: the answer if there is one, else DEADLINE_EXCEEDED. AwaitEnd returns at once, too. For the
// other calls such a timeout counts as 1 ms.
//
// Each method lists its own errors. After such an error the session goes on, unless the list says
// that the session or the job ends. Once the session has ended, every method returns why:
//   ABORTED              RANK_LOST, SUPERSEDED, LEASE_EXPIRED. The message names rank, step and
//                        bucket, and how the loss is known. Join again. RANK_FINISHED: a rank has
//                        called Finish, and another one has begun something that needs that rank.
//   ABORTED              STEP_IN_DOUBT: see WaitStep.
//   UNAVAILABLE          DAEMON_LOST, DRAINING, COORDINATOR_LOST, WORKER_LOST and other losses.
//                        STEP_IN_DOUBT: no verdict arrived after this rank had ended the step or,
//                        on a GPU, had marked every bucket.
//   FAILED_PRECONDITION  LEFT: this rank has left. CLOSED: the Session was destroyed.
//
// UNAVAILABLE DAEMON_SILENT does not end the session. The daemon is stopped or hangs: it has said
// nothing for two leases, or has not sent the verdict of a decided step within 10 s. WaitStep,
// WaitBucket, LeaveAndStay, FetchState and ConfirmState can be repeated, and go on when the daemon
// does.
//
// DEADLINE_EXCEEDED WAIT_TIMEOUT of RegisterLayout, ReplaceLayout, Leave or Finish means that the
// daemon has not answered in time. The session has not ended, but the daemon hangs: look at it,
// destroy the Session, then join again.
//
// If the daemon does not answer Barrier, Broadcast or AllReduce, they return DAEMON_SILENT or
// WAIT_TIMEOUT. The operation may still complete on other ranks, so this session takes no more of
// them. Its steps go on. Exception: an operation waits until those of other threads are done. With
// kHold it may also have to wait until a step is complete, on a replacement and on the rank that
// gives it the state. If such a wait fails, the operation has not begun. Call it again.
//
// ErrorReason() and ErrorField() read the reason and the fields of an error. docs/errors.md lists
// every reason.

#ifndef GRADSYNC_CLIENT_H_
#define GRADSYNC_CLIENT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "gradsync/data_type.h"
#include "gradsync/error_reason.h"
#include "gradsync/nccl_settings.h"
#include "gradsync/reduce_op.h"

namespace gradsync {

// A CUstream, which is also a cudaStream_t; null is the legacy default stream.
using CudaStream = void*;

// What an average divides its sum by: the ranks that take part, or the world size.
enum class Divisor : std::uint8_t { kLiveRanks = 1, kWorld = 2 };
// What a lost rank does to its job. kAbort ends the job. With kHold the running step waits until
// another process takes the rank's place; see docs/hold.md. kContinue is not implemented yet.
enum class LossPolicy : std::uint8_t { kAbort = 1, kHold = 2, kContinue = 3 };
// With kHold: who gives a replacement the state of the model. kSurvivor: a survivor, see
// Session::ServeState. kTrainer: the trainers themselves, for example from a file that each rank
// writes after every step.
enum class StateSource : std::uint8_t { kSurvivor = 1, kTrainer = 2 };

// As the root of Broadcast: the lowest rank that takes part.
inline constexpr std::uint32_t kLowestLiveRank = 0xFFFFFFFF;

// Options that the trainer sets itself. A given option wins over its environment variable, which is
// then neither needed nor read. nullopt: the variable is used.
struct GivenOptions {
  std::optional<std::string> socket;
  std::optional<std::string> job_id;
  std::optional<std::string> token;
  std::optional<std::uint32_t> rank;
  std::optional<std::uint32_t> world_size;
  std::optional<std::string> coordinator;
};

struct SessionOptions {
  // Reads the environment variables of options that are not given.
  //   RANK, WORLD_SIZE           for `rank`, `world_size`: as torchrun sets them.
  //   MASTER_ADDR, MASTER_PORT   for `job_id`: as torchrun sets them.
  //   TORCHELASTIC_RUN_ID        for `job_id`; default "none", as torchrun's.
  //   GRADSYNC_SOCKET            default: `socket` below.
  //   GRADSYNC_JOB_TOKEN         default: no token.
  //   GRADSYNC_COORDINATOR       default: MASTER_ADDR, or empty if that is not set or
  //                              LOCAL_WORLD_SIZE equals the world size.
  // INVALID_ARGUMENT MALFORMED: an option is missing, and the error names the option and its
  // variable; or an option or a variable is malformed, and the error names it.
  static absl::StatusOr<SessionOptions> FromEnvironment(const GivenOptions& given = {});

  // Path of the daemon's gRPC socket, "X.sock". Descriptors come over "X-fd.sock" beside it.
  std::string socket = "/run/gradsync/gradsyncd.sock";
  // The same on every rank of the job; 1 to 128 printable characters.
  std::string job_id;
  // Optional secret that keeps jobs of one user apart; at most 4096 bytes.
  std::string token;
  std::uint32_t rank = 0;
  std::uint32_t world_size = 1;
  LossPolicy on_rank_loss = LossPolicy::kAbort;
  StateSource state_source = StateSource::kSurvivor;
  // With kHold: how long the other ranks wait for a lost one in one step, before the job ends with
  // RANK_LOST. At most a week. Zero: 10 min.
  absl::Duration hold_timeout = absl::ZeroDuration();
  Divisor divisor = Divisor::kLiveRanks;
  // A step that is not decided this long after its first MarkReady is void on every rank. Zero: the
  // daemon's option step_timeout, 30 min unless it is set.
  absl::Duration step_timeout = absl::ZeroDuration();
  // How long Join tries again while no daemon listens, while the coordinator cannot be reached or,
  // with kHold, while another session has the rank: the daemon may start after the trainer, and a
  // replacement may start before the daemon knows of the loss.
  absl::Duration connect_timeout = absl::Seconds(60);
  // "host" or "host:port" of the daemon on rank 0's node, the same on every rank. Without a port:
  // the port in this node's peer_listen. Empty: every rank is on this node. A daemon without
  // peer_listen ignores it.
  std::string coordinator;
  // How NCCL sums gradients between GPUs, the same on every rank. Default: NCCL's own choice.
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

// A named set of either `parameters`, in the order of the forward pass, or `explicit_buckets`. The
// daemon cuts `parameters` into buckets in reverse order. A bucket has one data type and up to
// `bucket_cap_bytes`; the first and the last bucket can have smaller caps.
struct LayoutSpec {
  std::string name = "default";
  std::vector<ParameterSpec> parameters;
  std::vector<BucketSpec> explicit_buckets;
  std::uint64_t bucket_cap_bytes = 25u << 20;
  std::uint64_t first_bucket_cap_bytes = 1u << 20;
  // Largest size of the last bucket; 0: no limit but bucket_cap_bytes. The trainer waits for the
  // last reduction, because no backward pass is left to hide it. If the last bucket is larger, its
  // last parameters move into a new bucket: as many as fit under this cap, and at least one.
  std::uint64_t last_bucket_cap_bytes = 0;
  // Integers have no average. Integers, and the minimum and maximum of any type, are allowed only
  // with explicit_buckets in host memory.
  ReduceOp op = ReduceOp::kAverage;
  // UUID of the GPU that holds the buckets, as nvidia-smi -L prints it; see CudaDeviceUuid. Empty:
  // host memory. Either every rank names its own GPU, or none does.
  std::string device;
  // How long to wait for the other ranks to register the same layout.
  absl::Duration timeout = absl::Minutes(5);
  // Bytes of one more bucket, the last one, for the buffers of the model, such as BatchNorm's; see
  // Layout::buffers(). 0: none. Only in host memory.
  std::uint64_t buffer_bytes = 0;
};

// A layout of the job, as a replacement has to register it.
struct CurrentLayout {
  LayoutSpec spec;         // with the default timeout
  std::uint64_t step = 0;  // the running step, or the next one if none is running
};

// Where a trainer is in its data.
struct Position {
  std::uint64_t epoch = 0;
  std::uint64_t batch = 0;  // in the epoch
};

// One part of the state that every rank shares: a parameter, a state of the optimizer and so on.
struct StateItem {
  std::string name;            // 1 to 1024 bytes of UTF-8, unique within the state
  const void* data = nullptr;  // host memory of the trainer
  std::size_t bytes = 0;
};

// Tells the library where the trainer's state of the model is. The trainer writes a subclass.
class TrainerState {
 public:
  virtual ~TrainerState() = default;

  // The items, with the same names in the same order on every rank. Called on a thread of the
  // library, while the trainer waits in a call (WaitStep, WaitBucket, ConfirmState, Leave, Finish
  // and others), or between its EndStep and the next wait. The memory stays as it is until Done().
  // An error means that this rank cannot give its state; its message reaches the daemon's log and
  // the replacement.
  virtual absl::StatusOr<std::vector<StateItem>> Read() = 0;
  // The memory of the items is not used any more. Follows each Read() that succeeded, on the same
  // thread.
  virtual void Done() = 0;
};

// A state that another rank gave.
struct StateImage {
  struct Item {
    std::string name;
    absl::Span<std::byte> data;  // aligned to 64 bytes
  };

  std::uint32_t source = 0;  // the rank that gave it
  std::vector<Item> items;   // in the order of the source
  // Keeps the items' memory, one allocation of this process.
  std::shared_ptr<std::byte> memory;
};

// One bucket's memory in this rank's arena. Valid while the Layout or a Mapping() of it exists.
struct BucketView {
  DataType dtype;
  std::uint64_t count;  // elements, including the padding between parameters
  void* data;           // aligned to 128 bytes; a device address on a GPU
};

// One parameter's gradient inside its bucket. Valid while its bucket is.
struct GradientView {
  DataType dtype;
  std::uint64_t count;   // elements
  std::uint32_t bucket;  // index of its bucket
  void* data;            // aligned to 64 bytes; zeros at first; a device address on a GPU
};

// When one bucket of a step was marked and reduced, in nanoseconds of CLOCK_MONOTONIC.
struct BucketTimes {
  std::vector<std::uint64_t> ready_ns;  // one per rank
  std::uint64_t start_ns = 0;           // of the reduction
  std::uint64_t finish_ns = 0;
};

// Statistics of one bucket's result. The reduction measures them as it writes the result, at no
// extra cost. Integers, minima and maxima are not measured: then sum_of_squares is NaN and
// non_finite is 0. The bucket of the model's buffers has 0 in both.
struct GradientStats {
  double sum_of_squares = 0;     // of the result's elements; NaN or Inf if an element is
  std::uint64_t non_finite = 0;  // elements that are NaN or Inf
};

struct StepResult {
  std::uint64_t step = 0;
  std::uint32_t live_ranks = 0;  // ranks that took part
  std::uint32_t divisor = 0;     // averages are sums divided by this
  // One per parameter: true if at least one rank used it. Empty: every rank used every parameter.
  std::vector<bool> used;
  std::vector<BucketTimes> buckets;  // one per bucket
  std::vector<GradientStats> stats;  // one per bucket
};

// Gradient clipping without a pass over the gradients. The norm is the same on every rank, and one
// factor clips the whole update:
//
//   auto result = (*layout)->WaitStep(step);
//   const double norm = gradsync::GradientNorm(*result);
//   if (!std::isfinite(norm)) ...                      // skip the update, lower the loss scale
//   const double clip = gradsync::ClipCoefficient(norm, max_norm);
//   // SGD: weight -= (learning_rate * clip) * gradient
//
// The norm over several layouts is the root of the sum of their norms' squares.

// L2 norm of the step's result over all buckets. NaN if an element is NaN, if `stats` is empty, or
// if a bucket is not measured (integers, minima, maxima). Otherwise Inf if an element is Inf, or if
// the squares of float64 elements are too large. Parameters that no rank used count as zeros.
double GradientNorm(const StepResult& result);
// min(1, max_norm / (norm + 1e-6)), as in PyTorch's clip_grad_norm_. NaN for a norm of NaN, 0 for a
// norm of Inf. A coefficient does not repair gradients that are not finite: skip that update.
double ClipCoefficient(double norm, double max_norm);

struct SessionStatistics {
  std::uint64_t steps_complete = 0;
  std::uint64_t steps_void = 0;
  std::uint64_t buckets_marked = 0;
  std::uint64_t bytes_reduced = 0;  // in this rank's arenas, complete steps only
  absl::Duration mark_ready_total;  // time inside MarkReady, and inside FinishStep if it marks
  absl::Duration exposed_total;     // from a step's last mark to its verdict, summed over the steps
};

class Session;

// Only the library derives from these two, and its overrides have no defaults of their own.
// NOLINTBEGIN(google-default-arguments)

// A registered layout: an arena of buckets, and the sequence of its steps. A Layout may outlive the
// Session: then its calls return why the session has ended, and its memory stays readable. The
// destructor releases the layout; see Release().
//
// On a GPU, calls take the trainer's streams, and the host waits for nothing on the way:
//
//   (*layout)->MarkReady(step, bucket, {stream});   // after the kernels that write its gradients
//   (*layout)->FinishStep(step, {}, {stream});
//   (*layout)->WaitOnStream(step, stream);          // later work on `stream` sees the averages
//   (*layout)->WaitStep(step);                      // the verdict: run the optimizer only after it
//
// For such a layout MarkReady and FinishStep without streams fail INVALID_ARGUMENT MALFORMED.
//
// A stream goes on whether the step is complete or void. To keep even the verdict off the host, use
// an optimizer that takes `found_inf`: it reads device_verdict(step) after WaitOnStream and skips
// the update of a void step. Call WaitStep(step) one step later. Two steps may be under way: the
// one that is being marked, and the one before it, which is ended but not decided.
//
// Every stream must be alive, and belong to this process and to the layout's GPU. To use a
// destroyed stream is undefined, as in CUDA: the process may crash. Besides its own errors, a call
// that takes a stream can return
//   INVALID_ARGUMENT     MALFORMED: the layout is in host memory. BAD_STREAM: the driver refuses
//                        the stream.
//   FAILED_PRECONDITION  CAPTURING: the stream is being captured into a CUDA graph. Nothing was
//                        enqueued.
//   UNAVAILABLE          GPU_FAULT: this process cannot use the GPU any more.
// The session's end releases every stream that waits. Destroying the Layout, or the last reference
// to its Mapping(), waits for every stream of the GPU. Do neither while a stream is being captured
// into a graph: CUDA invalidates the capture, and the memory stays mapped until the process ends.
class Layout {
 public:
  virtual ~Layout() = default;
  Layout(const Layout&) = delete;
  Layout& operator=(const Layout&) = delete;

  virtual const std::string& name() const = 0;
  // UUID of the GPU that holds it; empty: host memory.
  virtual const std::string& device() const = 0;
  // Hash of the layout, the same on every rank.
  virtual std::uint64_t fingerprint() const = 0;
  virtual std::size_t bucket_count() const = 0;
  virtual std::size_t parameter_count() const = 0;
  // Indexes are not checked: bucket < bucket_count(), parameter < parameter_count().
  virtual BucketView bucket(std::size_t bucket) const = 0;
  virtual GradientView gradient(std::size_t parameter) const = 0;
  // The memory for the model's buffers, LayoutSpec::buffer_bytes bytes of kUint8; count 0 if there
  // are none. It is bucket(bucket_count() - 1); mark it like every other bucket. Rank 0 writes its
  // buffers, and every other rank writes zeros. A complete step brings rank 0's bytes to every
  // rank. GradientNorm() leaves this bucket out.
  virtual BucketView buffers() const = 0;
  // Keeps the arena mapped while views of it may outlive the Layout.
  virtual std::shared_ptr<const void> Mapping() const = 0;

  // The first step of this rank when the layout became ready: 1, or more if it replaces another
  // layout or the session replaces a lost one. Another rank may have abandoned that step by now;
  // then next_step() is larger.
  virtual std::uint64_t first_step() const = 0;
  // The step to run now, from 1. One more than the last decided step; on a GPU, one more than the
  // last step that this rank has ended.
  virtual std::uint64_t next_step() const = 0;

  // Says where this rank is in its data at the next step that it begins. The position is sent with
  // the step's first BucketReady and with EndStep. If ranks give different positions in one step,
  // the daemon ends the session of the rank that gave its position last: FAILED_PRECONDITION
  // POSITION_MISMATCH, which names both ranks and positions.
  virtual void SetPosition(Position position) = 0;

  // "This rank did not use the parameter in this step." Call it before the parameter's bucket is
  // marked ready; once is enough. The gradient becomes zeros, and EndStep reports the parameter as
  // unused.
  //
  // If no rank used the parameter, WaitStep of the complete step puts back the gradient that was
  // there before, unless the next step's first MarkReady came before that WaitStep. MarkUnused
  // copies the gradient only if it is not zero.
  //
  // On a GPU, the stream that marks the bucket writes the zeros, and nothing is put back: a trainer
  // that accumulates gradients over micro-batches keeps a copy. Explicit layouts have no
  // parameters.
  //   INVALID_ARGUMENT     UNKNOWN_PARAMETER.
  //   FAILED_PRECONDITION  ALREADY_READY: its bucket was marked. STALE_STEP. PROTOCOL_VIOLATION.
  //   WaitStep's error     the step is already void; the message names the rank and the cause.
  virtual absl::Status MarkUnused(std::uint64_t step, std::size_t parameter) = 0;

  // "Every gradient of this bucket is written." From here until the bucket is done, its memory
  // belongs to the daemon, even if the step fails. With kHold it is then read-only until the
  // verdict: see WaitBucket. Mark the buckets in any order: each is reduced when every rank has
  // marked it. Sends one small message; never blocks.
  //   INVALID_ARGUMENT     UNKNOWN_BUCKET.
  //   FAILED_PRECONDITION  ALREADY_READY: marked before in this step. STALE_STEP: already decided.
  //                        PROTOCOL_VIOLATION: the step is ahead of next_step(), or this rank has
  //                        ended or abandoned it; or ReplaceLayout is running; or, in a
  //                        replacement, ConfirmState comes first.
  //   WaitStep's error     the step is already void; the message names the rank and the cause.
  virtual absl::Status MarkReady(std::uint64_t step, std::size_t bucket) = 0;
  // The same on a GPU: "Every gradient of this bucket is written once these streams reach this
  // call." The first stream waits for the others. Each may be destroyed as soon as the call
  // returns. It can also return
  //   FAILED_PRECONDITION  PROTOCOL_VIOLATION: two steps are under way; call WaitStep of the first.
  virtual absl::Status MarkReady(std::uint64_t step, std::size_t bucket,
                                 absl::Span<const CudaStream> streams) = 0;

  // "This rank has marked every bucket ready." `used`: one flag per parameter, true if this rank
  // used it; empty: all were used. Parameters of MarkUnused count as unused in any case.
  //   INVALID_ARGUMENT     MALFORMED: `used` has another size.
  //   FAILED_PRECONDITION  PROTOCOL_VIOLATION: names the first bucket that was not marked ready.
  //   And the errors of MarkReady.
  virtual absl::Status EndStep(std::uint64_t step, const std::vector<bool>& used = {}) = 0;

  // Marks every bucket that was not marked, and ends the step, in one message. If the call fails,
  // it marks no bucket.
  //   The errors of MarkReady and EndStep that name no bucket.
  virtual absl::Status FinishStep(std::uint64_t step, const std::vector<bool>& used = {}) = 0;
  // The same on a GPU; `streams` as in MarkReady.
  virtual absl::Status FinishStep(std::uint64_t step, const std::vector<bool>& used,
                                  absl::Span<const CudaStream> streams) = 0;

  // "This rank cannot finish the step." The step is void on every rank, and the others' errors
  // contain the first 1024 bytes of `reason`. Then call WaitStep as usual. OK also if the step is
  // already void.
  //   FAILED_PRECONDITION  STALE_STEP. PROTOCOL_VIOLATION: as in MarkReady.
  virtual absl::Status AbandonStep(std::uint64_t step, std::string_view reason) = 0;

  // On a GPU: work that is enqueued on `stream` after this call runs when the bucket, or every
  // bucket, is done. In a void step that releases the stream, too. The value is provisional, as in
  // WaitBucket. Call it after MarkReady; the bucket may already be done.
  //   INVALID_ARGUMENT     UNKNOWN_BUCKET.
  //   FAILED_PRECONDITION  PROTOCOL_VIOLATION: the bucket was not marked ready, so the stream might
  //                        wait forever. STALE_STEP.
  //   WaitStep's error     the step is void.
  virtual absl::Status WaitOnStream(std::uint64_t step, std::size_t bucket, CudaStream stream) = 0;
  virtual absl::Status WaitOnStream(std::uint64_t step, CudaStream stream) = 0;
  // Device address of a float: 0 if the step is complete, 1 if it is void, as optimizers take
  // `found_inf`. Read it on a stream after WaitOnStream(step, stream), and before the first
  // MarkReady of step + 2. Null in host memory. The value never contradicts WaitStep: if any GPU
  // may have read 0, WaitStep returns OK or STEP_IN_DOUBT on every rank.
  virtual const float* device_verdict(std::uint64_t step) const = 0;

  // Waits until one bucket is reduced in this rank's memory. The value is provisional: it is good
  // for inspection or clipping, but the step can still become void. In host memory the thread
  // sleeps on a futex; on a GPU it looks every 200 us.
  //
  // With kHold the bucket is read-only until WaitStep has returned the verdict: do not clip it
  // before. If another rank is lost, its replacement gets the average from this memory. If the
  // daemon finds that the average has changed, the job ends for all with PROTOCOL_VIOLATION, which
  // names this rank. The daemon cannot detect a change of integers, minima or maxima: the
  // replacement then gets wrong values.
  //   INVALID_ARGUMENT     UNKNOWN_BUCKET.
  //   WaitStep's error     the step is void.
  //   DEADLINE_EXCEEDED    WAIT_TIMEOUT: the message names the late ranks; nothing changed.
  //   FAILED_PRECONDITION  STALE_STEP: the step was decided too long ago. The last verdict is kept,
  //                        on a GPU the last two. PROTOCOL_VIOLATION: ahead of next_step().
  virtual absl::Status WaitBucket(std::uint64_t step, std::size_t bucket,
                                  absl::Duration timeout = absl::InfiniteDuration()) = 0;

  // Waits for the step's verdict, which is the same on every rank. OK: the step is complete, and
  // every bucket holds the reduction.
  //   ABORTED              STEP_ABANDONED, STEP_VOID: the step is void; the message names the rank
  //                        that abandoned it and its reason. Zero the gradients and redo the step
  //                        from its first micro-batch under next_step().
  //   ABORTED              STEP_IN_DOUBT: this rank cannot learn the verdict. Other ranks may know
  //                        it; all of those know the same verdict. The session ends. Compare the
  //                        ranks' last steps, or go on from a checkpoint on every rank.
  //   DEADLINE_EXCEEDED    STEP_TIMEOUT: the job's step_timeout has expired and the step is void;
  //                        the message names the late ranks. WAIT_TIMEOUT: `timeout` has
  //                        expired; nothing changed.
  //   FAILED_PRECONDITION  LAYOUT_RELEASED: the step is void, because another rank has released the
  //                        layout; the message names it. STALE_STEP and PROTOCOL_VIOLATION: as in
  //                        WaitBucket.
  virtual absl::StatusOr<StepResult> WaitStep(
      std::uint64_t step, absl::Duration timeout = absl::InfiniteDuration()) = 0;

  // Says that this rank does not use the layout any more. Its name is then free for another layout,
  // and the daemon frees its memory. Does not wait for the other ranks: each calls Release()
  // itself. If another rank begins a step of the layout instead, that step is void after 5 s:
  // LAYOUT_RELEASED names this rank. So release a layout on every rank or on none. A rank that
  // stops while the others continue calls Leave().
  //
  // Later calls fail LAYOUT_RELEASED, except WaitStep of the last step. Views stay readable. The
  // destructor does the same, and abandons an open step first.
  //   FAILED_PRECONDITION  PROTOCOL_VIOLATION: a step of this rank is open, or the layout is being
  //                        replaced. LAYOUT_REPLACED, LAYOUT_RELEASED: the layout was already
  //                        replaced or released.
  virtual absl::Status Release() = 0;

 protected:
  Layout() = default;
};

// One rank's membership in a job. If a Session is destroyed without Leave() or Finish(), its rank
// is lost for the others.
class Session {
 public:
  // Connects and joins; tries until connect_timeout.
  //   INVALID_ARGUMENT     MALFORMED: names the option.
  //   UNAVAILABLE          DAEMON_LOST: no daemon at `socket`. WAIT_TIMEOUT: it does not answer.
  //                        COORDINATOR_UNREACHABLE: no daemon answers at `coordinator` in time.
  //                        CREDENTIALS: the process that connected has ended. DRAINING.
  //   PERMISSION_DENIED    CREDENTIALS: the socket does not admit this user, or the job's token is
  //                        missing. With kHold: the job that holds this rank has another token.
  //                        COORDINATOR_REFUSED, PEER_REFUSED: the daemons do not take orders from
  //                        each other.
  //   ALREADY_EXISTS       RANK_OCCUPIED: a live process has this rank, and the job is still
  //                        forming or has kHold.
  //   FAILED_PRECONDITION  JOB_MISMATCH: world size or options differ from the other ranks'. LEFT:
  //                        with kHold, this rank has left the job; another run needs another
  //                        job_id. VERSION: no protocol or shared-memory ABI in common.
  //                        NODE_MISMATCH: two daemons are configured differently.
  //   UNIMPLEMENTED        LOSS_POLICY: the daemon does not have this on_rank_loss.
  //   RESOURCE_EXHAUSTED   QUOTA. OPEN_FILES. MEMORY.
  //   ABORTED              RANK_LOST, SUPERSEDED: another rank was lost, or began a new generation
  //                        of the job, while this one joined.
  static absl::StatusOr<std::unique_ptr<Session>> Join(const SessionOptions& options);

  virtual ~Session() = default;
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  virtual std::uint32_t rank() const = 0;
  virtual std::uint32_t world_size() const = 0;
  // The job's generation, from 1. A new one begins when trainers join a job that was full or has
  // ended.
  virtual std::uint64_t generation() const = 0;
  // The daemon's number of this session. No later session of that daemon process gets it.
  virtual std::uint64_t incarnation() const = 0;
  // With kHold: this session takes the place of a lost one. It registers the layouts that the job
  // has now, and no other layout until a step is complete. A layout's next_step() is the first step
  // that the session takes part in. The trainer begins with the state that its rank had before that
  // step: see FetchState. It calls no Barrier, Broadcast or AllReduce before the EndStep of its
  // first complete step. Its first such call waits until that step is complete and the session has
  // registered every layout of the job.
  virtual bool is_replacement() const = 0;

  // Registers a layout and maps its memory. Returns when every rank has done the same. Each layout
  // has its own arena and its own steps.
  //   INVALID_ARGUMENT     MALFORMED: names what is wrong in `spec`.
  //   FAILED_PRECONDITION  LAYOUT_MISMATCH: names the first difference and both ranks.
  //                        ALREADY_REGISTERED: this rank has a layout of that name; release it.
  //                        RANKS_LEFT: some ranks wait in LeaveAndStay; or, with kHold, a rank was
  //                        lost and has not completed a step since.
  //   DEADLINE_EXCEEDED    LAYOUT_TIMEOUT: names the ranks that did not come.
  //   RESOURCE_EXHAUSTED   QUOTA. OPEN_FILES. MEMORY.
  //   Another rank's code  LAYOUT_REFUSED: that rank did not get its memory.
  // With `device`:
  //   UNIMPLEMENTED        CUDA_UNAVAILABLE: this library was built without CUDA, or the daemon has
  //                        no workers for GPUs. LOSS_POLICY: with kHold.
  //   FAILED_PRECONDITION  CUDA_NOT_BUILT: the daemon was built without CUDA.
  //                        CUDA_DRIVER_MISSING, CUDA_DRIVER_TOO_OLD, GPU_NOT_VISIBLE,
  //                        GPU_EXCLUSIVE, GPU_UNUSABLE, GPU_UNSUPPORTED, MPS_OTHER_USER. The
  //                        message says what to do.
  //   RESOURCE_EXHAUSTED   GPU_OUT_OF_MEMORY. MPS_FULL: MPS takes no more clients.
  //                        WORKERS_STARTING: too many of the user's workers are starting or
  //                        ending.
  //   UNAVAILABLE          WORKER_LOST, WORKER_RESTARTING: the GPU's worker has failed.
  virtual absl::StatusOr<std::unique_ptr<Layout>> RegisterLayout(const LayoutSpec& spec) = 0;
  // Replaces `old`, a layout of this session, by `spec`, between two of its steps. `spec` has the
  // same parameters in other buckets or in another order, as learned while training. Every rank
  // calls it, normally with the old layout's name.
  //
  // The new layout has its own memory and goes on with the old one's step numbers. Then calls of
  // `old` fail FAILED_PRECONDITION LAYOUT_REPLACED, except WaitStep of its last step. Its memory
  // stays readable. If this fails, `old` is unchanged on every rank. Exception: if the daemon does
  // not answer in time, `old` may be replaced or not, and its later calls return the same error.
  //   FAILED_PRECONDITION  PROTOCOL_VIOLATION: a step of `old` is open, or it is already being
  //                        replaced. LAYOUT_REPLACED. LAYOUT_MISMATCH: also if the ranks replace
  //                        different layouts.
  //   and the errors of RegisterLayout.
  virtual absl::StatusOr<std::unique_ptr<Layout>> ReplaceLayout(Layout& old,
                                                                const LayoutSpec& spec) = 0;

  // The state of the model, with kHold and StateSource::kSurvivor. Every rank calls ServeState
  // once. A replacement (is_replacement()) begins like this:
  //
  //   for (const CurrentLayout& current : session->CurrentLayouts()) {
  //     ... session->RegisterLayout(current.spec);
  //   }
  //   session->ServeState(source);
  //   do {
  //     const auto image = session->FetchState();
  //     // Load *image.
  //     confirmed = session->ConfirmState();
  //   } while (ErrorReason(confirmed) == reason::kStateInterrupted);
  //   // Its first step, which is (*layout)->next_step().
  //
  // Meanwhile the other ranks wait in their step. Their state must not change from their first
  // mark of a step (MarkReady, EndStep or FinishStep) until WaitStep has returned the verdict, nor
  // while Leave or Finish waits. In that time a thread of the library may read it, while this rank
  // waits or is between its EndStep and the wait. It reads the state on every rank to hash it, and
  // on one rank also to copy it. These return only when the reading has stopped, at most 100 ms
  // after their answer: WaitStep, WaitBucket, AbandonStep, ConfirmState, Broadcast, AllReduce,
  // ServeState, PauseState, Leave, Finish and the destructors. If TrainerState::Read itself is
  // running, they also wait for its return, at most 10 s.

  // Sets where this rank's state is. Null: this rank serves it no more. Returns when nothing reads
  // the previous source any more.
  //   RESOURCE_EXHAUSTED   MEMORY: no thread can be started.
  virtual absl::Status ServeState(std::shared_ptr<TrainerState> source) = 0;
  // Stops a reading of the state that runs during another thread's wait. Returns when it has
  // stopped. The reading may go on at the next wait. For a trainer that must continue before its
  // wait has returned, as Python does after Ctrl-C.
  virtual absl::Status PauseState() = 0;
  // How often PauseState was called. Never blocks.
  virtual std::uint64_t StatePauses() const = 0;
  // For a helper thread that makes calls for the trainer. `pauses`: the value of StatePauses() when
  // the trainer handed its calls to the helper. If PauseState was called after that, the library
  // does not read the state during these calls, because the trainer no longer waits for them.
  virtual void CallBegan(std::uint64_t pauses) = 0;
  // In a replacement: the layouts that the job has now, which this rank has to register. Otherwise:
  // none.
  virtual std::vector<CurrentLayout> CurrentLayouts() const = 0;
  // In a replacement: gets the state of the model from a survivor. `timeout` covers everything
  // until ConfirmState returns. It may be infinite: if other ranks wait for this one for longer
  // than hold_timeout, the job ends anyway.
  //   UNAVAILABLE          STATE_UNAVAILABLE: each rank that has the state either refused or did
  //                        not answer; the message says why.
  //   DEADLINE_EXCEEDED    STATE_UNAVAILABLE: not in time. Call it again.
  //   FAILED_PRECONDITION  PROTOCOL_VIOLATION: this session is no replacement, or has confirmed the
  //                        state. STATE_REFUSED: what arrived is malformed; the session ends.
  //   RESOURCE_EXHAUSTED   MEMORY. If it is too little for the state, the session ends.
  virtual absl::StatusOr<StateImage> FetchState(
      absl::Duration timeout = absl::InfiniteDuration()) = 0;
  // In a replacement that has loaded the state: reads it through the TrainerState, sends its
  // digests, and waits until they are compared with the survivors'. OK: its steps may begin.
  //   ABORTED              STATE_INTERRUPTED: the step became void, or a rank that took part in the
  //                        transfer was lost or refused. Call FetchState again.
  //   FAILED_PRECONDITION  RANKS_DIVERGED: this rank's state is different; names the first item
  //                        that differs. STATE_REFUSED: the TrainerState failed. Both end the
  //                        session, and the others wait for another replacement.
  //                        PROTOCOL_VIOLATION: ServeState and FetchState come first.
  //   DEADLINE_EXCEEDED    WAIT_TIMEOUT: call it again. STATE_UNAVAILABLE: FetchState's timeout has
  //                        expired, or this call came more than 2 min, plus 1 s per 100 MB, after
  //                        FetchState had returned. Call FetchState again.
  virtual absl::Status ConfirmState(absl::Duration timeout = absl::InfiniteDuration()) = 0;
  // Checks that every rank has the same items. This is an operation of the job, see below. Call it
  // between two steps, with any LossPolicy. With kHold a rank that is lost meanwhile ends the job.
  // The items' memory must not change until it returns.
  //   FAILED_PRECONDITION  RANKS_DIVERGED: on every rank; names the ranks and the first item that
  //                        differs.
  //   INVALID_ARGUMENT     MALFORMED: names the item.
  //   CANCELLED            PauseState was called.
  virtual absl::Status CheckInSync(absl::Span<const StateItem> items,
                                   absl::Duration timeout = absl::Minutes(30)) = 0;

  // Operations of the job: every rank calls the same ones in the same order. They block until done.
  // Calls from several threads of one rank run one after the other.
  //   FAILED_PRECONDITION  OPERATION_MISMATCH: names two ranks and their different operations.
  //                        PROTOCOL_VIOLATION: this session replaces a lost one, and has ended
  //                        no step, or only void ones. It skips the operation: the others have
  //                        called it without this rank.
  //   DEADLINE_EXCEEDED    OPERATION_TIMEOUT: names the ranks that did not come. The operation
  //                        failed on every rank. WAIT_TIMEOUT: the daemon does not answer; or an
  //                        operation of another thread still runs; or with kHold a step must be
  //                        complete first. The message says which. Except in the first case the
  //                        operation has not begun: call it again.
  //   RESOURCE_EXHAUSTED   MEMORY: for the staging memory of Broadcast and AllReduce.

  // Returns when every rank has called it.
  virtual absl::Status Barrier(absl::Duration timeout = absl::Minutes(30)) = 0;
  // Copies `bytes` bytes from `data` of rank `root` into `data` of every other rank. `root` is the
  // same on every rank; kLowestLiveRank means the lowest rank that has not left.
  //   FAILED_PRECONDITION  PROTOCOL_VIOLATION: the root has left; or this session replaces a lost
  //                        one, and the others had completed the broadcast before it was live.
  //   INVALID_ARGUMENT     MALFORMED: `root` is not below the world size.
  virtual absl::Status Broadcast(void* data, std::size_t bytes, std::uint32_t root,
                                 absl::Duration timeout = absl::Minutes(30)) = 0;
  // Reduces `count` elements of `data` in place: each node's ranks in order, then the nodes. They
  // must fit into the staging memory, 32 MiB by default.
  //   INVALID_ARGUMENT     MALFORMED: they do not fit, or `dtype` does not have this `op`.
  virtual absl::Status AllReduce(void* data, std::size_t count, DataType dtype, ReduceOp op,
                                 absl::Duration timeout = absl::Minutes(30)) = 0;

  // Says that this rank begins its next collective, in whatever way the ranks carry it out. Never
  // blocks. If ranks give different descriptions for the same place in the order, the job ends for
  // all with FAILED_PRECONDITION OPERATION_MISMATCH, which names two ranks and their descriptions.
  // With kHold every call ends the job for all: UNIMPLEMENTED LOSS_POLICY.
  //   INVALID_ARGUMENT     MALFORMED: `description` has no or more than 256 bytes.
  //   FAILED_PRECONDITION  LEFT: LeaveAndStay has not returned.
  virtual absl::Status BeginCollective(absl::string_view description) = 0;
  // Asks which ranks have begun fewer collectives than this one. It is for a rank that has waited
  // for `waited` in a collective that does not go through the daemon. Never blocks: if some rank is
  // late, TakeNotice() soon says so.
  virtual absl::Status QueryCollectives(absl::Duration waited) = 0;

  // Why a call of this session or of its layouts still waits, for people: "layout 'model' after 5s:
  // rank 1 has not joined the job". While a rank waits for others, the daemon says so after 5 s and
  // then every 30 s. Returns the newest notice once, at most 2047 bytes; "" if there is none or the
  // daemon has answered something since. Never blocks. Call it from another thread than the one
  // that waits, or between waits with a short timeout.
  virtual std::string TakeNotice() = 0;

  // Whether the session has ended, because of an error that a call has returned or another event.
  // True: every later call fails, so join again. False: the session goes on, as after
  // STEP_ABANDONED or DAEMON_SILENT, which have the same codes as RANK_LOST and DAEMON_LOST. Never
  // blocks.
  virtual bool HasEnded() const = 0;

  // Waits for the session's end and returns why it ended. OK: it has not ended within `timeout`.
  virtual absl::Status AwaitEnd(absl::Duration timeout) const = 0;

  // Ends the session: the other ranks go on without this one. Waits for an operation that another
  // thread of this rank has called.
  //
  // With kHold also waits until every rank has left or finished, or the job has ended. Reason: a
  // rank may be lost before it has saved its work, and its replacement needs the others. Leave
  // returns at once if a lost rank could not be replaced: some rank has never joined, the job has
  // no layout now, or one of its layouts has had no complete step. A layout that replaced another
  // counts as new. The daemon checks this whenever a rank leaves, stays or finishes. If it finds
  // such a reason then, it also ends the waits of the ranks that left before.
  //
  // With kHold every step has every rank in it. So every rank has to leave after the same step. Do
  // not call Leave because of an error: a process that ends without Leave is replaced.
  //   FAILED_PRECONDITION  PROTOCOL_VIOLATION: a step of this rank is open.
  //   ABORTED              RANK_FINISHED: with kHold, another rank has begun a step or a layout.
  virtual absl::Status Leave() = 0;
  // Ends the session because this process ends without an error. Unlike after Leave, the other
  // ranks cannot go on without this one: they may only finish or leave. If one of them begins a
  // step, an operation, a layout, or a collective that this rank has not begun, the job ends for
  // all with ABORTED RANK_FINISHED.
  //   FAILED_PRECONDITION  PROTOCOL_VIOLATION: a step of this rank is open. LEFT: LeaveAndStay has
  //                        not returned.
  virtual absl::Status Finish() = 0;
  // "This rank has no more data in this epoch." The other ranks' steps and operations go on without
  // it, and its other calls fail LEFT. Blocks until every rank has left. Then all ranks that stayed
  // take part again, and layouts go on at next_step(). Returns which of them left last. That rank
  // did the most steps, so broadcast its state. Until every rank has left, no rank can register or
  // replace a layout (RANKS_LEFT).
  //   DEADLINE_EXCEEDED    WAIT_TIMEOUT: not every rank has left, or an operation of another thread
  //                        of this rank still runs; call it again.
  //   FAILED_PRECONDITION  PROTOCOL_VIOLATION: a step of this rank is open.
  virtual absl::StatusOr<std::uint32_t> LeaveAndStay(
      absl::Duration timeout = absl::Minutes(30)) = 0;

  virtual SessionStatistics Statistics() const = 0;

 protected:
  Session() = default;
};

// NOLINTEND(google-default-arguments)

// UUID of the GPU that CUDA calls `ordinal` in this process, as in torch.device("cuda", ordinal),
// for LayoutSpec::device. Loads the driver from libcuda.so.1, or from the file that the environment
// variable GRADSYNC_CUDA_LIBRARY names.
//   UNIMPLEMENTED        CUDA_UNAVAILABLE: this library was built without CUDA.
//   FAILED_PRECONDITION  CUDA_DRIVER_MISSING, CUDA_DRIVER_TOO_OLD. GPU_UNUSABLE: there is no such
//                        device, or it cannot be opened; the message says what to check.
//   RESOURCE_EXHAUSTED   MPS_FULL: MPS takes no more clients.
absl::StatusOr<std::string> CudaDeviceUuid(int ordinal);

// Why a call failed: the text of one of the reasons in error_reason.h ("RANK_LOST"), or "" for a
// status that is not gradsync's. Compare it with the constant: ErrorReason(s) == reason::kRankLost.
std::string ErrorReason(const absl::Status& status);
// What the error is about: the value of a field of error_reason.h (field::kRank), or "" if the
// error has no such field.
std::string ErrorField(const absl::Status& status, FieldName field);

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_H_
