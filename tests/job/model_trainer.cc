#include "tests/job/model_trainer.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "tests/job/model_request.h"

namespace gradsync::daemon {

// ---- Messages of the job ------------------------------------------------------------------------

void Inbox::Queue(SessionMessage message) {
  if (const auto* admitted = std::get_if<StateAdmittedMessage>(&message)) {
    admitted_by_ = admitted->transfer;
  }
  queued_.push_back(std::move(message));
}

bool Inbox::HasVerdict() const {
  return std::any_of(queued_.begin(), queued_.end(), [](const SessionMessage& message) {
    return std::holds_alternative<StepDoneMessage>(message);
  });
}

bool Inbox::HasQuestion() const {
  return std::any_of(queued_.begin(), queued_.end(), [](const SessionMessage& message) {
    return std::holds_alternative<StateQuestionMessage>(message);
  });
}

SessionMessage Inbox::Take() {
  SessionMessage message = std::move(queued_.front());
  queued_.pop_front();
  --readable_;
  ++taken_;
  return message;
}

// ---- The process --------------------------------------------------------------------------------

ModelTrainer::ModelTrainer(ModelRun* run, RankSession session, bool replacement)
    : run_(run),
      session_(session),
      replacement_(replacement),
      inbox_(std::make_shared<Inbox>()),
      has_state_(!replacement),
      state_(ModelState::First()),
      live_(!replacement),
      exchange_(run, session, [this](Call call) { Send(std::move(call)); }) {
  const absl::Status joined = run_->job->Join(
      session_.rank, run_->ranks, ModelJobOptions(run_->source), session_.incarnation, inbox_);
  if (!joined.ok()) Violate(joined.ToString());
}

std::string ModelTrainer::Name() const {
  return absl::StrCat("rank ", session_.rank, "/", session_.incarnation);
}

void ModelTrainer::Violate(const std::string& what) {
  run_->Violate(absl::StrCat(Name(), ", step ", step_, ": ", what));
}

void ModelTrainer::AddActions(std::vector<Action>* actions) const {
  if (!alive_ || left_) return;
  if (!inbox_->empty()) actions->push_back(Action::kReceive);
  const bool survivor = run_->source == StateSource::kSurvivor;
  exchange_.AddActions(survivor && !has_state_, Waits(), ended_ || leave_sent_, actions);
  if (memory_ == nullptr) return actions->push_back(Action::kRegister);
  if (!mapped_) return actions->push_back(Action::kMap);
  if (step_ == 0) return;
  if (!verdicts_.empty() && !exchange_.pinned() && owed_barrier_ == 0) {
    actions->push_back(Action::kVerdict);
  }
  if (!has_state_) {
    if (!survivor && run_->records.count(step_) > 0) actions->push_back(Action::kRecover);
    return;
  }
  if (MayCallBarrier()) actions->push_back(Action::kBarrier);
  if (owed_barrier_ != 0) return;
  if (through()) {
    if (!saved_) {
      actions->push_back(Action::kSave);
    } else if (!leave_sent_ && !in_barrier_) {
      actions->push_back(Action::kLeave);
    }
    return;
  }
  if (ended_ || AwaitsBucket()) return;
  if (marked_ == run_->buckets() && !awaited_.has_value()) {
    actions->push_back(Action::kAwaitBucket);
  }
  if (written_ < kHalves * run_->buckets()) actions->push_back(Action::kWrite);
  if (marked_ < run_->buckets() && written_ >= kHalves * (marked_ + 1)) {
    actions->push_back(Action::kMark);
  }
  if (written_ == kHalves * run_->buckets()) {
    actions->push_back(marked_ == run_->buckets() ? Action::kEnd : Action::kFinish);
  }
  if (run_->faults.abandons > 0 && run_->Random(40) == 0) actions->push_back(Action::kAbandon);
}

void ModelTrainer::Do(Action action) {
  switch (action) {
    case Action::kReceive:
      return Receive(inbox_->Take());
    case Action::kRegister:
      return Register();
    case Action::kMap:
      mapped_ = true;
      return Send([session = session_, channel = run_->channel, memory = memory_->Share()](
                      Job* job) { return job->ArenaMapped(session, channel, memory); });
    case Action::kRecover:
      state_ = run_->records.at(step_);
      has_state_ = true;
      return;
    case Action::kWrite:
      return WriteHalf();
    case Action::kMark:
      return Mark();
    case Action::kAwaitBucket:
      awaited_ = run_->Random(run_->buckets());
      return;
    case Action::kEnd:
      return End(/*finish=*/false);
    case Action::kFinish:
      return End(/*finish=*/true);
    case Action::kAbandon:
      return Abandon();
    case Action::kBarrier:
      return CallBarrier();
    case Action::kVerdict:
      return TakeVerdict();
    case Action::kSave:
      saved_ = true;
      run_->saved[session_.rank] = true;
      return;
    case Action::kLeave:
      leave_sent_ = true;
      return Send([this](Job* job) {
        // Otherwise the job ignores it.
        leave_read_ = !known_lost_;
        return job->Leave(session_, /*exit=*/true);
      });
    default:
      if (exchange_.Do(action, &state_)) return;
      return Violate(absl::StrCat("a trainer does not do this: ", NameOf(action)));
  }
}

void ModelTrainer::Deliver() {
  const Call call = std::move(sent_.front());
  sent_.pop_front();
  const absl::Status status = call(run_->job.get());
  if (status.ok()) return;
  if (!IsFault(status)) return Violate(status.ToString());
  run_->job->Lose(session_, status);  // as the session does
}

void ModelTrainer::Lose() {
  known_lost_ = true;
  run_->job->Lose(session_, MakeError(absl::StatusCode::kAborted, reason::kProcessEnded,
                                      "its process has ended"));
}

void ModelTrainer::GiveMemoryBack() {
  if (memory_ == nullptr || known_lost_ || memory_->Shared()) return;
  run_->spare->push_back(std::move(memory_));
}

void ModelTrainer::Register() {
  const auto registered = run_->job->RegisterLayout(session_, ModelLayout(run_->buffers));
  if (!registered.ok()) return Violate(registered.status().ToString());
  run_->channel = registered->channel;
  run_->plan = registered->plan;
  if (run_->spare->empty()) {
    memory_ = std::make_unique<TrainerMemory>(run_->plan.arena_bytes, run_->buckets());
  } else {
    memory_ = std::move(run_->spare->back());
    run_->spare->pop_back();
    memory_->Reset();
  }
}

void ModelTrainer::Receive(const SessionMessage& message) {
  if (const auto* ready = std::get_if<LayoutReadyMessage>(&message)) {
    BeginStep(ready->first_step);
    if (has_state_) Record();
  } else if (const auto* done = std::get_if<StepDoneMessage>(&message)) {
    verdicts_.push_back(done->record);
    exchange_.StopReading();
  } else if (const auto* end = std::get_if<SessionEndMessage>(&message)) {
    TakeEnd(end->status);
  } else if (const auto* healed = std::get_if<HealedMessage>(&message)) {
    if (live_) Violate("healed, but it was live");
    live_ = true;
    barrier_ = healed->next_sequence - 1;
  } else if (const auto* passed = std::get_if<OperationDoneMessage>(&message)) {
    if (!in_barrier_ || passed->sequence != barrier_) Violate("the end of a barrier of others");
    in_barrier_ = false;
    owed_barrier_ = 0;
  } else if (std::holds_alternative<OperationFailedMessage>(message)) {
    Violate("a barrier has failed");
  } else {
    const bool begun = (marked_ > 0 && verdicts_.empty()) || Waits();
    std::string fault = exchange_.Receive(message, begun);
    if (!fault.empty()) Violate(fault);
    if (!exchange_.admitted() || has_state_) return;
    has_state_ = true;
    if (step_ == 0) return;  // it has not mapped its memory, and checks its state then
    const auto record = run_->records.find(step_);
    if (record == run_->records.end() || !(record->second == state_)) {
      Violate("admitted with a state that is not that of the other ranks before this step");
    }
  }
}

bool ModelTrainer::IsFault(const absl::Status& status) const {
  const std::optional<Reason> fault = exchange_.fault();
  return fault.has_value() && DetailsOf(status).reason == *fault;
}

void ModelTrainer::TakeEnd(const absl::Status& status) {
  if (IsFault(status)) {
    // The process ends, and the job knows that the session has.
    alive_ = false;
    known_lost_ = true;
    return;
  }
  left_ = true;
  if (!leave_sent_ || !status.ok()) {
    return Violate("the session has ended: " + status.ToString());
  }
  const auto& saved = run_->saved;
  if (std::find(saved.begin(), saved.end(), false) != saved.end()) {
    Violate("the session has ended before every rank had saved its work");
  }
}

// ---- Steps --------------------------------------------------------------------------------------

void ModelTrainer::BeginStep(std::uint64_t step) {
  step_ = step;
  written_ = marked_ = 0;
  ended_ = false;
  awaited_.reset();
  order_.resize(run_->buckets());
  std::iota(order_.begin(), order_.end(), 0u);
  for (std::size_t i = order_.size(); i > 1; --i) std::swap(order_[i - 1], order_[run_->Random(i)]);
}

bool ModelTrainer::AwaitsBucket() const {
  return awaited_.has_value() && memory_->done(*awaited_) < step_;
}

bool ModelTrainer::Waits() const {
  return ((ended_ || AwaitsBucket()) && verdicts_.empty()) || leave_sent_;
}

bool ModelTrainer::HasMarked(std::size_t bucket) const {
  const auto last = order_.begin() + static_cast<std::ptrdiff_t>(marked_);
  return std::find(order_.begin(), last, bucket) != last;
}

bool ModelTrainer::Owns(std::size_t bucket) const {
  if (!alive_ || memory_ == nullptr) return false;
  return step_ == 0 || !HasMarked(bucket) || memory_->done(bucket) >= step_;
}

Half* ModelTrainer::At(std::size_t bucket) const {
  return memory_->At<Half>(run_->plan.buckets[bucket].offset);
}

void ModelTrainer::WriteHalf() {
  const std::size_t bucket = order_[written_ / kHalves];
  const int half = static_cast<int>(written_ % kHalves);
  At(bucket)[half] =
      Gradient(session_.rank, state_, run_->plan.buckets[bucket].dtype, bucket, half);
  ++written_;
}

void ModelTrainer::Mark() {
  // In the first message of the step.
  std::optional<Position> position;
  if (marked_ == 0) position = Position{state_.epoch, state_.batch};
  const std::uint32_t bucket = order_[marked_++];
  Send([this, bucket, step = step_, position](Job* job) {
    return job->MarkReady(session_, run_->channel, step, {bucket}, position);
  });
}

void ModelTrainer::End(bool finish) {
  ended_ = true;
  marked_ = run_->buckets();
  const Position position{state_.epoch, state_.batch};
  Send([this, finish, step = step_, position](Job* job) {
    return finish ? job->FinishStep(session_, run_->channel, step, "", position)
                  : job->EndStep(session_, run_->channel, step, "", position);
  });
  OweBarrier(BarrierPlace::kAfterEnd);
}

void ModelTrainer::Abandon() {
  --run_->faults.abandons;
  ended_ = true;
  Send([this, step = step_](Job* job) {
    // Otherwise the job ignores it.
    if (!known_lost_) run_->abandoned[step] = true;
    return job->AbandonStep(session_, run_->channel, step, "the batch is bad");
  });
}

void ModelTrainer::OweBarrier(BarrierPlace place) {
  if (run_->barrier_place == place) owed_barrier_ = step_;
}

bool ModelTrainer::MayCallBarrier() const {
  if (!live_ || in_barrier_ || leave_sent_) return false;
  if (run_->barrier_place != BarrierPlace::kAnywhere) return owed_barrier_ != 0;
  if (barrier_ < run_->last_barrier) return true;  // another rank may wait in it
  return run_->barriers > 0 && run_->Random(20) == 0;
}

void ModelTrainer::CallBarrier() {
  in_barrier_ = true;
  ++barrier_;
  // Steps and barriers have the same numbers.
  if (owed_barrier_ != 0 && barrier_ != owed_barrier_) {
    Violate(absl::StrCat("its barrier after step ", owed_barrier_, " has number ", barrier_));
  }
  if (barrier_ > run_->last_barrier) {
    run_->last_barrier = barrier_;
    --run_->barriers;
  }
  Send([session = session_, sequence = barrier_](Job* job) {
    return job->Operate(session, sequence, OperationSpec(), {}, kModelForever);
  });
}

void ModelTrainer::TakeVerdict() {
  const std::shared_ptr<const StepRecord> record = std::move(verdicts_.front());
  verdicts_.pop_front();
  const bool complete = record->verdict.ok();
  if (record->times.step != step_) {
    return Violate(absl::StrCat("the verdict is that of step ", record->times.step));
  }
  const auto first = run_->complete.emplace(step_, complete).first;
  if (first->second != complete) return Violate("another rank got another verdict");
  const bool abandoned = run_->abandoned.count(step_) > 0;
  if (!complete && !abandoned) {
    return Violate("void, but no trainer abandoned it: " + record->verdict.ToString());
  }
  if (complete) {
    if (abandoned) return Violate("complete, but a trainer has abandoned it");
    if (!ended_) return Violate("complete, but this rank has not ended it");
    CheckAverages();
    OweBarrier(BarrierPlace::kAfterVerdict);
  }
  BeginStep(step_ + 1);
  if (has_state_) Record();
}

void ModelTrainer::CheckAverages() {
  std::vector<std::array<Half, kHalves>> averages(run_->buckets());
  for (std::size_t bucket = 0; bucket < averages.size(); ++bucket) {
    // More if the next step is void already.
    if (memory_->done(bucket) < step_) {
      Violate(absl::StrCat("the step is complete, and bucket ", bucket, " is not done"));
    }
    const DataType dtype = run_->plan.buckets[bucket].dtype;
    for (int half = 0; half < kHalves; ++half) {
      const Half got = At(bucket)[half];
      const Half expected = Average(run_->ranks, state_, dtype, bucket, half);
      averages[bucket][static_cast<std::size_t>(half)] = got;
      if (got == expected) continue;
      Violate(absl::StrCat("bucket ", bucket, ", half ", half, " is ", ValueOf(got), ", not ",
                           ValueOf(expected)));
    }
  }
  state_ = state_.After(averages);
  if (!(state_ == run_->states.at(state_.StepsDone()))) {
    Violate("the next state is not that of a run without faults");
  }
}

void ModelTrainer::Record() {
  const auto record = run_->records.emplace(step_, state_).first;
  if (!(record->second == state_)) Violate("another rank has another state before this step");
}

}  // namespace gradsync::daemon
