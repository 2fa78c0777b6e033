#include "tests/job/checked_job.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kStepTimeoutNs = 1'000'000;
constexpr std::uint32_t kNoSuchChannel = 7;

// Two buckets of different types, and one parameter per rank, so that each rank can report another
// one as used. Buckets fill in reverse order of registration: bucket 0 holds c, bucket 1 holds b
// and a.
LayoutSpec Spec() {
  LayoutSpec spec;
  spec.name = "model";
  spec.parameters = {{"a", {3}, DataType::kFloat32},
                     {"b", {2}, DataType::kFloat32},
                     {"c", {2}, DataType::kFloat64}};
  return spec;
}

JobEnvironment Environment(const ModelOptions& options, const Clock* clock, Reducer* reducer,
                           UserExecutor* executor) {
  JobEnvironment environment;
  environment.clock = clock;
  environment.reducer = reducer;
  environment.executor = executor;
  if (options.words_later) environment.signalled_at_once = 0;
  return environment;
}

std::uint64_t Incarnation(std::uint32_t rank) { return 100 + rank; }
RankSession Of(std::uint32_t rank) { return {rank, Incarnation(rank)}; }

// A value that identifies rank, bucket, step and place. Sums over a few ranks are exact.
double Gradient(std::uint32_t rank, std::uint32_t bucket, std::uint64_t step, std::size_t place) {
  return static_cast<double>((rank + 1) * 1000 + bucket * 500 + step * 100 + place);
}

// Each rank uses one parameter, a different one in each step.
std::string UsedMapOf(std::uint32_t rank, std::uint64_t step) {
  return std::string(1, static_cast<char>(1u << (rank + step) % kModelMaxRanks));
}

std::string FieldOf(const ErrorDetails& details, absl::string_view key) {
  for (const auto& [name, value] : details.fields) {
    if (name == key) return value;
  }
  return "";
}

}  // namespace

ModelMemory MakeModelMemory() {
  const auto plan = PlanLayout(Spec(), kModelBuckets);
  ModelMemory memory;
  for (int rank = 0; rank < kModelMaxRanks; ++rank) {
    memory.push_back(std::make_unique<TrainerMemory>(plan->arena_bytes, plan->buckets.size()));
  }
  return memory;
}

CheckedJob::CheckedJob(const ModelOptions& options, ModelMemory* memory)
    : options_(options),
      memory_(*memory),
      model_(options),
      reducer_(&clock_, options.reduce_at_once),
      table_(Environment(options, &clock_, &reducer_, &executor_), /*quota_jobs_per_user=*/2) {
  Form();
}

void CheckedJob::Form() {
  const std::uint32_t ranks = static_cast<std::uint32_t>(options_.ranks);
  JobOptions job_options;
  job_options.divide_by_world = options_.divide_by_world;
  job_options.step_timeout_ns = kStepTimeoutNs;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    sinks_.push_back(std::make_shared<RecordingSink>(
        [this, rank](const SessionMessage& message) { OnMessage(rank, message); }));
    auto joined =
        table_.Join({1000, "job", ""}, rank, ranks, job_options, Incarnation(rank), sinks_[rank]);
    if (!joined.ok()) return Violate("join: ", joined.status().ToString());
    job_ = *std::move(joined);
  }
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    LayoutRequest request;
    request.request_id = rank;
    request.spec = Spec();
    request.deadline_ns = clock_.NowNs() + 1;
    request.bucket_done_messages = rank % 2 == 0;
    auto registration = job_->RegisterLayout(Of(rank), std::move(request));
    if (!registration.ok()) return Violate("register: ", registration.status().ToString());
    channel_ = registration->channel;
    plan_ = std::move(registration->plan);
  }
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    if (memory_[rank]->Shared()) return Violate("the last schedule's job still holds memory");
    memory_[rank]->Reset();
    for (int bucket = 0; bucket < kModelBuckets; ++bucket) {
      content_[rank][bucket].resize(plan_.buckets[bucket].count);
    }
    const absl::Status mapped = job_->ArenaMapped(Of(rank), channel_, memory_[rank]->Share());
    if (!mapped.ok()) return Violate("map: ", mapped.ToString());
  }
  for (const auto& sink : sinks_) {
    const std::vector<SessionMessage> messages = sink->Take();
    if (messages.size() != 1 || !std::holds_alternative<LayoutReadyMessage>(messages[0])) {
      return Violate("the layout is not ready");
    }
  }
}

CheckedJob::~CheckedJob() = default;

