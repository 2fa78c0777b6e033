#include "tests/job/job_model.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace gradsync::daemon {
namespace {

constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;

const char* Name(Breach breach) {
  switch (breach) {
    case Breach::kSecondReady:
      return "marks a bucket a second time";
    case Breach::kUnknownBucket:
      return "marks an unknown bucket";
    case Breach::kUnknownChannel:
      return "names an unknown channel";
    case Breach::kStaleReady:
      return "marks a bucket of the step before";
    case Breach::kStepZero:
      return "marks a bucket of step 0";
    case Breach::kReadyAhead:
      return "marks a bucket of the next step";
    case Breach::kEndAhead:
      return "ends the next step";
    case Breach::kEndWithUnmarked:
      return "ends the step with an unmarked bucket";
    case Breach::kReadyAfterEnd:
      return "marks a bucket after EndStep";
    case Breach::kEndAfterEnd:
      return "ends the step twice";
    case Breach::kAbandonAfterEnd:
      return "abandons the step after EndStep";
    case Breach::kLeaveInStep:
      return "leaves in the middle of its step";
    case Breach::kUseReleased:
      return "marks a bucket of the layout that it has released";
    case Breach::kReleaseTwice:
      return "releases the layout twice";
    case Breach::kStayTwice:
      return "leaves and stays twice";
  }
  return "?";
}

int First(unsigned buckets) {
  for (int bucket = 0; bucket < kModelBuckets; ++bucket) {
    if ((buckets >> bucket & 1u) != 0) return bucket;
  }
  return Cause::kNoBucket;
}

}  // namespace

std::string Describe(const Event& event) {
  const auto of_rank = [&](absl::string_view what) {
    return absl::StrCat("rank ", static_cast<int>(event.rank), " ", what);
  };
  const int detail = event.detail;
  switch (event.action) {
    case Action::kReady:
      return of_rank(absl::StrCat("marks ", detail));
    case Action::kReadyAll:
      return of_rank("marks all");
    case Action::kEndStep:
      return of_rank("ends");
    case Action::kReadVerdict:
      return of_rank("reads the verdict");
    case Action::kReduced:
      return absl::StrCat(detail, " is reduced");
    case Action::kWords:
      return "the executor writes done words";
    case Action::kAbandon:
      return of_rank("abandons");
    case Action::kLose:
      return of_rank("dies");
    case Action::kLeave:
      return of_rank(detail != 0 ? "exits" : "leaves and stays");
    case Action::kFinish:
      return of_rank("finishes");
    case Action::kRelease:
      return of_rank("releases the layout");
    case Action::kDeadline:
      return "the deadline passes";
    case Action::kSupersede:
      return "the job is superseded";
    case Action::kDrain:
      return "the daemon drains";
    case Action::kBreach:
      return of_rank(Name(static_cast<Breach>(detail)));
  }
  return "?";
}

std::string Describe(const Prediction::Message& message) {
  switch (message.kind) {
    case Prediction::Kind::kBucketDone:
      return absl::StrCat("BucketDone of step ", message.step, ", bucket ", message.bucket);
    case Prediction::Kind::kStepDone:
      return absl::StrCat("StepDone of step ", message.step);
    case Prediction::Kind::kLeaveDone:
      return "LeaveDone";
    case Prediction::Kind::kSessionEnd:
      return "its session's end";
  }
  return "?";
}

JobModel::JobModel(const ModelOptions& options)
    : options_(options), faults_left_(options.fault_budget) {
  for (int rank = options_.ranks; rank < kModelMaxRanks; ++rank) {
    ranks_[rank].in_steps = ranks_[rank].session = false;
  }
}

int JobModel::StepRanks() const {
  int count = 0;
  for (const Rank& rank : ranks_) count += rank.in_steps || rank.finished ? 1 : 0;
  return count;
}

