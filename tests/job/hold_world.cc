#include "tests/job/hold_world.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kForever = ~std::uint64_t{0};
constexpr std::uint64_t kFirstState = 12345;
constexpr std::size_t kPastKept = 60;
// A trainer that may die gets the chance at one of so many events.
constexpr std::uint64_t kDeathRarity = 20;
// A term is a code below kBase, times kBase to the power of its rank.
constexpr std::uint64_t kBase = 1000;

std::uint64_t Mix(std::uint64_t a, std::uint64_t b) {
  std::uint64_t x = a * 0x9E3779B97F4A7C15ull + b + 0x7F4A7C15ull;
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9ull;
  return x ^ (x >> 32);
}

LayoutRequest Request() {
  LayoutRequest request;
  request.spec.name = "model";
  request.spec.bucket_cap_bytes = request.spec.first_bucket_cap_bytes = 1;
  request.spec.op = ReduceOp::kSum;
  for (int i = 0; i < HoldWorld::kBuckets; ++i) {
    request.spec.parameters.push_back(
        {absl::StrCat("p", i), {HoldWorld::kHalves}, DataType::kFloat64});
  }
  request.deadline_ns = kForever;
  return request;
}

}  // namespace

const char* NameOf(DeathPhase phase) {
  static const char* const names[] = {"unmarked",  "marked",  "in flight", "ended",
                                      "committed", "healing", "copying"};
  return names[static_cast<int>(phase)];
}

double HoldWorld::Term(std::uint32_t rank, std::uint64_t step, std::uint64_t state, int bucket,
                       int half) {
  const std::uint64_t code =
      1 + Mix(Mix(state, step),
              static_cast<std::uint64_t>(bucket) * kHalves + static_cast<std::uint64_t>(half)) %
              (kBase - 1);
  double term = static_cast<double>(code);
  for (std::uint32_t i = 0; i < rank; ++i) term *= kBase;
  return term;
}

// ---- The job ------------------------------------------------------------------------------------

HoldWorld::HoldWorld(const HoldWorldOptions& options, std::uint64_t seed,
                     std::array<int, kDeathPhases>* deaths)
    : options_(options),
      random_(seed),
      deaths_(deaths),
      present_(options.ranks),
      deaths_left_(options.deaths) {
  JobEnvironment environment;
  environment.clock = &clock_;
  environment.reducer = &reducer_;
  environment.executor = &executor_;
  JobOptions job_options;
  job_options.step_timeout_ns = job_options.hold_timeout_ns = kForever / 4;
  job_options.on_rank_loss = OnRankLoss::kHold;
  job_ = std::make_shared<Job>(JobIdentity{1000, "job", "", 1}, options_.ranks, job_options,
                               environment);
  for (std::uint32_t rank = 0; rank < options_.ranks; ++rank) {
    StartTrainer(rank, ++incarnations_);
    present_[rank]->state = kFirstState;
  }
  for (Trainer* trainer : present_) Register(trainer);
  for (Trainer* trainer : present_) {
    const absl::Status mapped =
        job_->ArenaMapped(trainer->session, channel_, trainer->memory->Share());
    if (!mapped.ok()) Violate(mapped.ToString());
  }
  for (Trainer* trainer : present_) ReadMessages(trainer);
  // A rank can be replaced once a step is complete.
  const int deaths_left = std::exchange(deaths_left_, 0);
  const auto begun = [](const Trainer* trainer) { return trainer->step > 1; };
  while (violation_.empty() && !std::all_of(present_.begin(), present_.end(), begun)) {
    std::vector<Event> events = Enabled();
    RunChecked(events[random_() % events.size()]);
  }
  deaths_left_ = deaths_left;
}

HoldWorld::~HoldWorld() {
  job_->End(absl::AbortedError("the test has ended"));
  while (!reducer_.held.empty()) MoveHalf(0);
  executor_.RunAll();
}

void HoldWorld::StartTrainer(std::uint32_t rank, std::uint64_t incarnation) {
  trainers_.push_back(std::make_unique<Trainer>());
  Trainer* const trainer = trainers_.back().get();
  trainer->session = {rank, incarnation};
  trainer->sink = std::make_shared<RecordingSink>();
  JobOptions options;
  options.step_timeout_ns = options.hold_timeout_ns = kForever / 4;
  options.on_rank_loss = OnRankLoss::kHold;
  const absl::Status joined = job_->Join(rank, options_.ranks, options, incarnation, trainer->sink);
  if (!joined.ok()) Violate(joined.ToString());
  present_[rank] = trainer;
}