template <typename... Args>
void CheckedJob::Violate(const Args&... what) {
  if (violation_.empty()) violation_ = absl::StrCat(what...);
}

ReduceOperation* CheckedJob::Held(int bucket) const {
  for (ReduceOperation* operation : reducer_.held()) {
    if (operation->dtype == plan_.buckets[bucket].dtype) return operation;
  }
  return nullptr;
}

// ---- Events -------------------------------------------------------------------------------------

void CheckedJob::Write(std::uint32_t rank, std::uint32_t bucket, std::uint64_t step) {
  const PlannedBucket& planned = plan_.buckets[bucket];
  Values& values = content_[rank][bucket];
  for (std::size_t i = 0; i < planned.count; ++i) {
    values[i] = Gradient(rank, bucket, step, i);
    if (planned.dtype == DataType::kFloat64) {
      memory_[rank]->At<double>(planned.offset)[i] = values[i];
    } else {
      memory_[rank]->At<float>(planned.offset)[i] = static_cast<float>(values[i]);
    }
  }
}

absl::Status CheckedJob::SendBreach(std::uint32_t rank, Breach breach) {
  const std::uint64_t step = model_.Belief(static_cast<int>(rank));
  const auto ready = [&](std::uint64_t at, std::uint32_t bucket) {
    return job_->MarkReady(Of(rank), channel_, at, {bucket});
  };
  switch (breach) {
    case Breach::kSecondReady:
      return ready(step, model_.FirstMarked(static_cast<int>(rank)));
    case Breach::kUnknownBucket:
      return ready(step, kModelBuckets);
    case Breach::kUnknownChannel:
      return job_->MarkReady(Of(rank), kNoSuchChannel, step, {0});
    case Breach::kStaleReady:
      return ready(step - 1, 0);
    case Breach::kStepZero:
      return ready(0, 0);
    case Breach::kReadyAhead:
      return ready(step + 1, 0);
    case Breach::kEndAhead:
      return job_->EndStep(Of(rank), channel_, step + 1, "");
    case Breach::kEndWithUnmarked:
    case Breach::kEndAfterEnd:
      return job_->EndStep(Of(rank), channel_, step, "");
    case Breach::kReadyAfterEnd:
      return ready(step, 0);
    case Breach::kAbandonAfterEnd:
      return job_->AbandonStep(Of(rank), channel_, step, "too late");
    case Breach::kLeaveInStep:
      return job_->Leave(Of(rank), /*exit=*/true);
    case Breach::kUseReleased:
      return ready(step, 0);
    case Breach::kReleaseTwice:
      return job_->ReleaseLayout(Of(rank), channel_);
    case Breach::kStayTwice:
      return job_->Leave(Of(rank), /*exit=*/false);
  }
  return absl::OkStatus();
}

absl::Status CheckedJob::Send(const Event& event) {
  const std::uint32_t rank = event.rank;
  const std::uint64_t step = model_.Belief(event.rank);
  switch (event.action) {
    case Action::kReady:
      Write(rank, event.detail, step);
      return job_->MarkReady(Of(rank), channel_, step, {event.detail});
    case Action::kReadyAll:
      for (std::uint32_t bucket = 0; bucket < kModelBuckets; ++bucket) Write(rank, bucket, step);
      return job_->MarkReady(Of(rank), channel_, step, {0, 1});
    case Action::kEndStep:
      return job_->EndStep(Of(rank), channel_, step, UsedMapOf(rank, step));
    case Action::kReadVerdict:
      return absl::OkStatus();
    case Action::kReduced: {
      ReduceOperation* const operation = Held(event.detail);
      if (operation == nullptr) {
        Violate("bucket ", event.detail, " is not being reduced");
      } else {
        reducer_.Complete(operation);
      }
      return absl::OkStatus();
    }
    case Action::kWords:
      executor_.RunAll();
      return absl::OkStatus();
    case Action::kAbandon:
      return job_->AbandonStep(Of(rank), channel_, step, "out of memory");
    case Action::kLose:
      // The loss is reported in both ways in which a daemon notices it; the first report counts.
      job_->Lose(Of(rank),
                 MakeError(absl::StatusCode::kAborted,
                           model_.Lost(event.rank) ? reason::kStreamEnded : reason::kProcessEnded,
                           "its process has ended"));
      return absl::OkStatus();
    case Action::kLeave:
      return job_->Leave(Of(rank), event.detail != 0);
    case Action::kFinish:
      return job_->Finish(Of(rank));
    case Action::kRelease:
      return job_->ReleaseLayout(Of(rank), channel_);
    case Action::kDeadline:
      clock_.Advance(kStepTimeoutNs);
      table_.Tick();
      return absl::OkStatus();
    case Action::kSupersede: {
      const auto next = table_.Join({1000, "job", ""}, 0, 1, {}, Incarnation(kModelMaxRanks),
                                    std::make_shared<RecordingSink>());
      if (!next.ok()) {
        Violate("the next generation: ", next.status().ToString());
      } else if ((*next)->identity().generation != 2 || *next == job_) {
        Violate("the job continues instead of a new generation");
      } else {
        successor_ = *next;
      }
      return absl::OkStatus();
    }
    case Action::kDrain:
      job_->EndIfIdle(MakeError(absl::StatusCode::kUnavailable, reason::kDraining, "drains"));
      return absl::OkStatus();
    case Action::kBreach:
      return SendBreach(rank, static_cast<Breach>(event.detail));
  }
  return absl::OkStatus();
}