std::uint32_t JobModel::FirstMarked(int rank) const {
  return static_cast<std::uint32_t>(First(ranks_[rank].marks));
}

// ---- What may happen ----------------------------------------------------------------------------

bool JobModel::MayHappen(Action action) const {
  return faults_left_ > 0 && (options_.faults & FaultBit(action)) != 0;
}

void JobModel::Enabled(std::vector<Event>* events) const {
  events->clear();
  if (end_sent_) return;
  const auto add = [&](Action action, int rank, int detail = 0) {
    events->push_back({action, static_cast<std::uint8_t>(rank), static_cast<std::uint8_t>(detail)});
  };
  for (int r = 0; r < options_.ranks; ++r) {
    const Rank& rank = ranks_[r];
    if (!rank.session) continue;
    if (MayHappen(Action::kLose)) add(Action::kLose, r);  // a loss may be reported twice
    if (rank.lost) continue;
    if (!rank.released && MayHappen(Action::kRelease)) add(Action::kRelease, r);
    if (rank.released && MayHappen(Action::kBreach)) {
      add(Action::kBreach, r, static_cast<int>(Breach::kUseReleased));
      add(Action::kBreach, r, static_cast<int>(Breach::kReleaseTwice));
    }
    if (rank.in_steps && !Through(r) && !rank.released) {
      if (Behind(r)) add(Action::kReadVerdict, r);
      if (!rank.ended) {
        for (int bucket = 0; bucket < kModelBuckets; ++bucket) {
          if ((rank.marks >> bucket & 1u) == 0) add(Action::kReady, r, bucket);
        }
        if (rank.marks == 0) add(Action::kReadyAll, r);
        if (rank.marks == kEveryBucket) add(Action::kEndStep, r);
        if (MayHappen(Action::kAbandon)) add(Action::kAbandon, r);
      }
      if (MayHappen(Action::kBreach)) EnabledBreaches(r, events);
    }
    if (MayHappen(Action::kLeave)) {
      const bool between_steps = rank.marks == 0 && !rank.ended;
      if (rank.in_steps && between_steps && !Through(r)) {
        add(Action::kLeave, r, 0);
        add(Action::kLeave, r, 1);
      }
      if (!rank.in_steps) add(Action::kLeave, r, 1);
    }
    if (!rank.in_steps && MayHappen(Action::kBreach)) {
      add(Action::kBreach, r, static_cast<int>(Breach::kStayTwice));
    }
  }
  for (int r = 0; r < options_.ranks && MayHappen(Action::kFinish); ++r) {
    const Rank& rank = ranks_[r];
    if (rank.session && !rank.lost && rank.in_steps && rank.marks == 0 && !rank.ended) {
      add(Action::kFinish, r);
    }
  }
  for (int bucket = 0; bucket < kModelBuckets; ++bucket) {
    if ((in_flight() >> bucket & 1u) != 0) add(Action::kReduced, 0, bucket);
  }
  if (Writing()) add(Action::kWords, 0);
  if (step_ <= options_.steps) {
    // Without its deadline the step would wait forever for a rank that has released the layout.
    if (MayHappen(Action::kDeadline) || AwaitedInVain() >= 0) add(Action::kDeadline, 0);
    if (MayHappen(Action::kSupersede) && !superseded_) add(Action::kSupersede, 0);
    if (MayHappen(Action::kDrain)) add(Action::kDrain, 0);
  }
}