void HoldWorld::Register(Trainer* trainer) {
  const auto registered = job_->RegisterLayout(trainer->session, Request());
  if (!registered.ok()) return Violate(registered.status().ToString());
  channel_ = registered->channel;
  plan_ = registered->plan;
  trainer->memory = std::make_unique<TrainerMemory>(plan_.arena_bytes, plan_.buckets.size());
}

double* HoldWorld::At(const Trainer& trainer, int bucket) const {
  return trainer.memory->At<double>(plan_.buckets[static_cast<std::size_t>(bucket)].offset);
}

bool HoldWorld::HasMarked(const Trainer& trainer, int bucket) const {
  for (int i = 0; i < trainer.marked; ++i) {
    if (BucketOf(trainer, i) == bucket) return true;
  }
  return false;
}

bool HoldWorld::Owns(const Trainer& trainer, int bucket) const {
  if (!trainer.alive || trainer.memory == nullptr) return false;
  if (trainer.step == 0 || !HasMarked(trainer, bucket)) return true;
  return trainer.memory->done(static_cast<std::size_t>(bucket)) >= trainer.step;
}

// ---- Events -------------------------------------------------------------------------------------

std::vector<HoldWorld::Event> HoldWorld::Enabled() {
  std::vector<Event> events;
  for (const auto& owned : trainers_) {
    Trainer* const trainer = owned.get();
    const std::string who =
        absl::StrCat("rank ", trainer->session.rank, "/", trainer->session.incarnation, ": ");
    // Messages of the dead are read, too, even after the job knows of the death.
    if (!trainer->sent.empty()) {
      events.push_back({who + "the daemon reads a message", [this, trainer] {
                          const auto message = std::move(trainer->sent.front());
                          trainer->sent.pop_front();
                          const absl::Status status = message();
                          if (!status.ok()) Violate(status.ToString());
                        }});
    }
    if (!trainer->alive && !trainer->known_lost) {
      events.push_back({who + "the job knows of the death", [this, trainer] {
                          trainer->known_lost = true;
                          job_->Lose(trainer->session,
                                     MakeError(absl::StatusCode::kAborted, reason::kProcessEnded,
                                               "its process has ended"));
                        }});
    }
    if (trainer->alive) AddEventsOf(trainer, &events);
  }
  for (std::uint32_t rank = 0; rank < options_.ranks; ++rank) {
    if (!present_[rank]->known_lost) continue;
    events.push_back({absl::StrCat("rank ", rank, " joins"), [this, rank] {
                        StartTrainer(rank, ++incarnations_);
                        present_[rank]->healed = false;
                      }});
  }
  for (std::size_t i = 0; i < reducer_.held.size(); ++i) {
    events.push_back({absl::StrCat("bucket ", reducer_.held[i].operation->bucket, ": move ",
                                   reducer_.held[i].moves),
                      [this, i] { MoveHalf(i); }, /*of_daemon=*/true});
  }
  if (executor_.pending() > 0) {
    events.push_back({"the executor runs", [this] { executor_.RunNext(); }, /*of_daemon=*/true});
  }
  return events;
}

void HoldWorld::AddEventsOf(Trainer* trainer, std::vector<Event>* events) {
  const std::string who =
      absl::StrCat("rank ", trainer->session.rank, "/", trainer->session.incarnation, ": ");
  AddDeath(trainer, events);
  if (!trainer->sink->messages().empty()) {
    events->push_back({who + "reads its messages", [this, trainer] { ReadMessages(trainer); }});
  }
  if (trainer->memory == nullptr) {
    events->push_back({who + "registers", [this, trainer] {
                         Register(trainer);
                         if (trainer->memory == nullptr) return;
                         trainer->sent.emplace_back([this, trainer] {
                           return job_->ArenaMapped(trainer->session, channel_,
                                                    trainer->memory->Share());
                         });
                       }});
    return;
  }
  if (trainer->step == 0 || trainer->step > options_.steps) return;
  if (!trainer->healed) {
    for (const Trainer* source : present_) {
      if (!source->alive || !source->healed || source->step != trainer->step) continue;
      events->push_back(
          {absl::StrCat(who, "is healed from rank ", source->session.rank), [trainer, source] {
             trainer->state = source->state;
             trainer->healed = true;
           }});
    }
    return;
  }
  if (trainer->ended) return;
  if (trainer->written < kHalves * (trainer->marked + 1) && trainer->marked < kBuckets) {
    events->push_back({who + "writes half a bucket", [this, trainer] {
                         const int bucket = BucketOf(*trainer, trainer->written / kHalves);
                         const int half = trainer->written % kHalves;
                         At(*trainer, bucket)[half] = Term(trainer->session.rank, trainer->step,
                                                           trainer->state, bucket, half);
                         ++trainer->written;
                       }});
  } else if (trainer->marked < kBuckets) {
    const int bucket = BucketOf(*trainer, trainer->marked);
    events->push_back({absl::StrCat(who, "marks bucket ", bucket), [this, trainer, bucket] {
                         ++trainer->marked;
                         trainer->sent.emplace_back([this, trainer, bucket, step = trainer->step] {
                           return job_->MarkReady(trainer->session, channel_, step,
                                                  {static_cast<std::uint32_t>(bucket)});
                         });
                       }});
  } else {
    events->push_back({who + "ends the step", [this, trainer] {
                         trainer->ended = true;
                         trainer->sent.emplace_back([this, trainer, step = trainer->step] {
                           return job_->EndStep(trainer->session, channel_, step, "");
                         });
                       }});
  }
}

