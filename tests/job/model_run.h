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

namespace gradsync::daemon {

// One kind of event. Each event is atomic.
enum class Action : std::uint8_t {
  // Of the daemon.
  kDeliver,  // it reads a message of a trainer
  kHear,     // it hears of a death
  kMove,     // the reducer reads or writes half a bucket
  kExecute,  // the executor does its oldest work
  // Of a process.
  kStart,     // a rank's next process joins
  kDie,       // the process ends
  kReceive,   // its library reads a message of the daemon
  kRegister,  // it registers the layout
  kMap,       // it maps its memory
  kRecover,   // it reads the state that some rank has recorded
  kWrite,     // it writes half a bucket
  kMark,      // it marks its next bucket
  kEnd,       // it ends the step
  kFinish,    // it marks the buckets that are left, and ends the step
  kAbandon,   // it abandons the step
  kVerdict,   // it reads a verdict
  kSave,      // it saves its work after the last step
  kLeave,     // it leaves
};
const char* NameOf(Action action);

struct ModelRun {
  std::uint32_t ranks = 0;
  std::uint64_t steps = 0;  // complete ones, of each rank
  // Faults that are left.
  int deaths = 0;
  int abandons = 0;

  std::shared_ptr<Job> job;
  std::uint32_t channel = 0;
  LayoutPlan plan;
  std::vector<ModelState> states;  // of a run without faults; [n] is the state after n steps
  std::mt19937_64 random;

  // By step: what its verdict was, for the first rank that read it.
  std::map<std::uint64_t, bool> complete;
  // Steps that a trainer has abandoned, as the daemon knows.
  std::map<std::uint64_t, bool> abandoned;
  // With state_source=trainer: the state before a step, as ranks have recorded it.
  std::map<std::uint64_t, ModelState> records;
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
