// The ranks of a job and their sessions.

#ifndef DAEMON_JOB_MEMBERSHIP_H_
#define DAEMON_JOB_MEMBERSHIP_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/base/tenant.h"
#include "daemon/job/deferred_actions.h"
#include "daemon/job/rank_session.h"
#include "daemon/job/session_message.h"

namespace gradsync::daemon {

enum class RankState : std::uint8_t {
  kAbsent,    // not joined yet
  kLive,      // takes part in steps and in the job's own channel
  kHeld,      // its session is lost; running steps wait for its next one
  kLoading,   // its session came after a loss and lacks the state of the model: steps wait
  kHealing,   // its session came after a loss: the rank takes part in steps, but in nothing else
  kStayed,    // Leave{exit=false}: takes part in nothing until every rank has left
  kExited,    // Leave{exit=true}
  kFinished,  // Finish: steps and operations need it, so the job ends if another rank begins one
  kLost,
};
inline constexpr std::size_t kRankStates = static_cast<std::size_t>(RankState::kLost) + 1;

// The rank has joined and has not left; its session may be lost.
inline bool TakesPart(RankState state) {
  return state == RankState::kLive || state == RankState::kHeld || state == RankState::kLoading ||
         state == RankState::kHealing;
}
// The rank is held or loading: it was lost, and its next session has not come, or does not have the
// state of the model yet.
inline bool IsMissing(RankState state) {
  return state == RankState::kHeld || state == RankState::kLoading;
}
// The rank's session came after a loss, and takes part in no operation and no agreement yet.
inline bool CameBack(RankState state) {
  return state == RankState::kLoading || state == RankState::kHealing;
}
// The rank was lost, and is not live again yet.
inline bool IsRecovering(RankState state) { return IsMissing(state) || CameBack(state); }

struct Member {
  RankState state = RankState::kAbsent;
  std::uint64_t incarnation = 0;
  std::shared_ptr<SessionSink> sink;  // null unless a session is there
  absl::Status loss;                  // kLost, kHeld: why; the rank's own session ends with this
  std::uint64_t left_ns = 0;          // kExited, kFinished: when, by the job's clock
  std::string node;                   // another node's name; empty: this one
  bool stepped = false;               // its session has contributed to a complete step
  // If `stepped`: the last operation of the job's channel before the end of the first such step.
  std::uint64_t last_operation = 0;
  PodId pod;                     // of its process; none: in no pod, or on another node
  std::uint64_t flushed_by = 0;  // DeferredActions::number of the last flush of `sink`
};

// The state of each rank, and its session:
//
//   kAbsent --Join--> kLive --Stay--> kStayed --Resume--> kLive
//   kLive, kHealing or kStayed --Exit--> kExited
//   kLive or kHealing --Finish--> kFinished
//   kLive, kStayed, kLoading or kHealing --Lose--> kLost
//   kLive, kLoading or kHealing --Hold--> kHeld --Join--> kHealing --Heal--> kLive
//   kHeld --Join with `loads`--> kLoading --Admit--> kHealing
//
// Counts the ranks in each state, because a job may have 65,536 ranks, and each message of a rank
// asks for these counts.
//
// Externally synchronized: guarded by the job's lock. Shares the sinks with their sessions.
class Membership {
 public:
  // `here`: this node's name, for messages of jobs that have ranks on other nodes.
  explicit Membership(std::uint32_t world_size, std::string here = "")
      : members_(world_size), here_(std::move(here)) {
    CountOf(RankState::kAbsent) = world_size;
  }

  std::uint32_t world_size() const { return static_cast<std::uint32_t>(members_.size()); }
  const Member& operator[](std::uint32_t rank) const { return members_[rank]; }
  // The rank's session, or its last one.
  RankSession SessionOf(std::uint32_t rank) const { return {rank, members_[rank].incarnation}; }