void CheckedJob::Apply(const Event& event) {
  const std::size_t submitted_before = reducer_.submitted();
  const absl::Status answer = Happen(event);
  const Prediction prediction = Predict(event);
  CompareStatus("the answer", prediction.answer, answer);
  CompareSubmissions(prediction.submitted, reducer_.submitted() - submitted_before);
  CompareMessages(prediction);
  CompareMemory();
  if (job_->HasEnded() != model_.ended()) {
    Violate("the job has ", job_->HasEnded() ? "" : "not ", "ended");
  }
}

void CheckedJob::Replay(const Event& event) {
  Happen(event).IgnoreError();
  Predict(event);
  for (const auto& sink : sinks_) sink->Take();
}

absl::Status CheckedJob::Happen(const Event& event) {
  clock_.Advance(1);
  absl::Status answer = Send(event);
  // After a refused message, the session layer ends the rank's session with the same error.
  if (!answer.ok()) job_->Lose(Of(event.rank), answer);
  return answer;
}

Prediction CheckedJob::Predict(const Event& event) {
  Prediction prediction = model_.Apply(event);
  unsigned reduced = event.action == Action::kReduced ? 1u << event.detail : 0u;
  if (options_.reduce_at_once) reduced |= prediction.submitted;
  for (int bucket = 0; bucket < kModelBuckets; ++bucket) {
    if ((reduced >> bucket & 1u) != 0) Average(bucket);
  }
  return prediction;
}

void CheckedJob::Average(int bucket) {
  const double scale = 1.0 / model_.divisor();
  std::vector<float> floats;
  std::vector<double> doubles;
  for (std::size_t i = 0; i < plan_.buckets[bucket].count; ++i) {
    floats.clear();
    doubles.clear();
    for (int rank = 0; rank < options_.ranks; ++rank) {
      if (!model_.IsAwaited(rank)) continue;
      doubles.push_back(content_[rank][bucket][i]);
      floats.push_back(static_cast<float>(doubles.back()));
    }
    const double average = plan_.buckets[bucket].dtype == DataType::kFloat64
                               ? HeldReducer::Combined(doubles, scale)
                               : HeldReducer::Combined(floats, scale);
    for (int rank = 0; rank < options_.ranks; ++rank) {
      if (model_.IsAwaited(rank)) content_[rank][bucket][i] = average;
    }
  }
  ++buckets_reduced_;
}

// ---- Comparing ----------------------------------------------------------------------------------

void CheckedJob::CompareStatus(absl::string_view where, const Cause& expected,
                               const absl::Status& actual) {
  if (actual.code() != expected.code) {
    return Violate(where, ": ", actual.ToString(), " instead of ",
                   absl::StatusCodeToString(expected.code), " ", expected.reason);
  }
  if (expected.ok()) return;
  const ErrorDetails details = DetailsOf(actual);
  if (details.reason != expected.reason) {
    Violate(where, ": reason ", details.reason, " instead of ", expected.reason);
  }
  const auto compare = [&](absl::string_view key, const std::string& value) {
    const std::string named = FieldOf(details, key);
    if (named != value) Violate(where, ": names ", key, " '", named, "' instead of '", value, "'");
  };
  if (expected.rank >= 0) compare("rank", absl::StrCat(expected.rank));
  if (expected.step > 0) compare("step", absl::StrCat(expected.step));
  if (expected.bucket >= 0) compare("bucket", absl::StrCat(expected.bucket));
  if (expected.bucket == Cause::kNoBucket) compare("bucket", "");
}

