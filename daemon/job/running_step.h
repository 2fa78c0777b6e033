// One step of a layout: whose gradients each bucket has, what is reduced, and the step's state.

#ifndef DAEMON_JOB_RUNNING_STEP_H_
#define DAEMON_JOB_RUNNING_STEP_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "daemon/job/position.h"
#include "daemon/job/rank_session.h"
#include "daemon/reduce/reducer.h"
#include "daemon/telemetry/step_timeline.h"

namespace gradsync::daemon {

// The union of the parameters that the ranks have used in a step, one bit each.
class UsedMap {
 public:
  explicit UsedMap(std::size_t parameters) : parameters_(parameters) {}
  std::size_t bytes() const { return (parameters_ + 7) / 8; }
  // One rank's map, of bytes() bytes. Empty: the rank has used every parameter.
  void Add(absl::string_view used_map);
  // Empty if every parameter may have been used: every map was empty, or some of the `ranks` ranks
  // have not sent their map.
  std::string Union(std::uint32_t ranks) const;

 private:
  std::size_t parameters_;
  std::string bits_;
  bool all_empty_ = true;
  std::uint32_t maps_ = 0;
};

// A value: LayoutChannel replaces it by the next step when this one has its verdict.
//
//   kIdle --Begin--> kRunning --Void--> kVoid --Confirm--> kRunning
//   kRunning or kVoid --Cut--> kCut
//
// Externally synchronized: guarded by the job's lock.
class RunningStep {
 public:
  enum class Phase : std::uint8_t {
    kIdle,     // no rank has begun the step
    kRunning,  // some rank has; the step may still become complete
    kVoid,     // the step is void, but reductions in flight still touch its memory
    kCut,      // the job has ended; the step has no verdict unless GPUs have decided it
  };

  RunningStep(std::uint64_t number, std::size_t buckets, std::size_t ranks, std::size_t parameters);

  std::uint64_t number() const { return number_; }
  Phase phase() const { return phase_; }
  bool begun() const { return phase_ != Phase::kIdle; }
  // Why the step is void; OK unless the phase is kVoid.
  const absl::Status& why_void() const { return why_void_; }
  // The deadline given to Begin(), plus the time for which the step was suspended.
  std::uint64_t deadline_ns() const { return deadline_ns_; }

  // ---- Transitions
  // kIdle -> kRunning. Does nothing in other phases: the step has begun already.
  void Begin(std::uint64_t deadline_ns);
  // kRunning -> kVoid. Does nothing in other phases: the first reason counts.
  void Void(absl::Status why);
  // kVoid -> kRunning: the GPUs had completed the step before it was declared void.
  void Confirm();
  // kRunning or kVoid -> kCut. Does nothing in other phases.
  void Cut();

  // ---- Waiting for a lost rank. The deadline does not pass until Resume().
  // Does nothing if the step has not begun or is suspended.
  void Suspend(std::uint64_t now_ns);
  // Does nothing if the step is not suspended.
  void Resume(std::uint64_t now_ns);
  bool suspended() const { return suspended_ns_.has_value(); }

  // ---- Ranks. A rank's marks come from one session: the present one, or a lost one that had ended
  // the step.
  // Requires that the step has begun, and that this session has not marked the bucket yet. The rank
  // becomes ready in the bucket, unless it is ready there because of an earlier session.
  void Mark(RankSession session, std::size_t bucket, std::uint64_t now_ns);
  // The rank sends nothing more about this step.
  void End(std::uint32_t rank) { ranks_[rank].ended = true; }
  bool Ended(std::uint32_t rank) const { return ranks_[rank].ended; }
  // The rank says that it is at this position. Returns a rank that has given another position,
  // perhaps this rank itself; nullopt if there is none.
  std::optional<std::uint32_t> GivePosition(std::uint32_t rank, Position position);
  std::optional<Position> PositionOf(std::uint32_t rank) const { return ranks_[rank].position; }
  // The rank's session is lost. If it has ended the step, its gradients stay in every bucket.
  // Otherwise they stay only in the buckets that were submitted, and the rank is no longer ready in
  // the others. The rank's next session marks all buckets. The lost session needs no average.
  void Lose(std::uint32_t rank);
  // True if the rank has begun the step.
  bool Has(std::uint32_t rank) const { return ranks_[rank].marks > 0 || ranks_[rank].ended; }
  bool Marked(std::uint32_t rank, std::size_t bucket) const { return ranks_[rank].marked[bucket]; }
  // By bucket.
  const std::vector<bool>& Marks(std::uint32_t rank) const { return ranks_[rank].marked; }
  // Nullopt if the rank has marked every bucket.
  std::optional<std::size_t> FirstUnmarked(std::uint32_t rank) const;
  UsedMap& used_map() { return used_map_; }
  // The last mark of any rank; 0: there was none.
  std::uint64_t last_ready_ns() const { return last_ready_ns_; }