  // ---- Transitions. The caller checks that the rank's state allows them.
  // `loads`: a session that comes after a loss gets the state of the model from another rank.
  void Join(std::uint32_t rank, std::uint64_t incarnation, std::shared_ptr<SessionSink> sink,
            std::string node, bool loads = false, PodId pod = {}) {
    const RankState back = loads ? RankState::kLoading : RankState::kHealing;
    const RankState state = members_[rank].state == RankState::kHeld ? back : RankState::kLive;
    SetState(rank, state);
    if (!members_[rank].node.empty()) --on_other_nodes_;
    if (!node.empty()) ++on_other_nodes_;
    members_[rank] = {state, incarnation, std::move(sink), {}, 0, std::move(node), false, 0, pod,
                      0};
  }
  // The rank's session has the state of the model.
  void Admit(std::uint32_t rank) { SetState(rank, RankState::kHealing); }
  void Stay(std::uint32_t rank) {
    SetState(rank, RankState::kStayed);
    stayed_.push_back(rank);
  }
  void Exit(std::uint32_t rank, std::uint64_t now_ns) {
    SetState(rank, RankState::kExited);
    members_[rank].left_ns = now_ns;
    if (!exited_.has_value()) exited_ = rank;
    stayed_.erase(std::remove(stayed_.begin(), stayed_.end(), rank), stayed_.end());
  }
  void Finish(std::uint32_t rank, std::uint64_t now_ns) {
    SetState(rank, RankState::kFinished);
    members_[rank].left_ns = now_ns;
    if (!finished_.has_value()) finished_ = rank;
  }
  void Lose(std::uint32_t rank, const absl::Status& why) {
    SetState(rank, RankState::kLost);
    members_[rank].loss = why;
  }
  // Ends the rank's session with `why`. The rank waits for its next session.
  void Hold(std::uint32_t rank, const absl::Status& why, DeferredActions* actions) {
    EndSession(rank, why, actions);
    SetState(rank, RankState::kHeld);
    members_[rank].loss = why;
  }
  void Heal(std::uint32_t rank) { SetState(rank, RankState::kLive); }
  // The rank's session has contributed to a complete step. The rank keeps its state.
  // `last_operation`: see Member.
  void Stepped(std::uint32_t rank, std::uint64_t last_operation) {
    if (members_[rank].stepped) return;
    members_[rank].stepped = true;
    members_[rank].last_operation = last_operation;
  }
  // The ranks that stayed take part again. Returns these ranks, in the order in which they left.
  std::vector<std::uint32_t> Resume() {
    for (const std::uint32_t rank : stayed_) SetState(rank, RankState::kLive);
    return std::exchange(stayed_, {});
  }

  // The ranks that have left and stay, in the order in which they left.
  const std::vector<std::uint32_t>& stayed() const { return stayed_; }
  // The rank that finished first; nullopt if none has.
  std::optional<std::uint32_t> finished() const { return finished_; }
  // The rank that left for good first; nullopt if none has.
  std::optional<std::uint32_t> exited() const { return exited_; }
  // How many ranks are in this state.
  std::uint32_t Count(RankState state) const { return counts_[static_cast<std::size_t>(state)]; }
  // True if the rank has left for good or finished, but its session has not ended: under policy
  // `hold` it waits until every rank has left. The rank has the same state of the model as the
  // others, because a further step would end the job.
  bool IsLeaving(std::uint32_t rank) const {
    const Member& member = members_[rank];
    return member.sink != nullptr &&
           (member.state == RankState::kExited || member.state == RankState::kFinished);
  }
  // True if IsMissing() of some rank.
  bool AnyIsMissing() const { return CountIf(IsMissing) > 0; }
  // True if IsRecovering() of some rank.
  bool AnyIsRecovering() const { return CountIf(IsRecovering) > 0; }
  bool AnyIsLeaving() const {
    for (std::uint32_t rank = 0; rank < world_size(); ++rank) {
      if (IsLeaving(rank)) return true;
    }
    return false;
  }
  // True if no rank takes part in anything, and none is still to join.
  bool AllHaveLeft() const { return Count(RankState::kAbsent) + CountIf(TakesPart) == 0; }
  // Notes that another job of the same user and id has another token. The absent ranks may be in
  // that job.
  void NoteOtherToken() { other_token_ = true; }
  bool other_token() const { return other_token_; }
  // Notes that a rank named a coordinator, although this node's daemon has no peer_listen. The
  // absent ranks may be on other nodes.
  void NoteNoPeers() { no_peers_ = true; }
  // Sentences about these notes for an error or a notice. They begin with a space, or are empty.
  std::string AbsenceHint() const {
    if (Formed()) return "";
    return std::string(
               other_token_
                   ? " Ranks with another token have joined a job with the same job_id: set the "
                     "same GRADSYNC_JOB_TOKEN on every rank, or give each run its own job_id."
                   : "") +
           (no_peers_ ? " This node's daemon has no peer_listen, so ranks on other nodes cannot "
                        "join: set it on every node."
                      : "");
  }
  // True if every rank has joined once.
  bool Formed() const { return Count(RankState::kAbsent) == 0; }

