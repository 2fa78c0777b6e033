// Brings the state of the model from a survivor to a replacement (policy `hold`, state_source
// `survivor`). gradsync.proto, "The state of the model", describes the messages.

#ifndef DAEMON_JOB_STATE_HEALING_H_
#define DAEMON_JOB_STATE_HEALING_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "daemon/arena/arena_quota.h"
#include "daemon/job/deferred_actions.h"
#include "daemon/job/job_status.h"
#include "daemon/job/job_terms.h"
#include "daemon/job/membership.h"
#include "daemon/job/rank_session.h"
#include "daemon/job/staging_memory.h"

namespace gradsync::daemon {

// One item of a rank's state: a parameter, a state of the optimizer, ...
struct StateDigest {
  std::string name;
  std::string sha256;  // 32 bytes

  bool operator==(const StateDigest& other) const {
    return name == other.name && sha256 == other.sha256;
  }
};

// One attempt to bring the state from one source to one replacement, in chunks through their
// staging memories. A value. Each transition's comment says in which phase it may be called.
//
//   kOffering --Offer--> kWriting --Written--> kCopying --Copied--> kReading --Read--> kWriting
//   kReading --Read--> kLoading: after the last chunk
class StateTransfer {
 public:
  enum class Phase : std::uint8_t {
    kOffering,  // the source has not said how much it has
    kWriting,   // the source writes a chunk
    kCopying,   // an executor copies the chunk
    kReading,   // the replacement reads the chunk
    kLoading,   // the replacement has read everything, and loads it
  };
  // A rank that was asked for its digests. The source is one of them.
  struct Asked {
    RankSession session;
    bool answered = false;
    // Since when the rank is frozen, and so can answer. Nullopt: it still computes.
    std::optional<std::uint64_t> frozen_ns;
  };

  StateTransfer(std::uint64_t number, RankSession source, RankSession replacement,
                StagingMemory staging, std::uint64_t now_ns)
      : number_(number),
        source_(source),
        replacement_(replacement),
        to_(std::move(staging)),
        since_ns_(now_ns) {}

  std::uint64_t number() const { return number_; }
  RankSession source() const { return source_; }
  RankSession replacement() const { return replacement_; }
  Phase phase() const { return phase_; }
  std::uint64_t bytes() const { return bytes_; }
  std::uint64_t moved() const { return moved_; }
  std::uint64_t chunk() const { return chunk_; }
  std::uint64_t chunk_bytes() const;
  const StagingMemory& from() const { return from_; }
  const StagingMemory& to() const { return to_; }
  // When the phase began.
  std::uint64_t since_ns() const { return since_ns_; }
  // True while the daemon waits for the source's offer or chunk. False while the source may still
  // compute: no limit runs then.
  bool WaitsForSource() const {
    return source_frozen_ && (phase_ == Phase::kOffering || phase_ == Phase::kWriting);
  }
  // The daemon waits for the replacement, which reads a chunk or has not sent its digests.
  bool WaitsForReplacement() const {
    return phase_ == Phase::kReading || (phase_ == Phase::kLoading && !loaded.has_value());
  }

  // ---- Transitions
  // kOffering -> kWriting.
  void Offer(std::uint64_t bytes, StagingMemory staging, std::uint64_t now_ns);
  // kWriting -> kCopying.
  void Written(std::uint64_t now_ns);
  // kCopying -> kReading.
  void Copied(std::uint64_t now_ns);
  // kReading -> kWriting, or kLoading if the whole state was read.
  void Read(std::uint64_t now_ns);

  // The source is frozen from now on. The time that it may take begins.
  void SourceFrozen(std::uint64_t now_ns) {
    if (phase_ == Phase::kOffering || phase_ == Phase::kWriting) since_ns_ = now_ns;
    source_frozen_ = true;
  }

  // ---- Digests
  // Requires that no session of the rank was asked.
  void Ask(RankSession session, std::optional<std::uint64_t> frozen_ns);
  void Drop(std::uint32_t rank);
  const std::vector<Asked>& asked() const { return asked_; }
  // Null if the rank was not asked.
  Asked* FindAsked(std::uint32_t rank);
  bool AllAnswered() const;
  // The digests of the first survivor that has answered, and those of the replacement.
  struct Digests {
    std::uint32_t rank = 0;
    std::vector<StateDigest> items;
    ArenaQuota::Reservation charge;
  };
  std::optional<Digests> survivor;
  std::optional<Digests> loaded;
  std::uint64_t loaded_ns = 0;

 private:
  // Where the rank is in asked_, or would be.
  std::vector<Asked>::iterator PlaceOf(std::uint32_t rank);

