// A real job, driven event by event beside its model, and compared with it after each.

#ifndef TESTS_JOB_CHECKED_JOB_H_
#define TESTS_JOB_CHECKED_JOB_H_

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "daemon/job/job_table.h"
#include "tests/job/held_reducer.h"
#include "tests/job/job_model.h"
#include "tests/job/manual_clock.h"
#include "tests/job/manual_executor.h"
#include "tests/job/recording_sink.h"
#include "tests/job/trainer_memory.h"

namespace gradsync {

// The trainers' memory outlives the jobs of many schedules: to make it anew for each would cost
// more than the schedule.
using ModelMemory = std::vector<std::unique_ptr<TrainerMemory>>;
ModelMemory MakeModelMemory();

class CheckedJob {
 public:
  // A job whose ranks have all joined and agreed on their layout. `memory` is nobody else's while
  // this lives.
  CheckedJob(const ModelOptions& options, ModelMemory* memory);
  ~CheckedJob();

  const JobModel& model() const { return model_; }

  // Lets `event` happen, in the job and in the model, and compares them.
  void Apply(const Event& event);
  // The same without the comparison, for what has been compared in another schedule.
  void Replay(const Event& event);
  // To be called when nothing can happen any more: whatever each trainer could still say is
  // ignored, or they all leave; nothing is left behind.
  void Finish();

  // What is wrong, the first thing only; empty so far.
  const std::string& violation() const { return violation_; }

 private:
  using Values = std::vector<double>;

  template <typename... Args>
  void Violate(const Args&... what);

  // Every rank joins, and they agree on their layout.
  void Form();

  // In the job alone; what it answers the rank.
  absl::Status Happen(const Event& event);
  absl::Status Send(const Event& event);
  // In the model alone.
  Prediction Predict(const Event& event);
  absl::Status SendBreach(std::uint32_t rank, Breach breach);
  // The trainer writes its gradients of a bucket.
  void Write(std::uint32_t rank, std::uint32_t bucket, std::uint64_t step);
  // The bucket must hold the average of all ranks in steps from now on.
  void Average(int bucket);
  // The held reduction of a bucket, or null.
  ReduceOperation* Held(int bucket) const;

  void CompareStatus(absl::string_view where, const Cause& expected, const absl::Status& actual);
  void CompareSubmissions(unsigned predicted, std::size_t submitted);
  void CompareMessages(const Prediction& prediction);
  void CompareMessage(const Prediction::Message& expected, const SessionMessage& actual);
  void CompareRecord(absl::string_view where, const Prediction::Message& expected,
                     const StepRecord& record);
  void CompareMemory();
  // What holds at the moment when a rank is told something.
  void OnMessage(std::uint32_t rank, const SessionMessage& message);
  void FinishEnded();
  void FinishThrough();

  const ModelOptions options_;
  ModelMemory& memory_;
  JobModel model_;
  ManualClock clock_;
  HeldReducer reducer_;
  ManualExecutor executor_;
  JobTable table_;
  std::shared_ptr<Job> job_;
  std::shared_ptr<Job> successor_;
  std::uint32_t channel_ = 0;
  LayoutPlan plan_;
  std::vector<std::shared_ptr<RecordingSink>> sinks_;
  // What each rank's buckets must hold.
  std::array<std::array<Values, kModelBuckets>, kModelMaxRanks> content_;
  // Of the step that was decided last: the same object for every rank.
  const StepRecord* record_ = nullptr;
  std::uint64_t record_step_ = 0;
  std::uint64_t buckets_reduced_ = 0;
  std::string violation_;
};

}  // namespace gradsync

#endif  // TESTS_JOB_CHECKED_JOB_H_
