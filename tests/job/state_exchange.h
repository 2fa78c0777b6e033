// A trainer's part in the healing of a replacement: what the client library does with the state of
// the model, as the source, as a rank that is only asked for digests, or as the replacement.

#ifndef TESTS_JOB_STATE_EXCHANGE_H_
#define TESTS_JOB_STATE_EXCHANGE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/job/rank_session.h"
#include "daemon/job/session_message.h"
#include "proto/gradsync/error_reason.h"
#include "tests/job/model_run.h"
#include "tests/job/model_state.h"

namespace gradsync::daemon {

// It answers each message in an event of its own, and keeps the process's staging memory: two
// words, so that a state takes three chunks. This memory holds nonsense at first, and is filled
// with nonsense again before each chunk is written to it. Not thread-safe.
class StateExchange {
 public:
  static constexpr std::size_t kStagingWords = 2;

  using Send = std::function<void(std::function<absl::Status(Job*)>)>;
  // `run` outlives this. `send` sends a message to the daemon.
  StateExchange(ModelRun* run, RankSession session, Send send);

  // What the process may do next. `lacks`: it has no state, and may ask for one. `waits`: its
  // reader may read the state now. `frozen`: the daemon knows, or will hear, that the process
  // waits. Only then does the daemon give up a source that is silent.
  void AddActions(bool lacks, bool waits, bool frozen, std::vector<Action>* actions) const;
  // `state` is the process's own: a load changes it. Returns false if AddActions() never adds
  // `action`.
  bool Do(Action action, ModelState* state);
  // A message about the state. `begun`: the process's state cannot change now. Returns a violation
  // of the protocol; "" if there is none.
  std::string Receive(const SessionMessage& message, bool begun);

  // The reader reads the process's state, or is about to: nobody may change the state.
  bool pinned() const { return question_.has_value(); }
  // Nobody waits for the reader any more: it ends soon.
  void StopReading() {
    if (question_.has_value()) question_->cancelled = true;
  }
  // It is the source, and the transfer has begun.
  bool IsSource() const { return question_.has_value() && question_->offered; }
  // The replacement gets chunks, or has them and has not loaded them.
  bool loading() const { return transfer_ != 0 && !loaded_; }
  // It has loaded the state, and waits for the other ranks' digests.
  bool confirming() const { return loaded_ && !admitted_; }
  bool admitted() const { return admitted_; }
  // It does not answer the daemon any more, or gives up soon.
  bool waits_for_time() const {
    return (question_.has_value() && question_->silent) || (hasty_ && asked_ && !admitted_);
  }
  // The daemon has read its digests for this transfer, or does without them.
  bool Compared(std::uint64_t transfer) const { return answered_ == transfer || excused_; }
  // From now on the daemon may do without its digests.
  void Excuse() { excused_ = true; }
  // The daemon may end its session for this.
  std::optional<Reason> fault() const { return fault_; }
  bool StagingIsShared() const { return staging_.use_count() > 1; }

 private:
  // What the daemon has asked of a rank that has the state.
  struct Question {
    std::uint64_t transfer;
    bool offer;
    bool offered = false;
    bool digests_sent = false;
    bool cancelled = false;
    bool silent = false;
    std::optional<StateChunkMessage> due;
    std::size_t words = 0;  // that it has written
  };

  void Scribble();
  StagingMemory Staging() const;
  void SendDigests(std::uint64_t transfer, const ModelState& state);
  void Offer();
  void WriteChunk(const ModelState& state);
  void ReadChunk();
  void Fetch(bool hastily);
  // `fault`: kRanksDiverged if a word is lost on the way, kStateRefused if it cannot load.
  void Load(std::optional<Reason> fault, ModelState* state);
  void Forget();

  ModelRun* const run_;
  const RankSession session_;
  const Send send_;
  const std::shared_ptr<std::vector<std::uint64_t>> staging_;

  std::optional<Question> question_;
  std::uint64_t answered_ = 0;  // the last transfer whose digests the daemon has read
  bool excused_ = false;
  // The part of a replacement.
  bool asked_ = false;  // and waits for the answer
  // Its requests that have not failed. It may ask again while the failure of the last one is on its
  // way.
  int requests_ = 0;
  bool hasty_ = false;
  std::uint64_t left_transfer_ = 0;  // of its previous request; 0: none
  bool left_loaded_ = false;         // it had loaded the state of that transfer
  std::uint64_t transfer_ = 0;       // 0: none
  std::vector<std::uint64_t> image_;
  std::optional<StateChunkMessage> due_;
  bool loaded_ = false;
  std::optional<Reason> fault_;
  bool admitted_ = false;
};

}  // namespace gradsync::daemon

#endif  // TESTS_JOB_STATE_EXCHANGE_H_
