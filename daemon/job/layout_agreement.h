// The agreement of a job's ranks on one layout, and the memory that each of them has for it.

#ifndef DAEMON_JOB_LAYOUT_AGREEMENT_H_
#define DAEMON_JOB_LAYOUT_AGREEMENT_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/arena/arena_quota.h"
#include "daemon/arena/device_arena.h"
#include "daemon/arena/semaphore_page.h"
#include "daemon/job/job_terms.h"
#include "daemon/job/late_ranks.h"
#include "daemon/job/layout_plan.h"
#include "daemon/job/membership.h"
#include "daemon/job/rank_search.h"

namespace gradsync::v1 {
class SessionRequest;
}

namespace gradsync::daemon {

// One rank's memory of a layout, mapped. For a rank on another node, every field except `gpu` is
// null.
struct RankMemory {
  std::shared_ptr<void> arena;  // keeps `data` mapped
  std::byte* data = nullptr;
  std::shared_ptr<SemaphorePage> semaphores;
  std::shared_ptr<DeviceArena> gpu;  // instead of `data`
  std::uint64_t bytes = 0;           // at `data`
};

struct LayoutRequest {
  // For a job that another node coordinates: the client's messages, the last of them
  // RegisterLayout. Otherwise empty.
  std::vector<std::shared_ptr<const v1::SessionRequest>> messages;
  // The charge for `spec` and `messages` until the job has taken them; may be null.
  std::shared_ptr<ArenaQuota::Reservation> charge;
  std::uint64_t request_id = 0;
  LayoutSpec spec;
  // The plan of `spec`, if LayoutSet::NeedsPlan().
  std::optional<absl::StatusOr<LayoutPlan>> plan;
  std::uint32_t replaces = 0;         // channel of the layout that this one replaces; 0: none
  std::uint64_t deadline_ns = 0;      // by which the other ranks must have registered and mapped
  std::string device;                 // UUID of the GPU for this rank's arena; empty: host memory
  bool mps = false;                   // the rank's process shares that GPU through MPS
  bool bucket_done_messages = false;  // the rank wants a message for each bucket that is done
};

// Every rank registers the same spec and then maps its memory. The agreement is reached when all
// ranks that take part have done both. It fails for all of them if one registers a different spec,
// is refused, is late, or calls LeaveAndStay.
//
//   open --Reach--> reached
//   open --Fail---> failed
//
// Externally synchronized: guarded by the job's lock. Holds references to the ranks' memory, which
// keep it mapped, until ReleaseMemory or ReleaseLostMemory.
class LayoutAgreement {
 public:
  // `first_rank` registered `spec` first. `terms` and `members` outlive this object.
  LayoutAgreement(std::uint32_t channel, LayoutSpec spec, std::uint32_t replaces,
                  std::uint32_t first_rank, const JobTerms& terms, Membership* members);

  std::uint32_t channel() const { return channel_; }
  const LayoutSpec& spec() const { return *spec_; }
  // The same, for use without the job's lock.
  const std::shared_ptr<const LayoutSpec>& shared_spec() const { return spec_; }
  const std::string& name() const { return spec_->name; }
  // Channel of the layout that this one replaces once the agreement is reached; 0: none.
  std::uint32_t replaces() const { return replaces_; }
  // Makes this layout replace the layout of `channel`. Requires that every rank that has registered
  // so far has released that layout.
  void Replace(std::uint32_t channel) { replaces_ = channel; }

  bool open() const { return state_ == State::kOpen; }
  bool reached() const { return state_ == State::kReached; }
  bool failed() const { return state_ == State::kFailed; }
  // Why it has failed; OK if it has not.
  const absl::Status& failure() const { return failure_; }