bool HoldWorld::MayDie(const Trainer& trainer) const {
  if (deaths_left_ == 0) return false;
  // Some rank that has the state lives on, and the job knows that it has.
  return std::any_of(present_.begin(), present_.end(), [&](const Trainer* other) {
    return other != &trainer && other->alive && job_->StateOf(other->session) == RankState::kLive;
  });
}

bool HoldWorld::IsCopiedTo(const Trainer& trainer) const {
  const bool came_back = trainer.session.incarnation > options_.ranks;
  if (!came_back || !trainer.sent.empty() || executor_.pending() == 0) return false;
  for (int bucket = 0; bucket < kBuckets; ++bucket) {
    if (!HasMarked(trainer, bucket) || Owns(trainer, bucket)) continue;
    const bool held = std::any_of(reducer_.held.begin(), reducer_.held.end(), [&](const auto& one) {
      return static_cast<int>(one.operation->bucket) == bucket;
    });
    const std::string missing = job_->MissingInStep(channel_, trainer.step);
    const bool waits = missing.find(absl::StrCat("bucket ", bucket)) != std::string::npos;
    if (!held && !waits) {
      return true;
    }
  }
  return false;
}

DeathPhase HoldWorld::PhaseOf(const Trainer& trainer) const {
  if (IsCopiedTo(trainer)) return DeathPhase::kCopying;
  if (!trainer.healed) return DeathPhase::kHealing;
  if (!trainer.sink->Of<StepDoneMessage>().empty()) return DeathPhase::kCommitted;
  if (trainer.ended) return DeathPhase::kEnded;
  for (const auto& held : reducer_.held) {
    if (HasMarked(trainer, static_cast<int>(held.operation->bucket))) return DeathPhase::kInFlight;
  }
  return trainer.marked > 0 ? DeathPhase::kMarked : DeathPhase::kUnmarked;
}

void HoldWorld::AddDeath(Trainer* trainer, std::vector<Event>* events) {
  // Rare, so that deaths come at every moment of the run.
  // A copy is short.
  const std::uint64_t rarity = IsCopiedTo(*trainer) ? 2 : kDeathRarity;
  if (!MayDie(*trainer) || random_() % rarity != 0) return;
  events->push_back(
      {absl::StrCat("rank ", trainer->session.rank, "/", trainer->session.incarnation, " dies"),
       [this, trainer] {
         ++(*deaths_)[static_cast<std::size_t>(PhaseOf(*trainer))];
         --deaths_left_;
         trainer->alive = false;
       }});
}

void HoldWorld::MoveHalf(std::size_t index) {
  HalvesReducer::Held& held = reducer_.held[index];
  const HostBuffers& buffers = held.operation->host().buffers;
  const int half = held.moves % kHalves;
  if (held.moves < kHalves) {
    for (const std::byte* buffer : buffers) {
      held.sums[static_cast<std::size_t>(half)] += reinterpret_cast<const double*>(buffer)[half];
    }
  } else {
    for (std::byte* buffer : buffers) {
      reinterpret_cast<double*>(buffer)[half] = held.sums[static_cast<std::size_t>(half)];
    }
  }
  if (++held.moves < 2 * kHalves) return;
  ReduceOperation* const operation = held.operation;
  operation->stats = {held.sums[0] * held.sums[0] + held.sums[1] * held.sums[1], 0};
  reducer_.held.erase(reducer_.held.begin() + static_cast<std::ptrdiff_t>(index));
  operation->done({clock_.NowNs(), clock_.NowNs()});
}