void JobModel::EnabledBreaches(int r, std::vector<Event>* events) const {
  const auto add = [&](Breach breach) {
    events->push_back(
        {Action::kBreach, static_cast<std::uint8_t>(r), static_cast<std::uint8_t>(breach)});
  };
  const Rank& rank = ranks_[r];
  add(Breach::kUnknownChannel);
  add(Breach::kStepZero);
  if (rank.belief > 1) add(Breach::kStaleReady);
  if (!Behind(r)) {  // otherwise the job already knows the next step
    add(Breach::kReadyAhead);
    add(Breach::kEndAhead);
  }
  if (rank.ended) {
    add(Breach::kReadyAfterEnd);
    add(Breach::kEndAfterEnd);
    add(Breach::kAbandonAfterEnd);
    return;
  }
  add(Breach::kUnknownBucket);
  if (rank.marks != 0) add(Breach::kSecondReady);
  if (rank.marks != kEveryBucket) add(Breach::kEndWithUnmarked);
  if (rank.marks != 0 && !Behind(r)) add(Breach::kLeaveInStep);
}

// ---- What follows -------------------------------------------------------------------------------

bool JobModel::Ignored(int rank) const {
  if (ended() || Behind(rank)) return true;
  // The rank may not know yet that its step is void.
  return ranks_[rank].ended && !void_.ok();
}

Cause JobModel::AnswerTo(int r, Breach breach) const {
  const Rank& rank = ranks_[r];
  if (ended()) return {};
  const Cause violation{kPrecondition, "PROTOCOL_VIOLATION", r};
  switch (breach) {
    case Breach::kUseReleased:
    case Breach::kReleaseTwice:
      if (!gone_) return violation;
      return {absl::StatusCode::kInvalidArgument, "UNKNOWN_CHANNEL", r};
    case Breach::kStayTwice:
      return violation;
    case Breach::kUnknownChannel:
      return {absl::StatusCode::kInvalidArgument, "UNKNOWN_CHANNEL", r};
    case Breach::kStepZero:
      return {kPrecondition, "STALE_STEP", r};
    case Breach::kStaleReady:
      // If the step became void before the rank ended it, this looks like a message that was in
      // flight.
      if (rank.belief - 1 > rank.last_ended) return {};
      return {kPrecondition, "STALE_STEP", r, rank.belief - 1};
    case Breach::kReadyAhead:
    case Breach::kEndAhead:
      return {kPrecondition, "PROTOCOL_VIOLATION", r, rank.belief + 1};
    default:
      break;
  }
  if (Ignored(r)) return {};
  switch (breach) {
    case Breach::kSecondReady:
      return {kPrecondition, "ALREADY_READY", r, step_, First(rank.marks)};
    case Breach::kUnknownBucket:
      return {absl::StatusCode::kInvalidArgument, "UNKNOWN_BUCKET", r, step_, kModelBuckets};
    case Breach::kEndWithUnmarked:
      return {kPrecondition, "PROTOCOL_VIOLATION", r, step_, First(~rank.marks)};
    default:
      return violation;
  }
}

void JobModel::Mark(int rank, unsigned buckets) {
  ranks_[rank].marks |= buckets;
  if (!ended() && !Behind(rank)) started_ = true;
}

void JobModel::EndInIgnorance(int r) {
  Rank& rank = ranks_[r];
  rank.last_ended = rank.belief++;
  rank.marks = 0;
}

void JobModel::LeaveSteps(int r, bool exit, Prediction* prediction) {
  Rank& rank = ranks_[r];
  rank.in_steps = false;
  if (exit) {
    rank.session = false;
    prediction->messages.push_back({Prediction::Kind::kSessionEnd, r});
    for (Rank& other : ranks_) other.away -= rank.away > 0 && other.away > rank.away ? 1 : 0;
    rank.away = 0;
  } else {
    for (const Rank& other : ranks_) rank.away = std::max(rank.away, other.away);
    ++rank.away;
  }
}

void JobModel::Finish(int r, Prediction* prediction) {
  LeaveSteps(r, /*exit=*/true, prediction);
  ranks_[r].finished = true;
}

void JobModel::Release(int r) {
  Rank& rank = ranks_[r];
  rank.released = true;
  if (!rank.in_steps || !Behind(r)) return;
  // It does not read the verdict of its step any more.
  rank.belief = step_;
  rank.marks = 0;
  rank.ended = false;
}

