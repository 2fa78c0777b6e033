// A job with policy `hold`, its trainers and its reducer, for random schedules of their events.
//
// A gradient is a number that tells its rank, step, bucket, half and the state of the model from
// which it was computed. So a wrong sum shows: one with a term twice, without a term, of another
// step, or of a state that the other ranks do not have.

#ifndef TESTS_JOB_HOLD_WORLD_H_
#define TESTS_JOB_HOLD_WORLD_H_

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "daemon/job/job.h"
#include "tests/job/manual_executor.h"
#include "tests/job/recording_sink.h"
#include "tests/job/trainer_memory.h"
#include "tests/kit/manual_clock.h"

namespace gradsync::daemon {

// Where a trainer is when it dies.
enum class DeathPhase : std::uint8_t {
  kUnmarked,   // it has marked nothing in its step
  kMarked,     // it has marked some bucket, and no bucket is being reduced
  kInFlight,   // one of its buckets is being reduced
  kEnded,      // it has ended the step
  kCommitted,  // the step is complete, and it has not read the verdict
  kHealing,    // it came after a loss, and has no state yet
  kCopying,    // it came after a loss, and an average is being copied to it
};
inline constexpr int kDeathPhases = 7;
const char* NameOf(DeathPhase phase);

struct HoldWorldOptions {
  std::uint32_t ranks = 3;
  std::uint64_t steps = 3;
  int deaths = 2;
};

// Not thread-safe.
class HoldWorld {
 public:
  static constexpr int kBuckets = 2;
  static constexpr int kHalves = 2;  // elements of a bucket; read and written one by one

  // Step 1 is complete. `deaths` counts the deaths of every phase; it outlives this.
  HoldWorld(const HoldWorldOptions& options, std::uint64_t seed,
            std::array<int, kDeathPhases>* deaths);
  ~HoldWorld();

  // Runs random events until every rank has done every step. Returns the first violation, with the
  // last events before it; "" if there was none.
  std::string Run();

 private:
  // A process: one session of a rank.
  struct Trainer {
    RankSession session;
    std::shared_ptr<RecordingSink> sink;
    std::unique_ptr<TrainerMemory> memory;  // null until the layout is registered
    bool alive = true;
    bool known_lost = false;  // the job knows of its death
    bool healed = true;       // it has the state of `step`
    std::uint64_t step = 0;   // 0: not told yet
    std::uint64_t state = 0;
    // In its step.
    int first = 0;    // the bucket that it computes first
    int written = 0;  // halves, in the order of computation
    int marked = 0;   // buckets
    bool ended = false;
    // What it has sent and the daemon has not read.
    std::deque<std::function<absl::Status()>> sent;
  };
  // Moves one element at a time.
  class HalvesReducer final : public Reducer {
   public:
    struct Held {
      ReduceOperation* operation;
      int moves = 0;  // reads of the halves, then writes
      std::array<double, kHalves> sums{};
    };
    void Reduce(ReduceOperation* operation) override { held.push_back({operation}); }
    std::vector<Held> held;
  };
  struct Event {
    std::string name;
    std::function<void()> run;
    bool of_daemon = false;  // it may write to arenas
  };

  static double Term(std::uint32_t rank, std::uint64_t step, std::uint64_t state, int bucket,
                     int half);
  void Violate(const std::string& what);
  double* At(const Trainer& trainer, int bucket) const;
  // The bucket that the trainer computes as its `index`-th.
  int BucketOf(const Trainer& trainer, int index) const {
    return index == 0 ? trainer.first : 1 - trainer.first;
  }
  bool HasMarked(const Trainer& trainer, int bucket) const;
  // Only the trainer may write to the bucket now.
  bool Owns(const Trainer& trainer, int bucket) const;

  void StartTrainer(std::uint32_t rank, std::uint64_t incarnation);
  void Register(Trainer* trainer);
  std::vector<Event> Enabled();
  void AddEventsOf(Trainer* trainer, std::vector<Event>* events);
  void AddDeath(Trainer* trainer, std::vector<Event>* events);
  bool MayDie(const Trainer& trainer) const;
  // An average is being copied to the trainer.
  bool IsCopiedTo(const Trainer& trainer) const;
  DeathPhase PhaseOf(const Trainer& trainer) const;
  void MoveHalf(std::size_t index);
  void ReadMessages(Trainer* trainer);
  void ReadVerdict(Trainer* trainer, const StepRecord& record);
  void RunChecked(const Event& event);
  void CheckEnd();

  const HoldWorldOptions options_;
  std::mt19937_64 random_;
  std::array<int, kDeathPhases>* const deaths_;
  ManualClock clock_;
  HalvesReducer reducer_;
  ManualExecutor executor_;
  std::shared_ptr<Job> job_;
  std::uint32_t channel_ = 0;
  LayoutPlan plan_;
  std::vector<std::unique_ptr<Trainer>> trainers_;  // all sessions
  std::vector<Trainer*> present_;                   // by rank
  std::uint64_t incarnations_ = 0;
  int deaths_left_;
  std::deque<std::string> past_;
  std::string violation_;
};

}  // namespace gradsync::daemon

#endif  // TESTS_JOB_HOLD_WORLD_H_
