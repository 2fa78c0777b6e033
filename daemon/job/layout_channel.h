// One layout of a job: the agreement of its ranks, then its steps, one after the other. This is
// where a bucket's life is decided: ready on every rank -> reduction -> done -> committed with its
// step, or void.
//
//   (Register Mapped)^ranks  ready  ( (MarkReady* (EndStep | FinishStep))^ranks commit | MarkReady*
//   Abandon/deadline void )*
//
// Externally synchronized: guarded by the job's lock. Never blocks, calls nobody: what follows from
// a change is put into Effects. Does not own arenas; RankMemory keeps them mapped.

#ifndef DAEMON_JOB_LAYOUT_CHANNEL_H_
#define DAEMON_JOB_LAYOUT_CHANNEL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "daemon/arena/semaphore_page.h"
#include "daemon/job/layout_plan.h"
#include "daemon/job/membership.h"
#include "daemon/reduce/reducer.h"
#include "daemon/telemetry/layout_stats.h"
#include "daemon/telemetry/step_timeline.h"
#include "daemon/worker/gpu_arena.h"
#include "proto/gradsync/nccl_settings.h"

namespace gradsync {

// One rank's memory of a layout, mapped. It lies on another node without semaphores: then all is
// null but `gpu`.
struct RankMemory {
  std::shared_ptr<void> arena;  // keeps `data` mapped
  std::byte* data = nullptr;
  std::shared_ptr<SemaphorePage> semaphores;
  std::shared_ptr<GpuArena> gpu;  // instead of `data`
};

struct LayoutRequest {
  std::uint64_t request_id = 0;
  LayoutSpec spec;
  std::uint32_t replaces = 0;     // channel of the layout that this one replaces; 0: none
  std::uint64_t deadline_ns = 0;  // for the other ranks to come
  std::string device;             // UUID of the GPU for this rank's arena; empty: host memory
  bool mps = false;               // its process shares that GPU through MPS
  bool bucket_done_messages = false;
};

// What a layout needs to know of its job. Constant.
struct JobTerms {
  std::string job_id;
  std::uint64_t flow = 0;  // the job's share of the reduce threads
  bool divide_by_world = false;
  std::uint64_t step_timeout_ns = 0;
  NcclSettings nccl;
};

class LayoutChannel {
 public:
  // Called by the reducer, on its thread, without the job's lock: the job takes it, stops if the
  // reduction has failed, and calls Reduced().
  using OnReduced = std::function<void(LayoutChannel*, std::size_t bucket, const ReduceTimes&,
                                       const absl::Status& failure)>;
  LayoutChannel(std::uint32_t channel, LayoutSpec spec, std::uint32_t replaces,
                std::uint32_t first_rank, LayoutPlan plan, const JobTerms& terms,
                Membership* members, OnReduced reduced);

  std::uint32_t channel() const { return channel_; }
  const std::string& name() const { return spec_.name; }
  const LayoutPlan& plan() const { return plan_; }
  // Of the layout that this one takes the place of once it is ready; 0: none.
  std::uint32_t replaces() const { return replaces_; }
  bool ready() const { return ready_; }
  // The ranks did not agree: it will never be ready.
  bool dead() const { return !agreement_.ok(); }
  const absl::Status& agreement() const { return agreement_; }
  std::uint64_t step() const { return step_; }
  const LayoutSpec& spec() const { return spec_; }