  std::uint64_t number_;
  RankSession source_;
  RankSession replacement_;
  StagingMemory to_;
  StagingMemory from_;
  Phase phase_ = Phase::kOffering;
  std::uint64_t bytes_ = 0;
  std::uint64_t moved_ = 0;
  std::uint64_t chunk_ = 0;
  bool source_frozen_ = false;
  std::uint64_t since_ns_;
  // In the order of their ranks: after each message of a rank all ranks are looked up.
  std::vector<Asked> asked_;
};

// Serves the replacements that have asked for the state, one at a time. Chooses a source among the
// frozen ranks, and another one if that source refuses, is silent or is lost. While no rank is
// frozen, the source is a rank that has begun the step: such a rank answers when it waits for a
// bucket. Asks each survivor for its digests once that survivor has begun the step, and admits the
// replacement when all that were asked agree. StateHealing does not wait for a rank that has not
// begun the step: that may take long, and meanwhile another loss could leave no rank with the
// state.
//
// Externally synchronized: guarded by the job's lock. Never blocks. A copy of a chunk keeps its
// staging memory mapped. The job lives until no copy is in flight.
class StateHealing {
 public:
  // Where a rank stands for a replacement.
  enum class Standing : std::uint8_t {
    kNone,      // it does not have the state that the replacement needs
    kHasState,  // it has that state or will have it, and may still change it
    kBegun,     // it has that state and does not change it; it answers once it waits
    kFrozen,    // the same, and it waits: it can be read
  };
  using StandingOf = absl::FunctionRef<Standing(std::uint32_t rank, std::uint32_t replacement)>;
  // A copy has ended. Called without the job's lock; the job takes it and calls Copied().
  using OnCopied = std::function<void()>;

  // How long a source may take for its offer and for each chunk, a replacement for each chunk but
  // the first, and a frozen rank for its digests.
  static constexpr std::uint64_t kSilenceNs = 30'000'000'000;
  // How long a replacement may take for the first chunk, and from the last chunk to its digests.
  // Before the first chunk it may still load what an earlier transfer brought.
  static constexpr std::uint64_t kLoadNs = 120'000'000'000;
  // How much longer a rank may take to load or to hash, per byte of the state. This value allows
  // for 100 MB/s.
  static constexpr std::uint64_t kHashNsPerByte = 10;

  // `terms` and `members` outlive this object.
  StateHealing(const JobTerms& terms, Membership* members, OnCopied copied)
      : terms_(terms), members_(members), copied_(std::move(copied)) {}

  // For Fetch(): the request has no deadline. hold_timeout still ends the job if others wait too
  // long.
  static constexpr std::uint64_t kNoDeadline = std::numeric_limits<std::uint64_t>::max();

  // The search for a source looks at each rank for each replacement. After so many looks it goes on
  // at the next call of Update().
  static constexpr std::size_t kLooksAtOnce = 8192;

  // ---- Messages of ranks. A Status that is not OK ends the rank's session. A message about a
  // transfer that has ended is ignored.
  // The replacement asks for the state, and waits until `deadline_ns`. If it asks again in the
  // middle of a transfer, the transfer begins again. If it is already admitted, nothing happens.
  absl::Status Fetch(std::uint32_t rank, StagingMemory staging, std::uint64_t deadline_ns,
                     DeferredActions* actions);
  absl::Status Offer(std::uint32_t rank, std::uint64_t transfer, std::uint64_t bytes,
                     StagingMemory staging, std::uint64_t now_ns, DeferredActions* actions);
  absl::Status Written(std::uint32_t rank, std::uint64_t transfer, std::uint64_t chunk,
                       std::uint64_t now_ns, DeferredActions* actions);
  absl::Status Read(std::uint32_t rank, std::uint64_t transfer, std::uint64_t chunk,
                    std::uint64_t now_ns, DeferredActions* actions);
  // `charge` is held for as long as the items are kept.
  absl::Status TakeDigests(std::uint32_t rank, std::uint64_t transfer,
                           std::vector<StateDigest> items, ArenaQuota::Reservation charge,
                           std::uint64_t now_ns);
  // If the source refuses, another one is chosen. If a rank that was only asked for digests
  // refuses, it is not compared. If the replacement refuses: STATE_REFUSED.
  absl::Status Refuse(std::uint32_t rank, std::uint64_t transfer, absl::string_view why,
                      DeferredActions* actions);
  void Copied(std::uint64_t now_ns, DeferredActions* actions);

