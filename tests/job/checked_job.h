// Drives a real job and its model event by event, and compares them after each event.

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
#include "tests/job/manual_executor.h"
#include "tests/job/recording_sink.h"
#include "tests/job/trainer_memory.h"
#include "tests/kit/manual_clock.h"

namespace gradsync::daemon {

// The trainers' memory is reused for many schedules: creating it costs more than a schedule.
using ModelMemory = std::vector<std::unique_ptr<TrainerMemory>>;
ModelMemory MakeModelMemory();

class CheckedJob {
 public:
  // A job whose ranks have all joined and agreed on their layout. No other job uses `memory` while
  // this object lives.
  CheckedJob(const ModelOptions& options, ModelMemory* memory);
  ~CheckedJob();

  const JobModel& model() const { return model_; }

  // Applies `event` to the job and to the model, and compares them.
  void Apply(const Event& event);
  // As Apply, without the comparison, for a prefix that an earlier schedule has compared.
  void Replay(const Event& event);
  // Called when no event can happen any more. In an ended job, further messages must be ignored;
  // otherwise all ranks leave. Then checks that no memory is still shared.
  void Finish();

  // The first difference that was found; empty if there is none.
  const std::string& violation() const { return violation_; }

 private:
  using Values = std::vector<double>;

  template <typename... Args>
  void Violate(const Args&... what);

  // Every rank joins, and they agree on their layout.
  void Form();

  // Applies the event to the job alone. Returns the job's answer to the rank.
  absl::Status Happen(const Event& event);
  absl::Status Send(const Event& event);
  // Applies the event to the model alone.
  Prediction Predict(const Event& event);
  absl::Status SendBreach(std::uint32_t rank, Breach breach);
  // The trainer writes its gradients of a bucket.
  void Write(std::uint32_t rank, std::uint32_t bucket, std::uint64_t step);
  // From now on, expects in this bucket the average over the ranks that take part in steps.
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
  // Checks the shared memory at the moment when a message to the rank is queued.
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
  // The expected content of each rank's buckets.
  std::array<std::array<Values, kModelBuckets>, kModelMaxRanks> content_;
  // The record of the last decided step; every rank must get the same object.
  const StepRecord* record_ = nullptr;
  std::uint64_t record_step_ = 0;
  std::uint64_t buckets_reduced_ = 0;
  std::string violation_;
};

}  // namespace gradsync::daemon

#endif  // TESTS_JOB_CHECKED_JOB_H_