void HoldWorld::ReadMessages(Trainer* trainer) {
  for (const SessionMessage& message : trainer->sink->Take()) {
    if (const auto* ready = std::get_if<LayoutReadyMessage>(&message)) {
      trainer->step = ready->first_step;
      trainer->first = static_cast<int>(random_() % kBuckets);
    } else if (const auto* done = std::get_if<StepDoneMessage>(&message)) {
      ReadVerdict(trainer, *done->record);
    } else if (const auto* end = std::get_if<SessionEndMessage>(&message)) {
      Violate(absl::StrCat("the session of rank ", trainer->session.rank,
                           " has ended: ", end->status.ToString()));
    }
  }
}

void HoldWorld::ReadVerdict(Trainer* trainer, const StepRecord& record) {
  const std::string who =
      absl::StrCat("rank ", trainer->session.rank, ", step ", record.times.step, ": ");
  if (record.times.step != trainer->step || !trainer->ended) {
    return Violate(who + "a verdict for another step than its own");
  }
  if (!record.verdict.ok()) return Violate(who + record.verdict.ToString());
  std::uint64_t next = Mix(trainer->state, trainer->step);
  for (int bucket = 0; bucket < kBuckets; ++bucket) {
    if (trainer->memory->done(static_cast<std::size_t>(bucket)) != trainer->step) {
      Violate(absl::StrCat(who, "bucket ", bucket, " is not done"));
    }
    for (int half = 0; half < kHalves; ++half) {
      double expected = 0;
      for (std::uint32_t rank = 0; rank < options_.ranks; ++rank) {
        expected += Term(rank, trainer->step, trainer->state, bucket, half);
      }
      const double sum = At(*trainer, bucket)[half];
      if (sum != expected) {
        Violate(
            absl::StrCat(who, "bucket ", bucket, ", half ", half, " is ", sum, ", not ", expected));
      }
      next = Mix(next, static_cast<std::uint64_t>(sum));
    }
  }
  trainer->state = next;
  ++trainer->step;
  trainer->written = trainer->marked = 0;
  trainer->ended = false;
  trainer->first = static_cast<int>(random_() % kBuckets);
}

// ---- Running ------------------------------------------------------------------------------------

void HoldWorld::Violate(const std::string& what) {
  if (violation_.empty()) violation_ = absl::StrCat(what, "\nafter\n", absl::StrJoin(past_, "\n"));
}

void HoldWorld::RunChecked(const Event& event) {
  past_.push_back(event.name);
  if (past_.size() > kPastKept) past_.pop_front();
  struct Owned {
    const Trainer* trainer;
    int bucket;
    std::array<double, kHalves> values;
  };
  std::vector<Owned> owned;
  for (const auto& trainer : trainers_) {
    for (int bucket = 0; event.of_daemon && bucket < kBuckets; ++bucket) {
      if (!Owns(*trainer, bucket)) continue;
      const double* const values = At(*trainer, bucket);
      owned.push_back({trainer.get(), bucket, {values[0], values[1]}});
    }
  }
  event.run();
  for (const Owned& one : owned) {
    const double* const values = At(*one.trainer, one.bucket);
    if (values[0] != one.values[0] || values[1] != one.values[1]) {
      Violate(absl::StrCat("the daemon wrote to bucket ", one.bucket, " of rank ",
                           one.trainer->session.rank, ", which owns it"));
    }
  }
  if (job_->HasEnded()) Violate("the job has ended: " + job_->Snapshot().failure);
}

std::string HoldWorld::Run() {
  const auto through = [this](const Trainer* trainer) { return trainer->step > options_.steps; };
  while (violation_.empty()) {
    if (std::all_of(present_.begin(), present_.end(), through)) break;
    const std::vector<Event> events = Enabled();
    if (events.empty()) {
      Violate("nothing can happen any more, but a step is not complete: " +
              job_->MissingInStep(channel_, present_[0]->step));
      break;
    }
    RunChecked(events[random_() % events.size()]);
  }
  if (violation_.empty()) CheckEnd();
  return violation_;
}

void HoldWorld::CheckEnd() {
  executor_.RunAll();
  const Trainer* const healed = *std::find_if(
      present_.begin(), present_.end(), [](const Trainer* trainer) { return trainer->healed; });
  for (const Trainer* trainer : present_) {
    // A rank that came back after the last step has nothing to be healed for.
    if (trainer->healed && trainer->state != healed->state) {
      Violate("the ranks have different states");
    }
  }
  for (const auto& trainer : trainers_) {
    if (trainer.get() == present_[trainer->session.rank] || trainer->memory == nullptr) continue;
    if (trainer->memory->Shared()) Violate("the daemon keeps the memory of a lost session");
  }
}

}  // namespace gradsync::daemon
