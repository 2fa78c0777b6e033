// A second, independent description of what a job with one layout of two buckets must do: rules
// over small sets, without the mechanisms of daemon/job. The model knows what every trainer may do
// next. It predicts the job's answers, its messages and its submissions to the reducer.

#ifndef TESTS_JOB_JOB_MODEL_H_
#define TESTS_JOB_JOB_MODEL_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace gradsync::daemon {

// One kind of event. Each event is atomic.
enum class Action : std::uint8_t {
  kReady,        // `rank` writes bucket `detail` and marks it ready
  kReadyAll,     // `rank` writes every bucket and marks them ready in one message
  kEndStep,      // `rank` ends its step
  kReadVerdict,  // `rank` learns that its step was voided
  kReduced,      // the reducer finishes bucket `detail`
  kWords,        // the executor does all its work: it writes done words
  // Faults.
  kAbandon,    // `rank` abandons its step
  kLose,       // `rank` is lost: its process ends
  kLeave,      // `rank` leaves; `detail` is 1 if it exits, 0 if it stays until all have left
  kFinish,     // `rank` finishes: its process comes to a good end
  kRelease,    // `rank` releases the layout
  kDeadline,   // the step's deadline passes
  kSupersede,  // a new generation of the job begins: rank 0 joins again
  kDrain,      // the daemon drains, and ends the job if no step is running
  kBreach,     // `rank` breaks the protocol: `detail` is a Breach
};
inline constexpr int kActions = static_cast<int>(Action::kBreach) + 1;

enum class Breach : std::uint8_t {
  kSecondReady,      // BucketReady for a bucket that it has marked
  kUnknownBucket,    // BucketReady for a bucket that does not exist
  kUnknownChannel,   // BucketReady on a channel that does not exist
  kStaleReady,       // BucketReady for the step before its own
  kStepZero,         // BucketReady for step 0, which does not exist
  kReadyAhead,       // BucketReady for the step after its own
  kEndAhead,         // EndStep for the step after its own
  kEndWithUnmarked,  // EndStep, but not every bucket is marked
  kReadyAfterEnd,    // BucketReady after EndStep of the same step
  kEndAfterEnd,      // EndStep after EndStep
  kAbandonAfterEnd,  // AbandonStep after EndStep
  kLeaveInStep,      // Leave after a bucket of the running step is marked
  kUseReleased,      // BucketReady for a layout that it has released
  kReleaseTwice,     // ReleaseLayout after ReleaseLayout
  kStayTwice,        // Leave to stay, after Leave to stay
};

struct Event {
  Action action = Action::kReady;
  std::uint8_t rank = 0;
  std::uint8_t detail = 0;
};
// "rank 1: ready 0"
std::string Describe(const Event& event);

inline constexpr int kModelBuckets = 2;
inline constexpr int kModelMaxRanks = 3;
inline constexpr unsigned kEveryBucket = (1u << kModelBuckets) - 1;

// An error that a rank must receive. A field of -1, or a step of 0, is not checked.
struct Cause {
  absl::StatusCode code = absl::StatusCode::kOk;
  const char* reason = "";
  int rank = -1;
  std::uint64_t step = 0;
  int bucket = -1;  // kNoBucket: must not be named
  static constexpr int kNoBucket = -2;

  bool ok() const { return code == absl::StatusCode::kOk; }
};

// The required effects of one event.
struct Prediction {
  enum class Kind : std::uint8_t { kBucketDone, kStepDone, kLeaveDone, kSessionEnd };
  struct Message {
    Kind kind;
    int rank;                // the receiver
    std::uint64_t step = 0;  // kBucketDone, kStepDone; kLeaveDone: the next one
    int bucket = 0;          // kBucketDone; kLeaveDone: the last rank to leave
    Cause cause = {};        // kStepDone: void; kSessionEnd
    // kStepDone:
    int live_ranks = 0;
    int divisor = 0;
  };

  Cause answer;                   // to the rank's own message
  std::vector<Message> messages;  // in order for each rank; the order between ranks is free
  unsigned submitted = 0;         // buckets given to the reducer
};

// "StepDone of step 1"
std::string Describe(const Prediction::Message& message);

struct ModelOptions {
  int ranks = 2;
  std::uint64_t steps = 2;  // each trainer stops after this step number
  unsigned faults = 0;      // a bit per Action that may happen
  int fault_budget = 0;     // the most faults in a schedule
  bool reduce_at_once = false;
  // The executor writes the done words of void steps and of ranks that take part again, as it does
  // for layouts of many buckets.
  bool words_later = false;
  bool divide_by_world = false;
};
constexpr unsigned FaultBit(Action action) { return 1u << static_cast<unsigned>(action); }

