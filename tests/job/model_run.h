// What the trainers of a random schedule share.

#ifndef TESTS_JOB_MODEL_RUN_H_
#define TESTS_JOB_MODEL_RUN_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "daemon/job/job.h"
#include "daemon/job/layout_plan.h"
#include "tests/job/model_state.h"
#include "tests/job/trainer_memory.h"

namespace gradsync::daemon {

// One kind of event. Each event is atomic.
enum class Action : std::uint8_t {
  // The daemon's actions.
  kDeliver,  // it reads a message of a trainer
  kHear,     // it hears of a death
  kMove,     // the reducer reads or writes half a bucket
  kExecute,  // the executor does its oldest work
  kPass,     // half a minute passes
  // A process's actions.
  kStart,         // a rank's next process joins
  kDie,           // the process ends
  kReceive,       // its library reads a message of the daemon
  kRegister,      // it registers the layout
  kMap,           // it maps its memory
  kRecover,       // it reads the state that some rank has recorded
  kWrite,         // it writes half a bucket
  kMark,          // it marks its next bucket
  kAwaitBucket,   // it waits for a bucket before it ends the step
  kEnd,           // it ends the step
  kFinish,        // it marks the buckets that are left, and ends the step
  kAbandon,       // it abandons the step
  kBarrier,       // it calls a barrier, and does not wait for its end
  kVerdict,       // it reads a verdict
  kFetch,         // it asks for the state
  kFetchHastily,  // the same, but it does not wait for long
  kFetchAgain,    // it asks again before it has an answer
  kConfirmAgain,  // it sends its digests again
  kReadChunk,     // it copies a chunk of the state out
  kLoad,          // it loads the state, and tells what it has
  kLoadWrongly,   // the same, with an error
  kLoadBadly,     // it cannot load the state, and says so
  kOffer,         // its reader is the source
  kRefuse,        // its reader fails
  kBeSilent,      // its reader hangs
  kWriteChunk,    // its reader writes a chunk of the state
  kSendDigests,   // its reader tells what the process has
  kStopReading,   // its reader stops, because the transfer has ended
  kSave,          // it saves its work after the last step
  kLeave,         // it leaves
};
const char* NameOf(Action action);

// How many of each may still happen.
struct Faults {
  int deaths = 0;
  int abandons = 0;     // of steps
  int refusals = 0;     // of sources
  int silences = 0;     // of sources
  int wrong_loads = 0;  // of replacements
  int bad_loads = 0;    // of replacements, which notice it
  int hasty = 0;        // requests of replacements that give up soon, and then ask again
};

// Where the trainers' program calls barriers.
enum class BarrierPlace : std::uint8_t {
  kAnywhere,      // up to a number of them; the trainer goes on meanwhile
  kAfterEnd,      // one after each EndStep, before the verdict; the trainer waits for it
  kAfterVerdict,  // one after each complete step; the trainer waits for it
};

struct ModelRun {
  std::uint32_t ranks = 0;
  std::uint64_t steps = 0;  // complete ones, of each rank
  StateSource source = StateSource::kTrainer;
  bool buffers = false;  // the layout has a bucket for the model's buffers
  Faults faults;         // that are left
  BarrierPlace barrier_place = BarrierPlace::kAnywhere;
  int barriers = 0;  // kAnywhere: that trainers may still begin

  std::shared_ptr<Job> job;
  std::uint32_t channel = 0;
  LayoutPlan plan;
  std::vector<ModelState> states;  // of a run without faults; [n] is the state after n steps
  std::mt19937_64 random;

  // By step: what its verdict was, for the first rank that read it.
  std::map<std::uint64_t, bool> complete;
  // Steps that a trainer has abandoned, as the daemon knows.
  std::map<std::uint64_t, bool> abandoned;
  std::uint64_t last_barrier = 0;  // number of the last barrier that a trainer has called
  // By step: the state before it, as ranks have recorded it. With state_source=trainer a
  // replacement begins with it; with state_source=survivor its state is compared with it.
  std::map<std::uint64_t, ModelState> records;
  std::vector<std::unique_ptr<TrainerMemory>>* spare = nullptr;  // that trainers may take

  std::vector<bool> saved;  // by rank: it has saved its work after the last step

  std::string violation;  // the first one; "" if there was none

  std::size_t buckets() const { return plan.buckets.size(); }
  std::size_t Random(std::size_t options) { return random() % options; }
  void Violate(std::string what) {
    if (violation.empty()) violation = std::move(what);
  }
};

}  // namespace gradsync::daemon

#endif  // TESTS_JOB_MODEL_RUN_H_