void CheckedJob::CompareSubmissions(unsigned predicted, std::size_t submitted) {
  std::size_t count = 0;
  for (int bucket = 0; bucket < kModelBuckets; ++bucket) {
    if ((predicted >> bucket & 1u) == 0) continue;
    ++count;
    if (options_.reduce_at_once) continue;  // CompareMemory checks the result
    const ReduceOperation* const operation = Held(bucket);
    if (operation == nullptr) return Violate("bucket ", bucket, " is ready, but not reduced");
    std::vector<std::byte*> buffers;
    for (int rank = 0; rank < options_.ranks; ++rank) {
      if (!model_.IsAwaited(rank)) continue;
      buffers.push_back(memory_[rank]->At<std::byte>(plan_.buckets[bucket].offset));
    }
    if (!std::equal(buffers.begin(), buffers.end(), operation->host().buffers.begin(),
                    operation->host().buffers.end())) {
      Violate("bucket ", bucket, " is not reduced over the ranks in steps, in their order");
    }
    if (operation->count != plan_.buckets[bucket].count)
      Violate("bucket ", bucket, " is not reduced in full");
    if (operation->scale != 1.0 / model_.divisor()) {
      Violate("bucket ", bucket, " is scaled by ", operation->scale);
    }
  }
  if (submitted != count) Violate(submitted, " reductions began instead of ", count);
}

void CheckedJob::CompareMessages(const Prediction& prediction) {
  for (int rank = 0; rank < options_.ranks; ++rank) {
    if (!sinks_[rank]->AllFlushed()) Violate("a message to rank ", rank, " was not flushed");
    const std::vector<SessionMessage> actual = sinks_[rank]->Take();
    std::size_t next = 0;
    for (const Prediction::Message& expected : prediction.messages) {
      if (expected.rank != rank) continue;
      if (next == actual.size()) {
        return Violate("rank ", rank, " does not receive ", Describe(expected));
      }
      CompareMessage(expected, actual[next++]);
    }
    if (next < actual.size()) {
      return Violate("rank ", rank, " receives an unexpected message: variant ",
                     actual[next].index());
    }
  }
}

void CheckedJob::CompareMessage(const Prediction::Message& expected, const SessionMessage& actual) {
  const std::string where = absl::StrCat("rank ", expected.rank, " receives ", Describe(expected));
  switch (expected.kind) {
    case Prediction::Kind::kBucketDone: {
      const auto* done = std::get_if<BucketDoneMessage>(&actual);
      if (done == nullptr || done->channel != channel_ || done->step != expected.step ||
          done->bucket != static_cast<std::uint32_t>(expected.bucket)) {
        Violate(where, ": the message differs");
      }
      return;
    }
    case Prediction::Kind::kStepDone: {
      const auto* done = std::get_if<StepDoneMessage>(&actual);
      if (done == nullptr || done->channel != channel_)
        return Violate(where, ": the message differs");
      CompareRecord(where, expected, *done->record);
      if (record_step_ != expected.step) {
        record_step_ = expected.step;
        record_ = done->record.get();
      }
      if (record_ != done->record.get())
        Violate(where, ": its record is not that of the other ranks");
      return;
    }
    case Prediction::Kind::kLeaveDone: {
      const auto* done = std::get_if<LeaveDoneMessage>(&actual);
      if (done == nullptr || done->last_to_leave != static_cast<std::uint32_t>(expected.bucket) ||
          done->next_sequence != 1) {
        return Violate(where, ": the message differs");
      }
      if (model_.layout_gone()) {
        if (!done->next_steps.empty()) Violate(where, ": it has steps of a released layout");
      } else if (done->next_steps.size() != 1 || done->next_steps[0].channel != channel_ ||
                 done->next_steps[0].step != expected.step) {
        Violate(where, ": the steps differ");
      }
      return;
    }
    case Prediction::Kind::kSessionEnd: {
      const auto* end = std::get_if<SessionEndMessage>(&actual);
      if (end == nullptr) return Violate(where, ": the message differs");
      CompareStatus(where, expected.cause, end->status);
      return;
    }
  }
}