  // FAILED_PRECONDITION if this rank has registered before, or if its spec differs. A different
  // spec makes the agreement fail.
  absl::Status Register(std::uint32_t rank, LayoutRequest request, DeferredActions* actions);
  bool Registered(std::uint32_t rank) const { return ranks_[rank].registered; }
  // The rank gets no memory, or has another layout of this name: the agreement fails. If it is
  // reached, the rank came back after a loss: only its own registration fails, and the rank may
  // register again. Then does nothing if the rank has mapped its memory.
  void Refuse(std::uint32_t rank, const absl::Status& why, DeferredActions* actions);
  // Keeps `memory`, which a registered rank has, until ReleaseMemory.
  void KeepMemory(std::uint32_t rank, std::shared_ptr<void> memory, DeferredActions* actions);
  // After a loss: the rank's next session registers the layout again. Requires that the agreement
  // is reached. LAYOUT_MISMATCH if the request's layout differs. The agreement does not change.
  absl::Status Rejoin(std::uint32_t rank, LayoutRequest request);
  // FAILED_PRECONDITION: a breach of the protocol by this rank.
  absl::Status Mapped(std::uint32_t rank, RankMemory memory);
  // Every rank that takes part has registered and mapped.
  bool Complete() const;
  // Tells every rank that has registered that the layout is ready from step `first_step` on.
  void Reach(std::uint64_t fingerprint, std::uint64_t first_step, DeferredActions* actions);
  // The agreement fails. Tells every rank that has registered, and releases all memory.
  void Fail(const absl::Status& why, DeferredActions* actions);
  // Fails the agreement if the deadline of some rank has passed. Tells the ranks that wait which
  // ranks are late.
  void Tick(std::uint64_t now_ns, DeferredActions* actions);
  // True if this rank knows that the agreement has failed: by a message, or by the answer to its
  // own request.
  bool KnowsFailure(std::uint32_t rank) const {
    return ranks_[rank].registered || ranks_[rank].refused;
  }

  bool bucket_done_messages(std::uint32_t rank) const {
    return ranks_[rank].request.bucket_done_messages;
  }
  // Null until the rank has mapped its memory, and after ReleaseMemory and Lose.
  const RankMemory* memory(std::uint32_t rank) const {
    return ranks_[rank].memory.has_value() ? &*ranks_[rank].memory : nullptr;
  }
  // The memory of any session of a rank. That of a lost session is there until ReleaseLostMemory.
  const RankMemory* memory(RankSession session) const;
  // Null if the rank has mapped no memory, or is on another node.
  SemaphorePage* semaphores(std::uint32_t rank) const {
    return ranks_[rank].memory.has_value() ? ranks_[rank].memory->semaphores.get() : nullptr;
  }
  // Gives up this rank's memory. Requires that no reduction touches it.
  void ReleaseMemory(std::uint32_t rank, DeferredActions* actions);
  // The rank's session is lost, and its next session may map other memory. The lost memory stays
  // mapped until ReleaseLostMemory, because reductions may read it, but its semaphores are closed.
  void Lose(std::uint32_t rank, DeferredActions* actions);
  bool HasLost() const { return !lost_.empty(); }
  // Gives up the memory of the lost sessions for which `keep` returns false. Requires that no
  // reduction touches that memory.
  void ReleaseLostMemory(absl::FunctionRef<bool(RankSession)> keep, DeferredActions* actions);

 private:
  enum class State : std::uint8_t { kOpen, kReached, kFailed };
  struct RankState {
    bool registered = false;
    bool refused = false;           // its own request has made the agreement fail
    LayoutRequest request;          // without its spec, plan and messages
    std::uint64_t incarnation = 0;  // of the session that has the memory
    std::shared_ptr<void> kept;
    std::optional<RankMemory> memory;
  };
  struct LostMemory {
    RankSession session;
    std::shared_ptr<void> kept;
    RankMemory memory;
  };

  // The rank has registered.
  void Keep(std::uint32_t rank, LayoutRequest request);
  void TellLate(std::uint64_t now_ns, DeferredActions* actions);
  absl::Status Breach(std::uint32_t rank, absl::string_view what) const;

  // Constant after construction.
  const std::uint32_t channel_;
  const std::shared_ptr<const LayoutSpec> spec_;  // never null
  const std::uint32_t first_rank_;
  const JobTerms& terms_;
  Membership* const members_;

  std::uint32_t replaces_;
  State state_ = State::kOpen;
  absl::Status failure_;
  std::vector<RankState> ranks_;
  // No deadline of a rank is earlier. Otherwise each tick would look at all ranks.
  std::uint64_t next_deadline_ns_ = std::numeric_limits<std::uint64_t>::max();
  std::vector<LostMemory> lost_;
  LateNotice late_notice_;
  mutable RankSearch lacks_memory_;  // for a rank that has mapped no memory
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_LAYOUT_AGREEMENT_H_