  // ---- Progress
  // Called at the end of every change of the job, unless idle(). Ends the transfer if a rank that
  // was asked may change its state, or if there is a better source. Asks ranks that have begun the
  // step, admits the replacement when all digests agree, and begins the next transfer. A Status
  // that is not OK ends the job: RANKS_DIVERGED.
  absl::Status Update(StandingOf standing_of, std::uint64_t now_ns, DeferredActions* actions);
  // Gives up a silent source. Fails the request of a replacement that is too slow, so that the next
  // one is served. Once the replacement has sent its digests, stops waiting for those of a frozen
  // rank that takes too long. Fails requests whose deadline has passed.
  void Tick(std::uint64_t now_ns, DeferredActions* actions);
  // Call it when the job has ended. Ends the transfer; no other one begins.
  void Stop(DeferredActions* actions);

  // A copy touches staging memory.
  bool busy() const { return copying_; }
  // Nobody has asked for the state, and nothing is under way: Update() does nothing.
  bool idle() const { return requests_.empty() && !transfer_.has_value(); }
  // The transfer under way.
  std::optional<HealingSnapshot> Snapshot() const;

 private:
  struct GivenUp {
    RankSession session;
    std::string why;
  };
  // A replacement's request.
  struct Request {
    RankSession replacement;
    StagingMemory staging;
    std::uint64_t deadline_ns = 0;
    std::vector<GivenUp> given_up;  // sources that have refused or were silent
  };

  absl::Status Breach(std::uint32_t rank, absl::string_view what) const;
  // OK, and *current is true, if `transfer` is under way. OK, and *current is false, if it has
  // ended. A breach if it has not begun.
  absl::Status CheckTransfer(std::uint32_t rank, std::uint64_t transfer, absl::string_view message,
                             bool* current) const;
  std::vector<Request>::iterator RequestOf(RankSession replacement);
  static bool HasGivenUp(const Request& request, RankSession session);
  // True if the present transfer does without the rank.
  bool IsGivenUp(std::uint32_t rank) const;
  bool IsLoading(RankSession replacement) const;
  void AskChunk(DeferredActions* actions);
  // True if the source still computes and has offered nothing, while another rank is frozen.
  bool HasBetterSource(StandingOf standing_of);
  // Ends the transfer, and tells the source, the replacement and the ranks that were asked.
  void Cancel(DeferredActions* actions);
  void GiveUpSource(std::string why, DeferredActions* actions);
  // True if the rank's digests were compared when it was admitted, and it has completed no step
  // since.
  bool WasCompared(std::uint32_t rank) const;
  // Asks the survivors that have begun the step and were not asked.
  void AskRanks(StandingOf standing_of, std::uint64_t now_ns, DeferredActions* actions);
  void GiveUpSlowReplacement(std::uint64_t now_ns, DeferredActions* actions);
  void GiveUpSilent(std::uint64_t now_ns, DeferredActions* actions);
  // Ends the request and tells the replacement `why`. Returns the request after it.
  std::vector<Request>::iterator Fail(std::vector<Request>::iterator request, absl::Status why,
                                      DeferredActions* actions);
  // Admits the replacement if every rank that was asked has answered and all digests agree; ends
  // its session if only its own differ.
  void MaybeAdmit(DeferredActions* actions);
  // Begins a transfer to the first replacement that has a source. Fails the requests of those that
  // no rank can serve. Goes on where the last call stopped after kLooksAtOnce.
  void BeginNext(StandingOf standing_of, std::uint64_t now_ns, DeferredActions* actions);
  // Begins a transfer to this replacement if there is a source: the lowest rank that is frozen, or
  // else the lowest rank that has begun the step. Returns false if no rank can become a source.
  bool TryBegin(const Request& request, StandingOf standing_of, std::uint64_t now_ns,
                DeferredActions* actions);
  // Why ranks have not given the state: the reasons of a few ranks, and how many more there are.
  static std::vector<std::string> Refusals(const Request& request);
  absl::Status Unavailable(const Request& request) const;
  absl::Status TimedOut(const Request& request) const;
  absl::Status TooSlow(const Request& request, std::uint64_t patience_ns) const;
  std::string Waiting(const Request& request) const;

  const JobTerms& terms_;
  Membership* const members_;
  const OnCopied copied_;

  std::vector<Request> requests_;  // in the order of their requests; at most one per rank
  std::size_t next_ = 0;           // the index of the one for which BeginNext() looks first
  std::optional<StateTransfer> transfer_;
  std::uint64_t transfers_ = 0;  // number of the last one
  bool copying_ = false;         // may outlast its transfer; the next one waits for it
  bool stopped_ = false;
  absl::Status diverged_;  // why the job must end
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_STATE_HEALING_H_
