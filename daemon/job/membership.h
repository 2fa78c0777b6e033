// The ranks of a job, their sessions, and the actions that a change of the job leads to.

#ifndef DAEMON_JOB_MEMBERSHIP_H_
#define DAEMON_JOB_MEMBERSHIP_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "daemon/job/session_message.h"
#include "daemon/reduce/reducer.h"

namespace gradsync::daemon {

enum class RankState : std::uint8_t {
  kAbsent,  // not joined yet
  kLive,    // takes part in steps and in the job's own channel
  kStayed,  // Leave{exit=false}: takes part in nothing until every rank has left
  kExited,  // Leave{exit=true}
  kLost,
};

struct Member {
  RankState state = RankState::kAbsent;
  std::uint64_t incarnation = 0;
  std::shared_ptr<SessionSink> sink;  // null unless a session is there
  absl::Status loss;                  // kLost: why, its own session's end
  std::string node;                   // another node's name; empty: this one
};

// What to do after a change of the job's state, once its lock is released.
struct DeferredActions {
  absl::InlinedVector<ReduceOperation*, 8> reductions;
  std::vector<GivenUpStep> given_up;
  absl::InlinedVector<std::shared_ptr<SessionSink>, 8> flushes;
  absl::InlinedVector<std::function<void()>, 1> copies;  // for the executor
  // Memory that the job no longer uses. The executor drops the last reference, because unmapping
  // takes milliseconds.
  std::vector<std::shared_ptr<void>> releases;
  // Ranks whose early messages broke the protocol, and how. Their sessions end.
  std::vector<std::pair<std::uint32_t, absl::Status>> breaches;
};

// The state of each rank, and its session. Externally synchronized: guarded by the job's lock.
// Shares the sinks with their sessions.
class Membership {
 public:
  // `here`: this node's name, for messages of jobs that have ranks on other nodes.
  explicit Membership(std::uint32_t world_size, std::string here = "")
      : members_(world_size), here_(std::move(here)) {}

  std::uint32_t world_size() const { return static_cast<std::uint32_t>(members_.size()); }
  Member& operator[](std::uint32_t rank) { return members_[rank]; }
  const Member& operator[](std::uint32_t rank) const { return members_[rank]; }

  // True if steps and operations wait for this rank. They wait for an absent rank, too, but not for
  // one that has left.
  bool InSteps(std::uint32_t rank) const {
    return members_[rank].state == RankState::kAbsent || members_[rank].state == RankState::kLive;
  }
  std::uint32_t StepRanks() const {
    std::uint32_t count = 0;
    for (std::uint32_t rank = 0; rank < world_size(); ++rank) count += InSteps(rank) ? 1 : 0;
    return count;
  }

  // True if some rank is on another node.
  bool SpansNodes() const {
    return std::any_of(members_.begin(), members_.end(),
                       [](const Member& member) { return !member.node.empty(); });
  }

  // "3", or "3 (node beta)" if the job spans nodes.
  std::string Name(std::uint32_t rank) const {
    if (!SpansNodes()) return std::to_string(rank);
    const std::string& node = members_[rank].node.empty() ? here_ : members_[rank].node;
    return std::to_string(rank) + " (node " + node + ")";
  }

  void Send(std::uint32_t rank, SessionMessage message, DeferredActions* actions) {
    const std::shared_ptr<SessionSink>& sink = members_[rank].sink;
    if (sink == nullptr) return;
    sink->Queue(std::move(message));
    for (const auto& queued : actions->flushes) {
      if (queued == sink) return;
    }
    actions->flushes.push_back(sink);
  }

 private:
  std::vector<Member> members_;
  const std::string here_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_MEMBERSHIP_H_