  // ---- Agreement
  // FAILED_PRECONDITION if this rank's spec differs (every rank that has registered is told, and
  // the layout is dead), or has registered before.
  absl::Status Register(std::uint32_t rank, LayoutRequest request, Effects* effects);
  bool Registered(std::uint32_t rank) const { return ranks_[rank].registered; }
  // Dead: the rank has been told so, by a message or by the answer to its own request.
  bool Told(std::uint32_t rank) const { return ranks_[rank].registered || ranks_[rank].refused; }
  // The rank has registered but gets no memory: the agreement fails on every rank.
  void Refuse(std::uint32_t rank, const absl::Status& why, Effects* effects);
  // Keeps what a registered rank was given until the layout lets go of it.
  void Hold(std::uint32_t rank, std::shared_ptr<void> memory, Effects* effects);
  absl::Status Mapped(std::uint32_t rank, RankMemory memory);
  // Every rank that takes part has registered and mapped.
  bool Complete() const;
  // Complete: steps begin, where those of `replaced` (or null) end, whose statistics go on here.
  // Nobody uses `replaced` any more.
  void Begin(LayoutChannel* replaced, Effects* effects);
  // Tells every rank that has registered; the layout is dead.
  void FailAgreement(const absl::Status& status, Effects* effects);

  // ---- Steps. A Status that is not OK is a breach of the protocol by this rank and ends its
  // session.
  absl::Status MarkReady(std::uint32_t rank, std::uint64_t step,
                         absl::Span<const std::uint32_t> buckets, std::uint64_t now_ns,
                         Effects* effects);
  absl::Status EndStep(std::uint32_t rank, std::uint64_t step, absl::string_view used_map,
                       std::uint64_t now_ns, Effects* effects);
  // MarkReady of what the rank has not marked, in the order of the buckets, then EndStep.
  absl::Status FinishStep(std::uint32_t rank, std::uint64_t step, absl::string_view used_map,
                          std::uint64_t now_ns, Effects* effects);
  absl::Status Abandon(std::uint32_t rank, std::uint64_t step, absl::string_view reason,
                       std::uint64_t now_ns, Effects* effects);
  // The reducer has finished a bucket. Its done words have been written already; not if it failed.
  void Reduced(std::size_t index, const ReduceTimes& times, std::uint64_t now_ns, Effects* effects);

  // ---- Membership
  // True if the rank has begun the running step.
  bool InStep(std::uint32_t rank) const { return ranks_[rank].marks > 0 || ranks_[rank].ended; }
  // The rank contributes nothing from now on; not called while the rank is in a step. `exited`: its
  // memory is let go.
  void RankLeft(std::uint32_t rank, bool exited, std::uint64_t now_ns, Effects* effects);
  // The rank had left and takes part again, from the next step on; no step is running.
  void RankResumed(std::uint32_t rank);
  // The job is over: no reduction is begun any more.
  void Stop(const absl::Status& why);
  // The running step is void: reductions in flight wait for no rank. Once for each step.
  void GiveUp(Effects* effects);
  // The job is over and nothing is in flight: a running step that the trainers' streams have seen
  // complete is complete, and one that they may have seen so is in doubt.
  void FinishSeen(std::uint64_t now_ns, Effects* effects);
  // Releases the arenas. Only when nothing is in flight.
  void ReleaseMemory(Effects* effects);

  void Tick(std::uint64_t now_ns, Effects* effects);

  std::size_t in_flight() const { return in_flight_; }

  // ---- For people
  // "rank 1 has not marked bucket 3-7 ready" of the running step; empty if no step is running.
  std::string Missing() const;
  // The ranks that the running step waits for.
  std::vector<std::uint32_t> MissingRanks() const;
  // The first bucket of the running step that this rank has not marked ready; nullopt if it has
  // marked all.
  std::optional<std::size_t> FirstUnmarked(std::uint32_t rank) const;
  bool running() const { return started_; }
  const LayoutStats& stats() const { return stats_; }
  const StepTimeline& timeline() const { return *timeline_; }

 private:
  struct RankLayout {
    bool registered = false;
    bool refused = false;   // its own request made the agreement fail
    LayoutRequest request;  // spec moved out
    std::shared_ptr<void> held;
    std::optional<RankMemory> memory;
    // Of the running step:
    std::vector<bool> marked;
    std::size_t marks = 0;
    bool ended = false;
    // Last step that this rank has ended; those between it and step_ were void.
    std::uint64_t last_ended = 0;
    // On a GPU: its messages about the next step, which it may begin once it has ended this one.
    using Early = std::function<absl::Status(std::uint64_t now_ns, Effects*)>;
    std::vector<Early> early;
    std::size_t early_marks = 0;  // buckets that they mark
  };
  enum class BucketState : std::uint8_t { kWaiting, kReducing, kDone };
  struct Bucket {
    BucketState state = BucketState::kWaiting;
    std::uint32_t ready_ranks = 0;
    BucketTimes times;
    ReduceOperation operation;
    // Parallel to operation.buffers.
    std::vector<SemaphorePage*> semaphores;
    std::uint64_t step = 0;  // of the operation in flight
  };