int JobModel::AwaitedInVain() const {
  if (ended() || !started_ || !void_.ok()) return -1;
  for (int r = 0; r < options_.ranks; ++r) {
    const Rank& rank = ranks_[r];
    if (rank.released && rank.in_steps && !rank.ended) return r;
  }
  return -1;
}

bool JobModel::AnyHasSession() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.session; });
}

bool JobModel::SomeoneFinished() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.finished; });
}

void JobModel::EndIfFinishedRankIsNeeded() {
  if (ended() || !SomeoneFinished()) return;
  for (int r = 0; r < options_.ranks; ++r) {
    const Rank& rank = ranks_[r];
    if (rank.in_steps && !Behind(r) && (rank.marks != 0 || rank.ended)) {
      end_ = {absl::StatusCode::kAborted, "RANK_FINISHED", first_finished_};
    }
  }
}

bool JobModel::HasWordsOfResume() const {
  return step_ > 1 && std::any_of(ranks_.begin(), ranks_.end(),
                                  [](const Rank& rank) { return rank.away > 0 && !rank.released; });
}

void JobModel::WriteWords(Prediction* prediction) {
  if (resuming_) {
    resuming_ = false;
    if (!ended()) Resume(prediction);
    return;
  }
  voiding_ = false;
  if (!ended()) return Decide(prediction);
  // The trainers see a void step. The job has no further one.
  last_void_ = step_;
  reduced_ = kEveryBucket;
}

void JobModel::MaybeResume(Prediction* prediction) {
  if (ended() || resuming_ ||
      std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.in_steps; })) {
    return;
  }
  resuming_ = options_.words_later && HasWordsOfResume();
  if (!resuming_) Resume(prediction);
}

void JobModel::Resume(Prediction* prediction) {
  int last = 0;
  for (int r = 1; r < options_.ranks; ++r) last = ranks_[r].away > ranks_[last].away ? r : last;
  for (int r = 0; r < options_.ranks; ++r) {
    Rank& rank = ranks_[r];
    if (rank.away == 0) continue;
    prediction->messages.push_back({Prediction::Kind::kLeaveDone, r, step_, /*bucket=*/last});
    rank.away = 0;
    rank.in_steps = true;
    rank.belief = step_;
    rank.marks = 0;
    rank.ended = false;
    rank.last_ended = step_ - 1;
  }
}

void JobModel::Lose(int r, const Cause& own) {
  Rank& rank = ranks_[r];
  if (rank.lost) return;
  rank.lost = true;
  own_end_[r] = own;
  if (ended()) return;
  end_ = {absl::StatusCode::kAborted, "RANK_LOST", r};
  if (!started_) return;
  end_.step = step_;
  const unsigned owed = rank.in_steps ? kEveryBucket & ~(Behind(r) ? 0u : rank.marks) : 0u;
  end_.bucket = First(owed);
}

void JobModel::Reduce(int bucket, Prediction* prediction) {
  reduced_ |= 1u << bucket;
  if (ended()) return;
  for (int rank = 0; rank < options_.ranks; rank += 2) {  // the ranks that asked for it
    if (!ranks_[rank].in_steps) continue;
    prediction->messages.push_back({Prediction::Kind::kBucketDone, rank, step_, bucket});
  }
}

void JobModel::Decide(Prediction* prediction) {
  const bool complete = void_.ok();
  Prediction::Message message{Prediction::Kind::kStepDone, 0, step_, 0, void_};
  message.live_ranks = StepRanks();
  message.divisor = divisor();
  for (int r = 0; r < options_.ranks; ++r) {
    Rank& rank = ranks_[r];
    if (!rank.in_steps) continue;
    message.rank = r;
    prediction->messages.push_back(message);
    if (!Behind(r) && (rank.ended || rank.released)) {
      // The rank waits for nothing else, so it reads the verdict at once.
      rank.last_ended = step_;
      ++rank.belief;
      rank.marks = 0;
      rank.ended = false;
    }
  }
  if (complete) {
    ++complete_;
  } else {
    last_void_ = step_;
  }
  ++step_;
  started_ = false;
  void_ = Cause();
  submitted_ = reduced_ = 0;
}