class JobModel {
 public:
  explicit JobModel(const ModelOptions& options);

  // All events that may happen next. Empty if the trainers have finished or the job has ended.
  void Enabled(std::vector<Event>* events) const;
  // `event` is one of Enabled().
  Prediction Apply(const Event& event);
  // A key of the state: states with different futures have different keys.
  std::uint64_t Key() const;

  std::uint64_t step() const { return step_; }
  std::uint64_t last_void_step() const { return last_void_; }
  std::uint64_t steps_complete() const { return complete_; }
  std::uint64_t steps_void() const { return step_ - 1 - complete_; }
  unsigned reduced() const { return reduced_; }
  unsigned in_flight() const { return submitted_ & ~reduced_; }
  bool ended() const { return !end_.ok(); }
  bool end_sent() const { return end_sent_; }
  // True if the rank contributes to steps.
  bool IsAwaited(int rank) const { return ranks_[rank].in_steps; }
  bool Lost(int rank) const { return ranks_[rank].lost; }
  bool HasSession(int rank) const { return ranks_[rank].session; }
  // The step that the trainer believes it is in; greater than options.steps if it has finished.
  std::uint64_t Belief(int rank) const { return ranks_[rank].belief; }
  std::uint32_t FirstMarked(int rank) const;
  bool Through(int rank) const { return ranks_[rank].belief > options_.steps; }
  bool Released(int rank) const { return ranks_[rank].released; }
  // Every rank has released the layout or left.
  bool layout_gone() const { return gone_; }
  int divisor() const { return options_.divide_by_world ? options_.ranks : StepRanks(); }

 private:
  struct Rank {
    bool in_steps = true;
    bool session = true;
    bool lost = false;
    bool finished = false;
    bool released = false;
    int away = 0;  // order in which the ranks left and stayed: 1, 2, ...; 0 = present
    // The trainer's own view.
    std::uint64_t belief = 1;
    unsigned marks = 0;
    bool ended = false;
    // The last step that it ended or abandoned, as far as the job knows.
    std::uint64_t last_ended = 0;
  };

  bool Behind(int rank) const { return ranks_[rank].belief < step_; }
  int StepRanks() const;
  // True if the job ignores an otherwise valid message about the rank's own step.
  bool Ignored(int rank) const;
  Cause AnswerTo(int rank, Breach breach) const;
  void EnabledBreaches(int rank, std::vector<Event>* events) const;
  bool MayHappen(Action action) const;
  // The rank for which the step waits in vain, because it has released the layout; -1: none.
  int AwaitedInVain() const;

  void Mark(int rank, unsigned buckets);
  // The rank ends a step that is already void, without having read the verdict.
  void EndInIgnorance(int rank);
  void LeaveSteps(int rank, bool exit, Prediction* prediction);
  // The rank is in no step, but no step of the others can be complete without it.
  void Finish(int rank, Prediction* prediction);
  bool AnyHasSession() const;
  bool SomeoneFinished() const;
  // Ends the job if a rank is in a step that needs a rank that has finished.
  void EndIfFinishedRankIsNeeded();
  void Release(int rank);
  // The executor has done words to write.
  bool Writing() const { return voiding_ || resuming_; }
  // Some rank that stays has the layout, and some step was decided.
  bool HasWordsOfResume() const;
  void WriteWords(Prediction* prediction);
  // If every rank has left, the ranks that stay take part again, after their done words.
  void MaybeResume(Prediction* prediction);
  void Resume(Prediction* prediction);
  void Lose(int rank, const Cause& own);
  void Reduce(int bucket, Prediction* prediction);
  // Each applies rules until none has an effect: Advance those of the step, Settle all.
  void Advance(Prediction* prediction);
  void Settle(Prediction* prediction);
  void Decide(Prediction* prediction);

  const ModelOptions options_;
  std::array<Rank, kModelMaxRanks> ranks_;
  int faults_left_;

  std::uint64_t step_ = 1;
  bool started_ = false;
  Cause void_;
  unsigned submitted_ = 0;
  unsigned reduced_ = 0;

  std::uint64_t last_void_ = 0;
  std::uint64_t complete_ = 0;
  Cause end_;
  std::array<Cause, kModelMaxRanks> own_end_;  // for ranks that were lost
  int first_finished_ = -1;
  bool superseded_ = false;
  bool voiding_ = false;   // the executor has the words of the void step to write
  bool resuming_ = false;  // the executor has the words of the ranks that stay to write
  bool gone_ = false;
  bool end_sent_ = false;
};

}  // namespace gradsync::daemon

#endif  // TESTS_JOB_JOB_MODEL_H_