  // OK to go on; kIgnore for a message of a step that was void before the rank could know; kEarly
  // for one of the next step, which waits for it.
  enum class Admission : std::uint8_t { kAdmit, kIgnore, kEarly };
  absl::StatusOr<Admission> Admit(std::uint32_t rank, std::uint64_t step,
                                  absl::string_view what) const;
  absl::Status Postpone(std::uint32_t rank, std::uint64_t step, RankLayout::Early message);
  void TakeEarly(std::uint64_t now_ns, Effects* effects);
  void Start(std::uint64_t now_ns);
  void Mark(std::uint32_t rank, std::size_t index, std::uint64_t now_ns, Effects* effects);
  void BindMemory();
  void ReleaseMemoryOf(std::uint32_t rank, Effects* effects);
  void Launch(std::size_t index, Effects* effects);
  void Void(absl::Status why, std::uint64_t now_ns, Effects* effects);
  // The trainers' streams have seen that the running step is complete, and may act on it; or they
  // may have seen it.
  bool SeenComplete() const { return MaybeSeenComplete() && gpu_doubt_.ok(); }
  bool MaybeSeenComplete() const;
  absl::Status InDoubt() const;
  // Whose gradients are in the running step.
  std::uint32_t RanksOfStep() const;
  void MaybeFinish(std::uint64_t now_ns, Effects* effects);
  void Finish(std::uint64_t now_ns, Effects* effects);
  absl::Status Breach(absl::StatusCode code, absl::string_view reason, std::uint32_t rank,
                      std::uint64_t step, std::optional<std::size_t> bucket,
                      absl::string_view what) const;
  absl::Status MalformedMap(std::uint32_t rank, std::uint64_t step,
                            absl::string_view used_map) const;
  std::uint32_t Divisor() const;
  // By bucket: marked ready, but the rank's GPU is not through with its gradients. For people
  // alone.
  std::vector<bool> NotWritten(std::uint32_t rank) const;

  // Constant after construction.
  const std::uint32_t channel_;
  const LayoutSpec spec_;
  const std::uint32_t replaces_;
  const std::uint32_t first_rank_;
  const LayoutPlan plan_;
  const JobTerms& terms_;
  Membership* const members_;
  const OnReduced reduced_;

  std::vector<RankLayout> ranks_;
  std::vector<std::unique_ptr<Bucket>> buckets_;
  bool ready_ = false;
  bool stopped_ = false;
  bool rebind_ = true;  // ranks have come or gone since the operations' buffers were set
  absl::Status agreement_;

  // The running step, or the next one if !started_.
  std::uint64_t step_ = 1;
  bool started_ = false;
  std::uint64_t deadline_ns_ = 0;
  absl::Status void_;  // not OK: void, waiting for in_flight_ to reach 0
  bool given_up_ = false;
  bool gpu_void_ = false;   // some bucket of the running step is void on every GPU
  absl::Status gpu_doubt_;  // not OK: why it is not known what some bucket is on its GPUs
  std::size_t in_flight_ = 0;
  std::size_t done_buckets_ = 0;
  std::uint64_t last_ready_ns_ = 0;
  std::string used_map_;
  bool all_used_ = true;         // every EndStep so far had an empty used_map
  std::uint32_t used_maps_ = 0;  // ranks that have said EndStep

  LayoutStats stats_;
  std::unique_ptr<StepTimeline> timeline_;  // never null
};

}  // namespace gradsync

#endif  // DAEMON_JOB_LAYOUT_CHANNEL_H_