void JobModel::Advance(Prediction* prediction) {
  for (bool changed = true; changed;) {
    changed = false;
    // A bucket is reduced once every rank in steps has marked it, unless the step is void or the
    // job has ended.
    if (!ended() && void_.ok() && StepRanks() > 0 && !SomeoneFinished()) {
      unsigned ready = kEveryBucket;
      for (int r = 0; r < options_.ranks; ++r) {
        if (ranks_[r].in_steps) ready &= Behind(r) ? 0u : ranks_[r].marks;
      }
      const unsigned fresh = ready & ~submitted_;
      submitted_ |= fresh;
      prediction->submitted |= fresh;
      for (int bucket = 0; options_.reduce_at_once && bucket < kModelBuckets; ++bucket) {
        if ((fresh >> bucket & 1u) != 0) {
          Reduce(bucket, prediction);
          changed = true;
        }
      }
    }
    if (in_flight() != 0 || voiding_) return;
    // A step is decided once nothing touches its memory: complete if every rank has ended it and
    // every bucket is reduced; void if a fault made it so.
    if (!ended() && started_) {
      bool decided = !void_.ok();
      if (decided && options_.words_later) {
        voiding_ = true;
        return;
      }
      if (!decided && reduced_ == kEveryBucket && !SomeoneFinished()) {
        decided = true;
        for (int r = 0; r < options_.ranks; ++r) {
          if (ranks_[r].in_steps && !(ranks_[r].ended && !Behind(r))) decided = false;
        }
      }
      if (decided) {
        Decide(prediction);
        changed = true;
      }
    }
  }
}

void JobModel::Settle(Prediction* prediction) {
  Advance(prediction);
  EndIfFinishedRankIsNeeded();
  if (!ended() && !started_ && in_flight() == 0) {
    bool released = false, kept = false;
    for (const Rank& rank : ranks_) {
      released = released || rank.released;
      kept = kept || (rank.session && !rank.released);
    }
    gone_ = gone_ || (released && !kept);
  }
  // Sessions end once nothing touches their memory.
  if (!ended() || end_sent_ || in_flight() != 0 || Writing()) return;
  end_sent_ = true;
  for (int r = 0; r < options_.ranks; ++r) {
    Rank& rank = ranks_[r];
    if (!rank.session) continue;
    rank.session = false;
    Prediction::Message message{Prediction::Kind::kSessionEnd, r};
    message.cause = rank.lost ? own_end_[r] : end_;
    prediction->messages.push_back(message);
  }
}

