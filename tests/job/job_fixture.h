// A job whose ranks, reducer, executor and clock are controlled by the test.

#ifndef TESTS_JOB_JOB_FIXTURE_H_
#define TESTS_JOB_JOB_FIXTURE_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "daemon/base/error.h"
#include "daemon/job/job.h"
#include "tests/job/held_reducer.h"
#include "tests/job/manual_executor.h"
#include "tests/job/recording_sink.h"
#include "tests/job/trainer_memory.h"
#include "tests/kit/manual_clock.h"

namespace gradsync::daemon {

// True if the message of `status` contains `part`. Use: EXPECT_TRUE(Says(...)) << status.
inline bool Says(const absl::Status& status, absl::string_view part) {
  return absl::StrContains(status.message(), part);
}
inline std::string ReasonOf(const absl::Status& status) { return DetailsOf(status).reason; }
// The value of a field of the error; "(none)" if it has no such field.
std::string FieldOf(const absl::Status& status, absl::string_view key);

class JobFixture : public testing::Test {
 protected:
  static constexpr std::uint64_t kStepTimeoutNs = 1'000'000;
  static constexpr std::uint64_t kForever = ~std::uint64_t{0};

  // Makes a job of `ranks` ranks. All but the last `absent` ones join it.
  void Start(std::uint32_t ranks, bool divide_by_world = false,
             std::uint64_t step_timeout_ns = kStepTimeoutNs, std::uint32_t absent = 0);
  // A layout of `buckets` buckets with four float32 each, one parameter per bucket.
  static LayoutSpec Spec(std::size_t buckets, const std::string& name = "model");
  static LayoutRequest Request(LayoutSpec spec, std::uint64_t deadline_ns = kForever);
  // Every rank registers and maps `spec`. Removes the messages of the agreement.
  std::uint32_t Agree(const LayoutSpec& spec);
  // Registers `spec`, which must succeed, and allocates the rank's memory.
  std::uint32_t Register(std::uint32_t rank, const LayoutSpec& spec, std::uint32_t replaces = 0);
  absl::Status Map(std::uint32_t rank, std::uint32_t channel);

  // Marks all buckets of a layout ready and ends the step.
  void DoStep(std::uint32_t rank, std::uint32_t channel, std::uint64_t step,
              absl::string_view used_map = "");

  void Lose(std::uint32_t rank) {
    job_->Lose(Of(rank), MakeError(absl::StatusCode::kAborted, reason::kProcessEnded,
                                   "its process has ended"));
  }
  static std::uint64_t Incarnation(std::uint32_t rank) { return 100 + rank; }
  // The rank's present session.
  RankSession Of(std::uint32_t rank) {
    return {rank, Incarnation(rank) + 1000 * std::uint64_t{rejoined_[rank]}};
  }
  // A new session joins in place of the rank's lost one. It begins with an empty sink.
  absl::Status Rejoin(std::uint32_t rank);
  RecordingSink& sink(std::uint32_t rank) { return *sinks_[rank]; }
  // The message of this kind since the last Take(). Fails the test unless there is exactly one.
  template <typename Message>
  Message Only(std::uint32_t rank) {
    const std::vector<Message> found = sink(rank).Of<Message>();
    EXPECT_EQ(found.size(), 1u) << "rank " << rank;
    return found.empty() ? Message{} : found.back();
  }
  void TakeAll() {
    for (const auto& sink : sinks_) sink->Take();
  }
  TrainerMemory& memory(std::uint32_t rank, std::uint32_t channel) {
    return *memory_[channel - 1][rank];
  }

  JobOptions options_;                               // for Start(), which sets two of them
  std::map<std::uint32_t, std::uint32_t> rejoined_;  // by rank: how often
  ManualClock clock_;
  HeldReducer reducer_{&clock_};
  ManualExecutor executor_;
  std::shared_ptr<Job> job_;
  std::vector<std::shared_ptr<RecordingSink>> sinks_;
  std::vector<std::vector<std::unique_ptr<TrainerMemory>>> memory_;  // by channel, by rank
  std::vector<std::size_t> buckets_;                                 // by channel
  std::vector<std::string> logged_;                                  // about late ranks
  // RecordingSink's `on_message`, for the sinks that Start() makes. Null: nothing is called.
  std::function<void(const SessionMessage&)> on_message_;
};

}  // namespace gradsync::daemon

#endif  // TESTS_JOB_JOB_FIXTURE_H_