void CheckedJob::CompareRecord(absl::string_view where, const Prediction::Message& expected,
                               const StepRecord& record) {
  CompareStatus(where, expected.cause, record.verdict);
  if (record.times.step != expected.step) Violate(where, ": step ", record.times.step);
  if (record.times.complete != expected.cause.ok())
    Violate(where, ": the record has the wrong verdict");
  std::string used;
  for (std::uint32_t rank = 0; record.verdict.ok() && rank < sinks_.size(); ++rank) {
    if (!model_.IsAwaited(static_cast<int>(rank))) continue;
    used.resize(1);
    used[0] = static_cast<char>(used[0] | UsedMapOf(rank, expected.step)[0]);
  }
  if (record.used_map != used) Violate(where, ": the wrong used_map");
  if (record.live_ranks != static_cast<std::uint32_t>(expected.live_ranks)) {
    Violate(where, ": ", record.live_ranks, " live ranks");
  }
  if (record.divisor != static_cast<std::uint32_t>(expected.divisor)) {
    Violate(where, ": divisor ", record.divisor);
  }
  const std::size_t measured = record.verdict.ok() ? record.times.buckets.size() : 0;
  if (record.stats.size() != measured) {
    Violate(where, ": stats of ", record.stats.size(), " buckets");
  }
  for (const BucketTimes& times : record.times.buckets) {
    const bool reduced = times.finish_ns != 0;
    if (record.verdict.ok() && !reduced) Violate(where, ": complete, but a bucket is not reduced");
    if (times.start_ns > times.finish_ns) Violate(where, ": a reduction ends before it begins");
    for (int rank = 0; rank < options_.ranks; ++rank) {
      if (reduced && (times.ready_ns[rank] != 0) != model_.IsAwaited(rank)) {
        Violate(where, ": reduced over other ranks than those that were ready");
      }
      if (reduced && times.ready_ns[rank] > times.start_ns) {
        Violate(where, ": reduced before every rank was ready");
      }
    }
  }
}

void CheckedJob::CompareMemory() {
  for (int rank = 0; rank < options_.ranks; ++rank) {
    for (int bucket = 0; bucket < kModelBuckets; ++bucket) {
      const PlannedBucket& planned = plan_.buckets[bucket];
      const Values& values = content_[rank][bucket];
      for (std::size_t i = 0; i < planned.count; ++i) {
        const double actual = planned.dtype == DataType::kFloat64
                                  ? memory_[rank]->At<double>(planned.offset)[i]
                                  : memory_[rank]->At<float>(planned.offset)[i];
        if (actual != values[i]) {
          return Violate("rank ", rank, ", bucket ", bucket, " holds ", actual, " instead of ",
                         values[i], " at ", i);
        }
      }
      if (!model_.IsAwaited(rank) || model_.Released(rank)) continue;
      const bool done = (model_.reduced() >> bucket & 1u) != 0;
      const std::uint64_t word = done ? model_.step() : model_.step() - 1;
      if (memory_[rank]->done(bucket) != word) {
        Violate("rank ", rank, ", bucket ", bucket, ": the done word is ",
                memory_[rank]->done(bucket), " instead of ", word);
      }
    }
    if (model_.Released(rank)) continue;
    if (model_.IsAwaited(rank) && memory_[rank]->void_step() != model_.last_void_step()) {
      Violate("rank ", rank, ": void_step is ", memory_[rank]->void_step(), " instead of ",
              model_.last_void_step());
    }
  }
}

void CheckedJob::OnMessage(std::uint32_t rank, const SessionMessage& message) {
  const TrainerMemory& memory = *memory_[rank];
  const auto untouched = [&](absl::string_view message_name) {
    if (reducer_.Touches(memory.data(), memory.bytes())) {
      Violate("rank ", rank, " receives ", message_name, " while a reduction touches its memory");
    }
  };
  if (std::holds_alternative<SessionEndMessage>(message)) untouched("its end");
  const auto* const done = std::get_if<StepDoneMessage>(&message);
  if (done == nullptr) return;
  untouched("the verdict");
  if (model_.Released(static_cast<int>(rank))) return;  // its memory may be freed
  const std::uint64_t step = done->record->times.step;
  for (int bucket = 0; bucket < kModelBuckets; ++bucket) {
    if (memory.done(bucket) != step) {
      Violate("rank ", rank, " receives the verdict of step ", step, " when bucket ", bucket,
              "'s done word is ", memory.done(bucket));
    }
  }
  if (!done->record->verdict.ok() && memory.void_step() != step) {
    Violate("rank ", rank, " learns that step ", step, " is void when void_step is ",
            memory.void_step());
  }
}

// ---- The end ------------------------------------------------------------------------------------