Prediction JobModel::Apply(const Event& event) {
  Prediction prediction;
  const int r = event.rank;
  Rank& rank = ranks_[r];
  const bool fault = event.action >= Action::kAbandon;
  if (fault && !(event.action == Action::kDeadline && AwaitedInVain() >= 0)) --faults_left_;
  switch (event.action) {
    case Action::kReady:
      Mark(r, 1u << event.detail);
      break;
    case Action::kReadyAll:
      Mark(r, kEveryBucket);
      break;
    case Action::kEndStep:
    case Action::kAbandon:
      if (Behind(r)) {
        EndInIgnorance(r);
        break;
      }
      rank.ended = true;
      if (event.action == Action::kAbandon && !ended()) {
        started_ = true;
        if (void_.ok()) {
          void_ = {absl::StatusCode::kAborted, "STEP_ABANDONED", r, step_,
                   First(kEveryBucket & ~rank.marks)};
        }
      }
      break;
    case Action::kReadVerdict:
      ++rank.belief;
      rank.marks = 0;
      break;
    case Action::kReduced:
      Reduce(event.detail, &prediction);
      break;
    case Action::kWords:
      WriteWords(&prediction);
      break;
    case Action::kLose:
      Lose(r, {absl::StatusCode::kAborted, "PROCESS_ENDED"});
      break;
    case Action::kLeave:
      if (!ended()) LeaveSteps(r, event.detail != 0, &prediction);
      break;
    case Action::kFinish:
      if (ended()) break;
      if (!SomeoneFinished()) first_finished_ = r;
      Finish(r, &prediction);
      break;
    case Action::kDeadline:
      if (const int in_vain = AwaitedInVain(); in_vain >= 0) {
        void_ = {kPrecondition, "LAYOUT_RELEASED", in_vain, step_};
      } else if (!ended() && started_ && void_.ok()) {
        void_ = {absl::StatusCode::kDeadlineExceeded, "STEP_TIMEOUT", -1, step_};
      }
      break;
    case Action::kRelease:
      if (!ended()) Release(r);
      break;
    case Action::kSupersede:
      superseded_ = true;
      // Rank 0 begins it. If it had left this generation, or had finished, the others go on.
      if (!rank.session && !rank.lost) break;
      // A job that every rank has left has ended without an error, and that does not change.
      if (!ended() && AnyHasSession()) end_ = {absl::StatusCode::kAborted, "SUPERSEDED"};
      break;
    case Action::kDrain:
      if (!ended() && !started_ && AnyHasSession()) {
        end_ = {absl::StatusCode::kUnavailable, "DRAINING"};
      }
      break;
    case Action::kBreach:
      prediction.answer = AnswerTo(r, static_cast<Breach>(event.detail));
      // The rank's session ends with the error of the breach.
      if (!prediction.answer.ok()) {
        Lose(r, prediction.answer);
      } else if (static_cast<Breach>(event.detail) == Breach::kEndWithUnmarked) {
        EndInIgnorance(r);
      }
      break;
  }
  Settle(&prediction);
  if (event.action == Action::kLeave || event.action == Action::kFinish) MaybeResume(&prediction);
  return prediction;
}

std::uint64_t JobModel::Key() const {
  std::uint64_t key = 1;
  const auto add = [&](std::uint64_t value, int bits) { key = key << bits | value; };
  for (int r = 0; r < options_.ranks; ++r) {
    const Rank& rank = ranks_[r];
    add(rank.in_steps ? 1 : 0, 1);
    add(rank.session ? 1 : 0, 1);
    add(rank.lost ? 1 : 0, 1);
    add(rank.released ? 1 : 0, 1);
    // A rank without a session is not away; 3 tells a finished one from one that has left.
    add(rank.finished ? 3 : static_cast<std::uint64_t>(rank.away), 2);
    add(rank.belief, 2);
    add(rank.marks, kModelBuckets);
    add(rank.ended ? 1 : 0, 1);
    add(rank.last_ended, 2);
  }
  add(step_, 2);
  add(started_ ? 1 : 0, 1);
  add(submitted_, kModelBuckets);
  add(reduced_, kModelBuckets);
  add(last_void_, 2);
  add(complete_, 2);
  // The code and the rank of a cause are enough: the rest of it shows only in messages.
  add(void_.ok() ? 0 : static_cast<std::uint64_t>(void_.code) % 4 + 1, 3);
  add(static_cast<std::uint64_t>(void_.rank) + 1, 2);
  add(end_.ok() ? 0 : 1, 1);
  add(static_cast<std::uint64_t>(end_.rank) + 1, 2);
  add(superseded_ ? 1 : 0, 1);
  add(gone_ ? 1 : 0, 1);
  add(Writing() ? 1 : 0, 1);  // a step is void if and only if the words are of a void step
  add(static_cast<std::uint64_t>(faults_left_), 3);  // the last of 64 bits with three ranks
  return key;
}

}  // namespace gradsync::daemon
