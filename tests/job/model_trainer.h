// A trainer of a random schedule: one process of a rank, with its session.

#ifndef TESTS_JOB_MODEL_TRAINER_H_
#define TESTS_JOB_MODEL_TRAINER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/job/rank_session.h"
#include "daemon/job/session_message.h"
#include "tests/job/model_run.h"
#include "tests/job/model_state.h"
#include "tests/job/state_exchange.h"
#include "tests/job/trainer_memory.h"

namespace gradsync::daemon {

// Messages that a job has flushed and the trainer has not read.
class Inbox final : public SessionSink {
 public:
  void Queue(SessionMessage message) override;
  void Flush() override { readable_ = queued_.size(); }

  // All that were ever queued.
  std::size_t total() const { return taken_ + queued_.size(); }
  bool empty() const { return readable_ == 0; }
  bool HasVerdict() const;
  bool HasQuestion() const;
  // The transfer after which the trainer was admitted; 0: it was not.
  std::uint64_t admitted_by() const { return admitted_by_; }
  SessionMessage Take();

 private:
  std::deque<SessionMessage> queued_;
  std::size_t readable_ = 0;
  std::size_t taken_ = 0;
  std::uint64_t admitted_by_ = 0;
};

// The program and the library in the process. It does one event at a time; which ones it may do
// depends on nothing but what it has done and read. Not thread-safe.
class ModelTrainer {
 public:
  // Joins the job. `run` outlives this.
  ModelTrainer(ModelRun* run, RankSession session, bool replacement);

  // What the process may do next, except to die.
  void AddActions(std::vector<Action>* actions) const;
  void Do(Action action);
  void Die() { alive_ = false; }
  // The daemon reads the oldest message; there must be one.
  void Deliver();
  // The job knows of the death.
  void Lose();
  // The daemon may do without the digests of a rank that was asked for them and has not sent them.
  void TimePasses() {
    if (exchange_.pinned() || inbox_->HasQuestion()) exchange_.Excuse();
  }
  // The run is over: leaves its memory to the next one, unless the daemon has closed it.
  void GiveMemoryBack();

  const RankSession& session() const { return session_; }
  std::string Name() const;
  bool alive() const { return alive_; }
  bool known_lost() const { return known_lost_; }
  bool replacement() const { return replacement_; }
  bool anything_sent() const { return !sent_.empty(); }
  const Inbox& inbox() const { return *inbox_; }
  // Its session has come to a good end.
  bool left() const { return left_; }
  // It has told the daemon that it leaves, and the daemon has read it.
  bool leaving() const { return leave_read_; }

  bool has_state() const { return has_state_; }
  bool through() const { return has_state_ && state_.StepsDone() == run_->steps; }
  bool has_sent_leave() const { return leave_sent_; }
  bool ended() const { return ended_; }
  bool has_verdict() const { return !verdicts_.empty() || inbox_->HasVerdict(); }
  std::uint64_t step() const { return step_; }
  std::size_t marked() const { return marked_; }
  const StateExchange& exchange() const { return exchange_; }
  const TrainerMemory* memory() const { return memory_.get(); }

  bool HasMarked(std::size_t bucket) const;
  // Only the trainer may write to the bucket now.
  bool Owns(std::size_t bucket) const;
  Half* At(std::size_t bucket) const;

 private:
  using Call = std::function<absl::Status(Job*)>;

  void Violate(const std::string& what);
  // It waits for a bucket that is not reduced.
  bool AwaitsBucket() const;
  // It waits for a bucket or a verdict, or for the end of the session after it has left.
  bool Waits() const;
  void Send(Call call) { sent_.push_back(std::move(call)); }
  void Register();
  void Receive(const SessionMessage& message);
  // The end of the session follows from a fault of this trainer.
  bool IsFault(const absl::Status& status) const;
  void TakeEnd(const absl::Status& status);
  void BeginStep(std::uint64_t step);
  void WriteHalf();
  void Mark();
  void End(bool finish);
  void Abandon();
  // Its program calls a barrier now, if barriers have this place.
  void OweBarrier(BarrierPlace place);
  bool MayCallBarrier() const;
  void CallBarrier();
  void TakeVerdict();
  void CheckAverages();
  void Record();

  ModelRun* const run_;
  const RankSession session_;
  const bool replacement_;
  const std::shared_ptr<Inbox> inbox_;

  bool alive_ = true;
  bool known_lost_ = false;
  bool left_ = false;
  std::unique_ptr<TrainerMemory> memory_;  // null until the layout is registered
  bool mapped_ = false;
  bool has_state_;
  ModelState state_;

  std::uint64_t step_ = 0;            // 0: not told yet
  std::vector<std::uint32_t> order_;  // in which it computes the buckets of its step
  std::size_t written_ = 0;           // halves, in that order
  std::size_t marked_ = 0;            // buckets, in that order
  bool ended_ = false;
  std::optional<std::size_t> awaited_;  // the bucket for which it waits or has waited in this step
  std::deque<std::shared_ptr<const StepRecord>> verdicts_;  // that the library has read
  bool live_;                                               // it takes part in barriers
  std::uint64_t barrier_ = 0;                               // number of its last one
  bool in_barrier_ = false;
  std::uint64_t owed_barrier_ = 0;  // of this step; it does nothing else before. 0: none
  bool saved_ = false;
  bool leave_sent_ = false;
  bool leave_read_ = false;

  StateExchange exchange_;
  std::deque<Call> sent_;  // what the daemon has not read
};

}  // namespace gradsync::daemon

#endif  // TESTS_JOB_MODEL_TRAINER_H_