  // ---- Buckets
  // True if some bucket that is not reduced yet has gradients of this session.
  bool HasGradientsOf(RankSession session) const;
  // True if some bucket has gradients of an earlier session of this rank.
  bool HasGradientsOfEarlier(RankSession session) const;
  std::size_t buckets() const { return buckets_.size(); }
  std::uint32_t ReadyRanks(std::size_t bucket) const { return buckets_[bucket].ready_ranks; }
  // The incarnation of the rank's session whose gradients the bucket has; 0: the rank is not ready.
  std::uint64_t ReadySession(std::size_t bucket, std::uint32_t rank) const {
    return ready_[bucket * ranks_.size() + rank];
  }
  // The bucket's reduction has not been submitted.
  bool Waiting(std::size_t bucket) const { return buckets_[bucket].state == State::kWaiting; }
  bool Reduced(std::size_t bucket) const { return buckets_[bucket].state == State::kReduced; }
  bool AllReduced() const { return reduced_ == buckets_.size(); }
  // Reductions and copies that were submitted and are not done.
  std::size_t in_flight() const { return in_flight_; }
  void Submitted(std::size_t bucket);
  void Done(std::size_t bucket, const ReduceTimes& times);
  // True if this session has marked the bucket, but the bucket has the gradients of an earlier
  // session. Then this session needs the bucket's average, and its own gradients are dropped.
  bool NeedsAverage(RankSession session, std::size_t bucket) const;
  // An average is being copied to a session.
  void CopyBegun() { ++in_flight_; }
  void CopyDone() { --in_flight_; }
  const BucketTimes& Times(std::size_t bucket) const { return times_[bucket]; }
  // By bucket. Call it last, when the step is about to be replaced.
  std::vector<BucketTimes> TakeTimes() { return std::move(times_); }

 private:
  enum class State : std::uint8_t { kWaiting, kReducing, kReduced };
  struct Bucket {
    State state = State::kWaiting;
    std::uint32_t ready_ranks = 0;  // those with an incarnation in ready_
  };
  struct Rank {
    std::uint64_t incarnation = 0;  // of the session that has marked; 0: none, or it is lost
    std::vector<bool> marked;       // by bucket
    std::size_t marks = 0;
    bool ended = false;
    std::optional<Position> position;
  };

  std::uint64_t& Ready(std::size_t bucket, std::uint32_t rank) {
    return ready_[bucket * ranks_.size() + rank];
  }

  std::uint64_t number_;
  Phase phase_ = Phase::kIdle;
  absl::Status why_void_;
  std::uint64_t deadline_ns_ = 0;
  std::optional<std::uint64_t> suspended_ns_;  // since when
  std::uint64_t last_ready_ns_ = 0;
  std::size_t in_flight_ = 0;
  std::size_t reduced_ = 0;
  std::vector<Bucket> buckets_;
  std::vector<std::uint64_t> ready_;  // incarnations, by bucket and rank; 0: not ready
  std::vector<BucketTimes> times_;
  std::vector<Rank> ranks_;
  std::optional<std::uint32_t> position_rank_;  // a rank that has given its position
  UsedMap used_map_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_RUNNING_STEP_H_
