// The parts of a layout's steps that only GPUs need. On a GPU the trainers' streams see a step's
// verdict before the daemon does. So the daemon cannot revoke a verdict of the GPUs, and a rank may
// begin the next step before the daemon has finished this one.

#ifndef DAEMON_JOB_GPU_STEP_H_
#define DAEMON_JOB_GPU_STEP_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "daemon/job/deferred_actions.h"
#include "daemon/job/membership.h"
#include "daemon/reduce/reducer.h"

namespace gradsync::daemon {

// The running step's verdict on the GPUs, from the reductions that are done so far. A value:
// LayoutChannel replaces it together with the step.
//
//   kGood --Add(failed)--> kInDoubt
//   kGood or kInDoubt --Add(void)--> kVoid
//
// Externally synchronized: guarded by the job's lock.
class GpuVerdict {
 public:
  enum class State : std::uint8_t {
    kGood,     // no bucket is void; if all are done, the trainers' streams have seen the step
               // complete
    kInDoubt,  // like kGood, but nobody knows whether some bucket is void on the GPUs
    kVoid,     // some bucket is void on every GPU, and so is the step
  };

  State state() const { return state_; }
  // Why a bucket is in doubt; OK if none is.
  const absl::Status& doubt() const { return doubt_; }

  // A bucket's reduction is done.
  void Add(const ReduceOperation& operation);

 private:
  State state_ = State::kGood;
  absl::Status doubt_;
};

// Keeps the ranks' messages about the step after the running one until the running one has its
// verdict. A rank may send them once it has ended the running step.
//
// Externally synchronized: guarded by the job's lock.
class EarlyMessages {
 public:
  using Message = std::function<absl::Status(std::uint64_t now_ns, DeferredActions*)>;

  explicit EarlyMessages(std::size_t ranks) : ranks_(ranks) {}

  // Adds `marks` to the count of bucket marks in this rank's messages, and returns the count.
  std::size_t CountMarks(std::uint32_t rank, std::size_t marks) {
    return ranks_[rank].marks += marks;
  }
  // `last`: the message ends or abandons the step, and no other message of this rank follows.
  void Add(std::uint32_t rank, Message message, bool last) {
    ranks_[rank].messages.push_back(std::move(message));
    ranks_[rank].ended = last;
  }
  std::size_t Count(std::uint32_t rank) const { return ranks_[rank].messages.size(); }
  bool Ended(std::uint32_t rank) const { return ranks_[rank].ended; }
  void Drop(std::uint32_t rank) { ranks_[rank] = Rank(); }
  // The running step has its verdict: handles the messages, each rank's in order. A rank's first
  // breach of the protocol goes to `actions`, and its other messages are dropped.
  void HandleAll(const Membership& members, std::uint64_t now_ns, DeferredActions* actions);

 private:
  struct Rank {
    std::vector<Message> messages;
    std::size_t marks = 0;
    bool ended = false;
  };
  std::vector<Rank> ranks_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_GPU_STEP_H_
