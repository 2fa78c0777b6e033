#include "tests/job/hold_world.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/job/model_request.h"

namespace gradsync::daemon {
namespace {

constexpr std::size_t kPastKept = 80;
// A trainer that may die gets the chance at one of so many events, so that deaths come at every
// moment of the run: at first for any phase, then by phase.
constexpr std::size_t kDeathRarity = 3;
constexpr std::array<std::size_t, kDeathPhases> kPhaseRarity = {8, 12, 2,  12, 8, 18,
                                                                8, 2,  12, 1,  2, 8};

constexpr int kMostEvents = 100'000;
// Longer than the daemon waits for a source.
constexpr std::uint64_t kSilenceNs = 31'000'000'000;

}  // namespace

const char* NameOf(Action action) {
  static const char* const names[] = {
      "the daemon reads a message",
      "the job hears of the death",
      "the reducer moves half a bucket",
      "the executor runs",
      "half a minute passes",
      "the next process joins",
      "dies",
      "receives a message",
      "registers",
      "maps",
      "reads a record of the state",
      "writes half a bucket",
      "marks a bucket",
      "waits for a bucket",
      "ends the step",
      "marks the rest and ends the step",
      "abandons the step",
      "calls a barrier",
      "reads a verdict",
      "asks for the state",
      "asks for the state, and waits for 10 s",
      "asks for the state again",
      "sends its digests again",
      "copies a chunk of the state out",
      "loads the state",
      "loads the state wrongly",
      "cannot load the state",
      "offers its state",
      "refuses to give its state",
      "falls silent",
      "writes a chunk of its state",
      "sends its digests",
      "stops reading",
      "saves its work",
      "leaves",
  };
  return names[static_cast<int>(action)];
}

const char* NameOf(DeathPhase phase) {
  static const char* const names[] = {"unmarked",  "marked",  "in flight", "ended",
                                      "committed", "healing", "loading",   "confirming",
                                      "source",    "copying", "through",   "leaving"};
  return names[static_cast<int>(phase)];
}

bool Possible(DeathPhase phase, const HoldWorldOptions& options) {
  const bool survivor = options.source == StateSource::kSurvivor;
  switch (phase) {
    case DeathPhase::kHealing:
    case DeathPhase::kCopying:
      return options.faults.deaths > 1;
    case DeathPhase::kLoading:
    case DeathPhase::kConfirming:
      return options.faults.deaths > 1 && survivor;
    case DeathPhase::kSource:
      // With two ranks no other rank would have the state.
      return options.faults.deaths > 1 && survivor && options.ranks > 2;
    default:
      return true;
  }
}

// ---- The job ------------------------------------------------------------------------------------

HoldWorld::HoldWorld(const HoldWorldOptions& options, std::uint64_t seed, Deaths* deaths,
                     SpareMemory* spare)
    : deaths_(deaths), present_(options.ranks) {
  run_.ranks = options.ranks;
  run_.steps = options.steps;
  run_.source = options.source;
  run_.buffers = options.buffers;
  run_.barrier_place = options.barrier_place;
  run_.spare = spare;
  run_.random.seed(seed);
  run_.saved.resize(options.ranks);
  JobEnvironment environment;
  environment.clock = &clock_;
  environment.reducer = &reducer_;
  environment.executor = &executor_;
  run_.job = std::make_shared<Job>(JobIdentity{1000, "job", "", 1, {}}, options.ranks,
                                   ModelJobOptions(options.source), environment);
  for (std::uint32_t rank = 0; rank < options.ranks; ++rank) StartTrainer(rank);
  for (ModelTrainer* trainer : present_) trainer->Do(Action::kRegister);
  run_.states = StatesOfRun(run_.ranks, run_.plan, run_.steps);
  // A rank can be replaced once a step is complete.
  const auto begun = [](const ModelTrainer* trainer) { return trainer->step() > 1; };
  while (!std::all_of(present_.begin(), present_.end(), begun) && Step()) {
  }
  run_.faults = options.faults;
  run_.barriers = options.barriers;
}

HoldWorld::~HoldWorld() {
  run_.job->End(absl::AbortedError("the test has ended"));
  while (!reducer_.held().empty()) reducer_.Move(0);
  executor_.RunAll();
  for (const auto& trainer : trainers_) trainer->GiveMemoryBack();
}

void HoldWorld::StartTrainer(std::uint32_t rank) {
  const std::uint64_t incarnation = trainers_.size() + 1;
  trainers_.push_back(std::make_unique<ModelTrainer>(&run_, RankSession{rank, incarnation},
                                                     /*replacement=*/incarnation > run_.ranks));
  present_[rank] = trainers_.back().get();
}

bool HoldWorld::Awaited(const ModelTrainer& trainer) const {
  return trainer.known_lost() && !trainer.leaving();
}

// ---- Events -------------------------------------------------------------------------------------

void HoldWorld::FindEvents() {
  events_.clear();
  for (const auto& owned : trainers_) {
    ModelTrainer* const trainer = owned.get();
    // Messages of the dead are read, too, even after the job knows of the death.
    if (trainer->anything_sent()) events_.push_back({Action::kDeliver, trainer});
    if (!trainer->alive()) {
      if (!trainer->known_lost()) events_.push_back({Action::kHear, trainer});
      continue;
    }
    actions_.clear();
    trainer->AddActions(&actions_);
    for (const Action action : actions_) events_.push_back({action, trainer});
    if (run_.faults.deaths == 0 || run_.Random(kDeathRarity) != 0) continue;
    if (run_.Random(kPhaseRarity[static_cast<std::size_t>(PhaseOf(*trainer))]) != 0) continue;
    if (MayDie(*trainer)) events_.push_back({Action::kDie, trainer});
  }
  for (std::uint32_t rank = 0; rank < run_.ranks; ++rank) {
    if (Awaited(*present_[rank])) events_.push_back({Action::kStart, nullptr, rank});
  }
  for (std::size_t i = 0; i < reducer_.held().size(); ++i) {
    events_.push_back({Action::kMove, nullptr, i});
  }
  if (executor_.pending() > 0) events_.push_back({Action::kExecute});
  const bool waits = std::any_of(present_.begin(), present_.end(), [](const auto* trainer) {
    return trainer->alive() && trainer->exchange().waits_for_time();
  });
  if (waits) events_.push_back({Action::kPass});
}

bool HoldWorld::MayDie(const ModelTrainer& trainer) const {
  if (trainer.left()) return false;
  // Some rank that has the state lives on, and the job knows that it has.
  return std::any_of(present_.begin(), present_.end(), [&](const ModelTrainer* other) {
    if (other == &trainer || !other->alive()) return false;
    if (other->leaving()) return true;
    const RankState state = run_.job->StateOf(other->session());
    const bool admitted = run_.source == StateSource::kSurvivor && state == RankState::kHealing;
    return state == RankState::kLive || admitted;
  });
}

bool HoldWorld::IsReduced(const ModelTrainer& trainer, bool measured) const {
  if (trainer.memory() == nullptr) return false;
  const std::byte* const begin = trainer.memory()->data();
  const std::byte* const end = begin + trainer.memory()->bytes();
  return std::any_of(reducer_.held().begin(), reducer_.held().end(), [&](const auto& held) {
    const HostBuffers& buffers = held.operation->host().buffers;
    if ((buffers.size() == 1) != measured) return false;
    return std::any_of(buffers.begin(), buffers.end(),
                       [&](const std::byte* buffer) { return buffer >= begin && buffer < end; });
  });
}

bool HoldWorld::IsCopiedTo(const ModelTrainer& trainer) const {
  if (!trainer.replacement()) return false;
  if (IsReduced(trainer, /*measured=*/true)) return true;
  if (trainer.anything_sent() || executor_.pending() == 0 || trainer.marked() == 0) return false;
  const std::string missing = run_.job->MissingInStep(run_.channel, trainer.step());
  for (std::size_t bucket = 0; bucket < run_.buckets(); ++bucket) {
    if (!trainer.HasMarked(bucket) || trainer.Owns(bucket)) continue;
    const bool held = std::any_of(reducer_.held().begin(), reducer_.held().end(), [&](auto& one) {
      return one.operation->host().buffers.size() > 1 && one.operation->bucket == bucket;
    });
    const bool waits = missing.find(absl::StrCat("bucket ", bucket)) != std::string::npos;
    if (!held && !waits) return true;
  }
  return false;
}

DeathPhase HoldWorld::PhaseOf(const ModelTrainer& trainer) const {
  if (IsCopiedTo(trainer)) return DeathPhase::kCopying;
  if (trainer.exchange().IsSource()) return DeathPhase::kSource;
  if (trainer.exchange().loading()) return DeathPhase::kLoading;
  if (trainer.exchange().confirming()) return DeathPhase::kConfirming;
  if (!trainer.has_state()) return DeathPhase::kHealing;
  if (trainer.has_verdict()) return DeathPhase::kCommitted;
  if (trainer.through()) {
    return trainer.has_sent_leave() ? DeathPhase::kLeaving : DeathPhase::kThrough;
  }
  if (trainer.ended()) return DeathPhase::kEnded;
  if (IsReduced(trainer, /*measured=*/false)) return DeathPhase::kInFlight;
  return trainer.marked() > 0 ? DeathPhase::kMarked : DeathPhase::kUnmarked;
}

std::array<std::size_t, 4> HoldWorld::Effects() const {
  std::size_t messages = 0;
  for (const auto& trainer : trainers_) messages += trainer->inbox().total();
  std::size_t states = 0;
  for (std::uint32_t rank = 0; rank < run_.ranks; ++rank) {
    states = 16 * states + static_cast<std::size_t>(run_.job->StateOf(rank));
  }
  return {messages, states, reducer_.held().size(), executor_.pending()};
}

std::string HoldWorld::Describe(const Event& event) const {
  const std::string what = NameOf(event.action);
  if (event.trainer != nullptr) return absl::StrCat(event.trainer->Name(), ": ", what);
  return event.action == Action::kStart ? absl::StrCat("rank ", event.detail, ": ", what) : what;
}

// ---- Running ------------------------------------------------------------------------------------

void HoldWorld::Do(const Event& event) {
  ModelTrainer* const trainer = event.trainer;
  switch (event.action) {
    case Action::kDeliver: {
      const bool lost = trainer->known_lost();
      const auto before = lost ? Effects() : std::array<std::size_t, 4>{};
      trainer->Deliver();
      if (lost && Effects() != before) run_.Violate("a message of a lost session has an effect");
      return;
    }
    case Action::kHear:
      return trainer->Lose();
    case Action::kMove:
      return reducer_.Move(event.detail);
    case Action::kExecute:
      return executor_.RunNext();
    case Action::kPass:
      for (ModelTrainer* one : present_) one->TimePasses();
      clock_.Advance(kSilenceNs);
      return run_.job->Tick();
    case Action::kStart:
      return StartTrainer(static_cast<std::uint32_t>(event.detail));
    case Action::kDie:
      ++(*deaths_)[static_cast<std::size_t>(PhaseOf(*trainer))];
      --run_.faults.deaths;
      return trainer->Die();
    default:
      return trainer->Do(event.action);
  }
}

std::size_t HoldWorld::Admitted() const {
  return static_cast<std::size_t>(
      std::count_if(trainers_.begin(), trainers_.end(),
                    [](const auto& trainer) { return trainer->inbox().admitted_by() != 0; }));
}

void HoldWorld::CheckAdmission() {
  std::uint64_t transfer = 0;  // the last one
  for (const auto& trainer : trainers_) {
    transfer = std::max(transfer, trainer->inbox().admitted_by());
  }
  for (const ModelTrainer* other : present_) {
    if (run_.job->StateOf(other->session().rank) != RankState::kLive) continue;
    // It is compared once the daemon knows that it has ended the step.
    if (!other->ended() || other->has_verdict() || other->anything_sent()) continue;
    if (other->exchange().Compared(transfer)) continue;
    run_.Violate(absl::StrCat("a rank was admitted by transfer ", transfer, ", but ", other->Name(),
                              " was not compared"));
  }
}

bool HoldWorld::Step() {
  FindEvents();
  if (!run_.violation.empty() || events_.empty()) return false;
  const Event event = events_[run_.Random(events_.size())];
  past_.push_back(event);
  if (past_.size() > kPastKept) past_.pop_front();
  struct Owned {
    const ModelTrainer* trainer;
    std::size_t bucket;
    std::array<Half, kHalves> values;
  };
  std::vector<Owned> owned;
  const bool of_daemon = event.action == Action::kMove || event.action == Action::kExecute;
  for (const auto& trainer : trainers_) {
    for (std::size_t bucket = 0; of_daemon && bucket < run_.buckets(); ++bucket) {
      if (!trainer->Owns(bucket)) continue;
      const Half* const values = trainer->At(bucket);
      owned.push_back({trainer.get(), bucket, {values[0], values[1]}});
    }
  }
  const std::size_t admitted = Admitted();
  Do(event);
  if (Admitted() != admitted) CheckAdmission();
  for (const Owned& one : owned) {
    const Half* const values = one.trainer->At(one.bucket);
    if (values[0] == one.values[0] && values[1] == one.values[1]) continue;
    run_.Violate(absl::StrCat("the daemon wrote to bucket ", one.bucket, " of ",
                              one.trainer->Name(), ", which owns it"));
  }
  if (run_.job->HasEnded()) run_.Violate("the job has ended: " + run_.job->Snapshot().failure);
  return run_.violation.empty();
}

std::string HoldWorld::Run() {
  const auto gone = [](const ModelTrainer* trainer) {
    return trainer->left() || (trainer->known_lost() && trainer->leaving());
  };
  int events = 0;
  while (!std::all_of(present_.begin(), present_.end(), gone) && Step()) {
    if (++events == kMostEvents) run_.Violate("the run does not end");
  }
  if (run_.violation.empty()) CheckEnd();
  if (run_.violation.empty()) return "";
  std::string past;
  for (const Event& event : past_) absl::StrAppend(&past, "\n", Describe(event));
  return absl::StrCat(run_.violation, "\nafter", past);
}

void HoldWorld::CheckEnd() {
  executor_.RunAll();
  for (const ModelTrainer* trainer : present_) {
    if (trainer->left() || trainer->leaving()) continue;
    return run_.Violate(
        absl::StrCat("nothing can happen any more, but ", trainer->Name(),
                     " is not through: ", run_.job->MissingInStep(run_.channel, trainer->step())));
  }
  for (const auto& trainer : trainers_) {
    if (trainer->memory() == nullptr || !trainer->memory()->Shared()) continue;
    run_.Violate("the daemon keeps the memory of " + trainer->Name());
  }
  for (const auto& trainer : trainers_) {
    if (!trainer->exchange().StagingIsShared()) continue;
    run_.Violate("the daemon keeps the staging memory of " + trainer->Name());
  }
  if (!run_.job->Empty()) run_.Violate("every rank has left, but the job is not empty");
}

}  // namespace gradsync::daemon
