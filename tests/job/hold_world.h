// A job with policy `hold`, its trainers and its reducer, for random schedules of their events.
//
// Gradients and states are real values. A gradient tells its rank, position and state. So the test
// notices a wrong average, and with it a wrong state (see model_state.h).

#ifndef TESTS_JOB_HOLD_WORLD_H_
#define TESTS_JOB_HOLD_WORLD_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "tests/job/halves_reducer.h"
#include "tests/job/manual_executor.h"
#include "tests/job/model_run.h"
#include "tests/job/model_trainer.h"
#include "tests/kit/manual_clock.h"

namespace gradsync::daemon {

// Where a trainer is when it dies.
enum class DeathPhase : std::uint8_t {
  kUnmarked,    // it has marked nothing in its step
  kMarked,      // it has marked some bucket, and no bucket is being reduced
  kInFlight,    // one of its buckets is being reduced
  kEnded,       // it has ended the step
  kCommitted,   // the step is complete, and it has not read the verdict
  kHealing,     // it came after a loss, and has no state yet
  kLoading,     // the same, and it is getting the state
  kConfirming,  // it has loaded the state, and is not admitted yet
  kSource,      // it is giving its state to another rank
  kCopying,     // it came after a loss, and an average is being copied to it
  kThrough,     // it has done the last step, and has not left
  kLeaving,     // it has left, and its session waits for the other ranks
};
inline constexpr int kDeathPhases = 12;
const char* NameOf(DeathPhase phase);
using Deaths = std::array<int, kDeathPhases>;

struct HoldWorldOptions {
  std::uint32_t ranks = 3;
  std::uint64_t steps = 3;
  StateSource source = StateSource::kTrainer;
  bool buffers = false;
  Faults faults;
  int barriers = 0;
  BarrierPlace barrier_place = BarrierPlace::kAnywhere;
};

// A trainer of such a world can die in this phase.
bool Possible(DeathPhase phase, const HoldWorldOptions& options);

// Not thread-safe.
class HoldWorld {
 public:
  // Memory that worlds with the same options use one after the other: to make it takes longer than
  // a run.
  using SpareMemory = std::vector<std::unique_ptr<TrainerMemory>>;
  // Returns when step 1 is complete. `deaths` counts the deaths of every phase. `deaths` and
  // `spare` outlive this.
  HoldWorld(const HoldWorldOptions& options, std::uint64_t seed, Deaths* deaths,
            SpareMemory* spare);
  ~HoldWorld();

  // Runs random events until every rank has done every step and has left. Returns the first
  // violation, with the last events before it; "" if there was none.
  std::string Run();

 private:
  struct Event {
    Action action;
    ModelTrainer* trainer = nullptr;  // null for kMove, kExecute, kStart
    std::size_t detail = 0;           // index of the reduction, or rank
  };

  void StartTrainer(std::uint32_t rank);
  // The session's rank waits for its next process.
  bool Awaited(const ModelTrainer& trainer) const;
  void FindEvents();
  bool MayDie(const ModelTrainer& trainer) const;
  // A reduction of one of the trainer's buckets, or a measurement of one of its copies.
  bool IsReduced(const ModelTrainer& trainer, bool measured) const;
  // An average is being copied to the trainer, or the copy is measured.
  bool IsCopiedTo(const ModelTrainer& trainer) const;
  DeathPhase PhaseOf(const ModelTrainer& trainer) const;
  void Do(const Event& event);
  // Replacements that have been admitted so far.
  std::size_t Admitted() const;
  // One has just been admitted: every survivor was compared with it.
  void CheckAdmission();
  // Does one of the events that may happen next. False if there is none, or after a violation.
  bool Step();
  void CheckEnd();
  std::string Describe(const Event& event) const;
  // What a message can change. A message of a lost session must change none of it.
  std::array<std::size_t, 4> Effects() const;

  ModelRun run_;
  Deaths* const deaths_;
  ManualClock clock_;
  HalvesReducer reducer_{&clock_};
  ManualExecutor executor_;
  std::vector<std::unique_ptr<ModelTrainer>> trainers_;  // all sessions
  std::vector<ModelTrainer*> present_;                   // by rank
  std::vector<Event> events_;                            // that may happen next
  std::vector<Action> actions_;                          // of one trainer
  std::deque<Event> past_;
};

}  // namespace gradsync::daemon

#endif  // TESTS_JOB_HOLD_WORLD_H_