  // True if steps and operations wait for this rank: it has not joined yet, it takes part (see
  // TakesPart), or it has finished. They do not wait for a rank that has left.
  bool IsAwaited(std::uint32_t rank) const { return StateIsAwaited(members_[rank].state); }
  // True if the rank may mark buckets, and has the state of the model.
  bool MayMark(std::uint32_t rank) const {
    const RankState state = members_[rank].state;
    return state == RankState::kLive || state == RankState::kHealing;
  }
  // How many ranks are awaited: see IsAwaited().
  std::uint32_t StepRanks() const { return CountIf(StateIsAwaited); }

  // True if some rank is on another node.
  bool SpansNodes() const { return on_other_nodes_ > 0; }

  // The name of the rank's node; empty if the job does not span nodes.
  std::string NodeOf(std::uint32_t rank) const {
    if (!SpansNodes()) return "";
    return members_[rank].node.empty() ? here_ : members_[rank].node;
  }
  // "3", or "3 (node beta)" if the job spans nodes.
  std::string Name(std::uint32_t rank) const {
    const std::string node = NodeOf(rank);
    return node.empty() ? std::to_string(rank) : std::to_string(rank) + " (node " + node + ")";
  }

  // Queues the message for the rank's session, if it has one. `actions` flushes each session once,
  // in the order of their first messages.
  void Send(std::uint32_t rank, SessionMessage message, DeferredActions* actions) {
    const std::shared_ptr<SessionSink>& sink = members_[rank].sink;
    if (sink == nullptr) return;
    sink->Queue(std::move(message));
    if (actions->number == 0) actions->number = ++last_actions_;
    std::uint64_t& flushed_by = members_[rank].flushed_by;
    if (flushed_by == actions->number) return;
    flushed_by = actions->number;
    actions->flushes.push_back(sink);
  }
  // Sends the rank its session's last message. The rank keeps its state.
  void EndSession(std::uint32_t rank, const absl::Status& status, DeferredActions* actions) {
    Send(rank, SessionEndMessage{status}, actions);
    members_[rank].sink.reset();
  }

 private:
  static bool StateIsAwaited(RankState state) {
    return state == RankState::kAbsent || TakesPart(state) || state == RankState::kFinished;
  }
  // How many ranks are in states that pass.
  template <typename Pass>
  std::uint32_t CountIf(Pass pass) const {
    std::uint32_t count = 0;
    for (std::size_t state = 0; state < kRankStates; ++state) {
      if (pass(static_cast<RankState>(state))) count += counts_[state];
    }
    return count;
  }
  std::uint32_t& CountOf(RankState state) { return counts_[static_cast<std::size_t>(state)]; }
  void SetState(std::uint32_t rank, RankState state) {
    --CountOf(members_[rank].state);
    ++CountOf(state);
    members_[rank].state = state;
  }

  std::vector<Member> members_;
  std::array<std::uint32_t, kRankStates> counts_{};  // by state: the ranks in it
  std::uint32_t on_other_nodes_ = 0;                 // how many ranks' `node` is not empty
  std::optional<std::uint32_t> finished_;
  std::optional<std::uint32_t> exited_;
  std::vector<std::uint32_t> stayed_;
  bool other_token_ = false;
  bool no_peers_ = false;
  std::uint64_t last_actions_ = 0;  // the last DeferredActions::number
  const std::string here_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_MEMBERSHIP_H_