void CheckedJob::Finish() {
  if (!reducer_.held().empty()) Violate("a reduction is still running");
  if (model_.end_sent()) {
    FinishEnded();
  } else {
    FinishThrough();
  }
  if (!violation_.empty()) return;

  // Ranks that stayed may have been the last to leave for good. Their words are still to be
  // written.
  if (options_.words_later) executor_.RunAll();
  if (!job_->Empty()) Violate("the job has not ended");
  executor_.RunAll();  // frees the memory
  for (int rank = 0; rank < options_.ranks; ++rank) {
    if (memory_[rank]->Shared()) Violate("the job still holds the memory of rank ", rank);
  }
  table_.Tick();
  const JobSnapshot snapshot = job_->Snapshot();
  if (snapshot.phase != (model_.ended() ? JobPhase::kFailed : JobPhase::kEnded)) {
    Violate("the job's phase is ", static_cast<int>(snapshot.phase));
  }
  if (table_.jobs_failed() != (model_.ended() ? 1u : 0u)) {
    Violate(table_.jobs_failed(), " jobs have failed");
  }
  bool gone = model_.layout_gone();
  // In a job that goes on until all have left, the last rank's end is also the layout's.
  for (int rank = 0; !model_.ended() && rank < options_.ranks; ++rank) {
    gone = gone || model_.Released(rank);
  }
  if (snapshot.layouts.empty() != gone) {
    Violate("the job has ", snapshot.layouts.size(), " layouts");
  }
  if (snapshot.layouts.empty()) return;
  const LayoutStatsSnapshot& stats = snapshot.layouts[0].stats;
  if (stats.steps_complete != model_.steps_complete() || stats.steps_void != model_.steps_void()) {
    Violate("the statistics count ", stats.steps_complete, " complete and ", stats.steps_void,
            " void steps");
  }
  const auto timeline = job_->Timeline("model", StepTimeline::kMaxSteps);
  std::uint64_t last = 0;
  for (const StepTimes& times : *timeline) {
    if (times.step != ++last) Violate("step ", times.step, " where ", last, " should be");
  }
  if (last != model_.step() - 1) Violate("the last step is ", last);
}

void CheckedJob::FinishEnded() {
  // After the end of a rank's session, its calls are ignored.
  for (std::uint32_t rank = 0; rank < static_cast<std::uint32_t>(options_.ranks); ++rank) {
    const std::uint64_t step = model_.step();
    for (const absl::Status& status :
         {job_->MarkReady(Of(rank), channel_, step, {0}),
          job_->MarkReady(Of(rank), channel_, 0, {9}), job_->EndStep(Of(rank), channel_, step, ""),
          job_->AbandonStep(Of(rank), channel_, step, ""), job_->Leave(Of(rank), /*exit=*/true),
          job_->Finish(Of(rank))}) {
      if (!status.ok()) Violate("after its end, rank ", rank, " is refused: ", status.ToString());
    }
    job_->Lose(Of(rank), absl::AbortedError("again"));
  }
  job_->Tick();
  for (int rank = 0; rank < options_.ranks; ++rank) {
    if (!sinks_[rank]->messages().empty())
      Violate("rank ", rank, " receives a message after its end");
  }
  if (!reducer_.held().empty()) Violate("a reduction begins after the end");
}

void CheckedJob::FinishThrough() {
  for (int rank = 0; rank < options_.ranks; ++rank) {
    if (model_.IsAwaited(rank) && !model_.Through(rank) && !model_.Released(rank)) {
      Violate("no event can happen, but rank ", rank, " waits in step ", model_.Belief(rank));
    }
  }
  if (!job_->MissingInStep(channel_, model_.step()).empty()) Violate("a step is still open");
  if (!model_.layout_gone()) {
    const LayoutStatsSnapshot stats = job_->Snapshot().layouts[0].stats;
    if (stats.buckets_reduced != buckets_reduced_) {
      Violate("the statistics count ", stats.buckets_reduced, " reductions instead of ",
              buckets_reduced_);
    }
  }
  for (int rank = 0; rank < options_.ranks; ++rank) {
    if (!model_.HasSession(rank)) continue;
    const absl::Status left = job_->Leave(Of(static_cast<std::uint32_t>(rank)), /*exit=*/true);
    if (!left.ok()) Violate("rank ", rank, " may not leave: ", left.ToString());
    const auto ends = sinks_[rank]->Of<SessionEndMessage>();
    if (ends.size() != 1 || !ends[0].status.ok()) Violate("rank ", rank, "'s session did not end");
  }
}

}  // namespace gradsync::daemon
