#include "daemon/job/state_healing.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/base/error.h"
#include "daemon/job/pieces.h"
#include "daemon/job/rank_list.h"
#include "proto/gradsync/duration_text.h"

namespace gradsync::daemon {
namespace {

// The first item in which two ranks differ: "'fc.weight' differs". Empty if they are the same.
std::string FirstDifference(const StateTransfer::Digests& a, std::uint32_t rank,
                            const std::vector<StateDigest>& b) {
  const std::size_t common = std::min(a.items.size(), b.size());
  for (std::size_t i = 0; i < common; ++i) {
    if (a.items[i].name != b[i].name) {
      return absl::StrCat("item ", i, " is '", a.items[i].name, "' on rank ", a.rank, ", '",
                          b[i].name, "' on rank ", rank);
    }
    if (a.items[i].sha256 != b[i].sha256) {
      return absl::StrCat("'", a.items[i].name, "' differs");
    }
  }
  if (a.items.size() == b.size()) return "";
  const bool a_has_more = a.items.size() > common;
  return absl::StrCat("'", (a_has_more ? a.items : b)[common].name, "' is only on rank ",
                      a_has_more ? a.rank : rank);
}

}  // namespace

// ---- StateTransfer ------------------------------------------------------------------------------

std::uint64_t StateTransfer::chunk_bytes() const {
  return std::min({from_.bytes, to_.bytes, bytes_ - moved_});
}

void StateTransfer::Offer(std::uint64_t bytes, StagingMemory staging, std::uint64_t now_ns) {
  bytes_ = bytes;
  from_ = std::move(staging);
  since_ns_ = now_ns;
  phase_ = Phase::kWriting;
}

void StateTransfer::Written(std::uint64_t now_ns) {
  since_ns_ = now_ns;
  phase_ = Phase::kCopying;
}

void StateTransfer::Copied(std::uint64_t now_ns) {
  since_ns_ = now_ns;  // the replacement's time for the chunk begins
  phase_ = Phase::kReading;
}

void StateTransfer::Read(std::uint64_t now_ns) {
  moved_ += chunk_bytes();
  ++chunk_;
  since_ns_ = now_ns;  // the source's time for the next chunk begins
  phase_ = moved_ == bytes_ ? Phase::kLoading : Phase::kWriting;
}

std::vector<StateTransfer::Asked>::iterator StateTransfer::PlaceOf(std::uint32_t rank) {
  return std::lower_bound(
      asked_.begin(), asked_.end(), rank,
      [](const Asked& asked, std::uint32_t sought) { return asked.session.rank < sought; });
}

void StateTransfer::Ask(RankSession session, std::optional<std::uint64_t> frozen_ns) {
  asked_.insert(PlaceOf(session.rank), Asked{session, false, frozen_ns});
}

StateTransfer::Asked* StateTransfer::FindAsked(std::uint32_t rank) {
  const auto place = PlaceOf(rank);
  return place == asked_.end() || place->session.rank != rank ? nullptr : &*place;
}

void StateTransfer::Drop(std::uint32_t rank) {
  asked_.erase(std::remove_if(asked_.begin(), asked_.end(),
                              [rank](const Asked& asked) { return asked.session.rank == rank; }),
               asked_.end());
}

bool StateTransfer::AllAnswered() const {
  return std::all_of(asked_.begin(), asked_.end(),
                     [](const Asked& asked) { return asked.answered; });
}

// ---- Messages of ranks --------------------------------------------------------------------------

absl::Status StateHealing::Breach(std::uint32_t rank, absl::string_view what) const {
  return MakeError(absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation,
                   absl::StrCat("rank ", rank, ": ", what),
                   {{field::kJob, terms_.job_id}, {field::kRank, rank}});
}

absl::Status StateHealing::CheckTransfer(std::uint32_t rank, std::uint64_t transfer,
                                         absl::string_view message, bool* current) const {
  *current = transfer_.has_value() && transfer == transfer_->number();
  if (transfer >= 1 && transfer <= transfers_) return absl::OkStatus();
  return Breach(rank, absl::StrCat(message, " of transfer ", transfer, ", which has not begun"));
}

std::vector<StateHealing::Request>::iterator StateHealing::RequestOf(RankSession replacement) {
  return std::find_if(requests_.begin(), requests_.end(), [replacement](const Request& request) {
    return request.replacement == replacement;
  });
}

bool StateHealing::HasGivenUp(const Request& request, RankSession session) {
  return std::any_of(request.given_up.begin(), request.given_up.end(),
                     [session](const GivenUp& given_up) { return given_up.session == session; });
}

bool StateHealing::IsGivenUp(std::uint32_t rank) const {
  const RankSession session = members_->SessionOf(rank);
  return std::any_of(requests_.begin(), requests_.end(), [&](const Request& request) {
    return request.replacement == transfer_->replacement() && HasGivenUp(request, session);
  });
}

bool StateHealing::IsLoading(RankSession replacement) const {
  const Member& member = (*members_)[replacement.rank];
  return member.state == RankState::kLoading && member.incarnation == replacement.incarnation;
}

absl::Status StateHealing::Fetch(std::uint32_t rank, StagingMemory staging,
                                 std::uint64_t deadline_ns, DeferredActions* actions) {
  const RankSession session = members_->SessionOf(rank);
  // It asked again while StateAdmitted was on its way.
  if ((*members_)[rank].state == RankState::kHealing) return absl::OkStatus();
  if (!IsLoading(session)) {
    return Breach(rank, "FetchState, but this session does not wait for the state of the model");
  }
  if (stopped_) return absl::OkStatus();  // the session is about to end
  if (transfer_.has_value() && transfer_->replacement() == session) Cancel(actions);
  const auto before = RequestOf(session);
  if (before == requests_.end()) {
    requests_.push_back({session, std::move(staging), deadline_ns, {}});
  } else {
    before->deadline_ns = deadline_ns;
  }
  return absl::OkStatus();
}

absl::Status StateHealing::Offer(std::uint32_t rank, std::uint64_t transfer, std::uint64_t bytes,
                                 StagingMemory staging, std::uint64_t now_ns,
                                 DeferredActions* actions) {
  bool current = false;
  const absl::Status begun = CheckTransfer(rank, transfer, "StateOffer", &current);
  if (!begun.ok() || !current) return begun;
  if (transfer_->source().rank != rank || transfer_->phase() != StateTransfer::Phase::kOffering) {
    return Breach(rank, "StateOffer, which nobody asked for");
  }
  transfer_->Offer(bytes, std::move(staging), now_ns);
  members_->Send(transfer_->replacement().rank, StateBeginMessage{transfer, bytes, rank}, actions);
  AskChunk(actions);
  return absl::OkStatus();
}

void StateHealing::AskChunk(DeferredActions* actions) {
  members_->Send(transfer_->source().rank,
                 StateChunkMessage{transfer_->number(), transfer_->chunk(),
                                   transfer_->chunk_bytes(), /*write=*/true},
                 actions);
}

absl::Status StateHealing::Written(std::uint32_t rank, std::uint64_t transfer, std::uint64_t chunk,
                                   std::uint64_t now_ns, DeferredActions* actions) {
  bool current = false;
  const absl::Status begun = CheckTransfer(rank, transfer, "StateWritten", &current);
  if (!begun.ok() || !current) return begun;
  if (transfer_->source().rank != rank || transfer_->phase() != StateTransfer::Phase::kWriting ||
      chunk != transfer_->chunk()) {
    return Breach(rank, absl::StrCat("chunk ", chunk, " of the state written out of order"));
  }
  transfer_->Written(now_ns);
  copying_ = true;
  // Runs without the lock, so it holds references that keep the memory mapped.
  const StagingMemory from = transfer_->from(), to = transfer_->to();
  Pieces copy([from, to, copied = copied_] { copied(); });
  copy.AddCopy(to.data, from.data, transfer_->chunk_bytes());
  copy.Begin(actions);
  return absl::OkStatus();
}

void StateHealing::Copied(std::uint64_t now_ns, DeferredActions* actions) {
  copying_ = false;
  if (!transfer_.has_value()) return;
  transfer_->Copied(now_ns);
  members_->Send(transfer_->replacement().rank,
                 StateChunkMessage{transfer_->number(), transfer_->chunk(),
                                   transfer_->chunk_bytes(), /*write=*/false},
                 actions);
}

absl::Status StateHealing::Read(std::uint32_t rank, std::uint64_t transfer, std::uint64_t chunk,
                                std::uint64_t now_ns, DeferredActions* actions) {
  bool current = false;
  const absl::Status begun = CheckTransfer(rank, transfer, "StateRead", &current);
  if (!begun.ok() || !current) return begun;
  if (transfer_->replacement().rank != rank ||
      transfer_->phase() != StateTransfer::Phase::kReading || chunk != transfer_->chunk()) {
    return Breach(rank, absl::StrCat("chunk ", chunk, " of the state read out of order"));
  }
  transfer_->Read(now_ns);
  if (transfer_->phase() == StateTransfer::Phase::kWriting) AskChunk(actions);
  return absl::OkStatus();
}

absl::Status StateHealing::TakeDigests(std::uint32_t rank, std::uint64_t transfer,
                                       std::vector<StateDigest> items,
                                       ArenaQuota::Reservation charge, std::uint64_t now_ns) {
  bool current = false;
  const absl::Status begun = CheckTransfer(rank, transfer, "StateDigests", &current);
  if (!begun.ok() || !current) return begun;
  if (transfer_->replacement().rank == rank) {
    if (transfer_->phase() != StateTransfer::Phase::kLoading) {
      return Breach(rank, "StateDigests before it has read the whole state");
    }
    // The last ones count: a trainer may confirm again while it waits.
    transfer_->loaded = StateTransfer::Digests{rank, std::move(items), std::move(charge)};
    transfer_->loaded_ns = now_ns;
    return absl::OkStatus();
  }
  StateTransfer::Asked* const asked = transfer_->FindAsked(rank);
  if (asked == nullptr && IsGivenUp(rank)) return absl::OkStatus();  // too late
  if (asked == nullptr || asked->answered) {
    return Breach(rank, "StateDigests, which nobody asked for");
  }
  asked->answered = true;
  if (!transfer_->survivor.has_value()) {
    transfer_->survivor = StateTransfer::Digests{rank, std::move(items), std::move(charge)};
    return absl::OkStatus();
  }
  const std::string difference = FirstDifference(*transfer_->survivor, rank, items);
  if (difference.empty()) return absl::OkStatus();
  diverged_ = MakeError(
      absl::StatusCode::kFailedPrecondition, reason::kRanksDiverged,
      absl::StrCat("ranks ", transfer_->survivor->rank, " and ", rank, " of job '", terms_.job_id,
                   "' have different states of the model: ", difference,
                   ". No rank can be healed from them. Start every rank from the same checkpoint; "
                   "find the difference with check_in_sync."),
      {{field::kJob, terms_.job_id},
       {field::kRank, rank},
       {field::kOtherRank, transfer_->survivor->rank}});
  return absl::OkStatus();
}

absl::Status StateHealing::Refuse(std::uint32_t rank, std::uint64_t transfer, absl::string_view why,
                                  DeferredActions* actions) {
  bool current = false;
  const absl::Status begun = CheckTransfer(rank, transfer, "StateRefused", &current);
  if (!begun.ok() || !current) return begun;
  std::string cannot = absl::StrCat("cannot read its state: ", why);
  if (transfer_->source().rank == rank) {
    GiveUpSource(std::move(cannot), actions);
    return absl::OkStatus();
  }
  if (transfer_->replacement().rank != rank) {
    if (IsGivenUp(rank)) return absl::OkStatus();
    if (transfer_->FindAsked(rank) == nullptr) {
      return Breach(rank, "StateRefused, but nobody asked it");
    }
    RequestOf(transfer_->replacement())
        ->given_up.push_back({members_->SessionOf(rank), std::move(cannot)});
    transfer_->Drop(rank);
    return absl::OkStatus();
  }
  return MakeError(
      absl::StatusCode::kFailedPrecondition, reason::kStateRefused,
      absl::StrCat("rank ", rank, " of job '", terms_.job_id, "' cannot load the state that rank ",
                   transfer_->source().rank, " gave it: ", why),
      {{field::kJob, terms_.job_id}, {field::kRank, rank}});
}

// ---- The course of a transfer -------------------------------------------------------------------

absl::Status StateHealing::Update(StandingOf standing_of, std::uint64_t now_ns,
                                  DeferredActions* actions) {
  if (stopped_) return absl::OkStatus();
  requests_.erase(
      std::remove_if(requests_.begin(), requests_.end(),
                     [this](const Request& request) { return !IsLoading(request.replacement); }),
      requests_.end());
  if (transfer_.has_value()) {
    const RankSession replacement = transfer_->replacement();
    bool goes_on = RequestOf(replacement) != requests_.end();
    for (const StateTransfer::Asked& asked : transfer_->asked()) {
      const bool same = members_->SessionOf(asked.session.rank) == asked.session;
      const Standing least = asked.frozen_ns.has_value() ? Standing::kFrozen : Standing::kBegun;
      goes_on = goes_on && same && standing_of(asked.session.rank, replacement.rank) >= least;
    }
    if (!goes_on || HasBetterSource(standing_of)) Cancel(actions);
  }
  if (!diverged_.ok()) return diverged_;
  if (transfer_.has_value()) {
    AskRanks(standing_of, now_ns, actions);
    MaybeAdmit(actions);
  }
  // A copy of an earlier transfer may still write to the replacement's staging memory.
  if (!transfer_.has_value() && !copying_) BeginNext(standing_of, now_ns, actions);
  return absl::OkStatus();
}

bool StateHealing::HasBetterSource(StandingOf standing_of) {
  if (transfer_->phase() != StateTransfer::Phase::kOffering) return false;
  const std::uint32_t replacement = transfer_->replacement().rank;
  if (standing_of(transfer_->source().rank, replacement) == Standing::kFrozen) return false;
  const Request& request = *RequestOf(transfer_->replacement());
  for (std::uint32_t rank = 0; rank < members_->world_size(); ++rank) {
    if (rank == replacement || HasGivenUp(request, members_->SessionOf(rank))) continue;
    if (standing_of(rank, replacement) == Standing::kFrozen) return true;
  }
  return false;
}

bool StateHealing::WasCompared(std::uint32_t rank) const {
  const Member& member = (*members_)[rank];
  return member.state == RankState::kHealing && !member.stepped;
}

void StateHealing::AskRanks(StandingOf standing_of, std::uint64_t now_ns,
                            DeferredActions* actions) {
  const RankSession replacement = transfer_->replacement();
  const Request& request = *RequestOf(replacement);
  for (std::uint32_t rank = 0; rank < members_->world_size(); ++rank) {
    if (rank == replacement.rank) continue;
    const RankSession session = members_->SessionOf(rank);
    const Standing standing = standing_of(rank, replacement.rank);
    const bool frozen = standing == Standing::kFrozen;
    if (StateTransfer::Asked* const asked = transfer_->FindAsked(rank); asked != nullptr) {
      if (!frozen || asked->frozen_ns.has_value()) continue;
      asked->frozen_ns = now_ns;
      if (session == transfer_->source()) transfer_->SourceFrozen(now_ns);
      continue;
    }
    if (standing < Standing::kBegun || HasGivenUp(request, session)) continue;
    if (!frozen && WasCompared(rank)) continue;
    transfer_->Ask(session, frozen ? std::optional(now_ns) : std::nullopt);
    members_->Send(rank, StateQuestionMessage{transfer_->number(), /*offer=*/false}, actions);
  }
}

void StateHealing::MaybeAdmit(DeferredActions* actions) {
  if (!transfer_->loaded.has_value() || !transfer_->AllAnswered()) return;
  const RankSession replacement = transfer_->replacement();
  const StateTransfer::Digests& survivor = *transfer_->survivor;
  const std::string difference =
      FirstDifference(survivor, replacement.rank, transfer_->loaded->items);
  if (difference.empty()) {
    members_->Admit(replacement.rank);
    members_->Send(replacement.rank, StateAdmittedMessage{transfer_->number()}, actions);
  } else {
    actions->breaches.emplace_back(
        replacement,
        MakeError(absl::StatusCode::kFailedPrecondition, reason::kRanksDiverged,
                  absl::StrCat("rank ", replacement.rank, " of job '", terms_.job_id,
                               "' came back after a loss, and has another state than rank ",
                               survivor.rank, " after it has loaded that rank's: ", difference,
                               ". Build the same model, and load every item as it came."),
                  {{field::kJob, terms_.job_id},
                   {field::kRank, replacement.rank},
                   {field::kOtherRank, survivor.rank}}));
  }
  requests_.erase(RequestOf(replacement));
  transfer_.reset();
}

void StateHealing::BeginNext(StandingOf standing_of, std::uint64_t now_ns,
                             DeferredActions* actions) {
  std::size_t looks = 0;
  for (std::size_t left = requests_.size(); left > 0 && looks < kLooksAtOnce; --left) {
    if (next_ >= requests_.size()) next_ = 0;
    const auto request = requests_.begin() + static_cast<std::ptrdiff_t>(next_);
    looks += members_->world_size();
    if (!TryBegin(*request, standing_of, now_ns, actions)) {
      Fail(request, Unavailable(*request), actions);
      continue;  // the one after it is at its place now
    }
    if (transfer_.has_value()) {
      next_ = 0;
      return;
    }
    ++next_;
  }
  if (next_ >= requests_.size()) next_ = 0;
}

bool StateHealing::TryBegin(const Request& request, StandingOf standing_of, std::uint64_t now_ns,
                            DeferredActions* actions) {
  bool hope = false;
  std::optional<RankSession> source;
  Standing best = Standing::kHasState;
  for (std::uint32_t rank = 0; rank < members_->world_size(); ++rank) {
    const RankSession session = members_->SessionOf(rank);
    if (rank == request.replacement.rank || HasGivenUp(request, session)) continue;
    const Standing standing = standing_of(rank, request.replacement.rank);
    hope = hope || standing != Standing::kNone;
    if (standing <= best) continue;
    best = standing;
    source = session;
    if (best == Standing::kFrozen) break;
  }
  if (!source.has_value()) return hope;
  transfer_.emplace(++transfers_, *source, request.replacement, request.staging, now_ns);
  transfer_->Ask(*source, std::nullopt);
  members_->Send(source->rank, StateQuestionMessage{transfers_, /*offer=*/true}, actions);
  AskRanks(standing_of, now_ns, actions);
  return true;
}

void StateHealing::Cancel(DeferredActions* actions) {
  const StateCancelledMessage cancelled{transfer_->number()};
  for (const StateTransfer::Asked& asked : transfer_->asked()) {
    // Another session may have the rank by now.
    if (!(members_->SessionOf(asked.session.rank) == asked.session)) continue;
    members_->Send(asked.session.rank, cancelled, actions);
  }
  const bool told = transfer_->phase() != StateTransfer::Phase::kOffering;
  const RankSession replacement = transfer_->replacement();
  if (told && members_->SessionOf(replacement.rank) == replacement) {
    members_->Send(replacement.rank, cancelled, actions);
  }
  transfer_.reset();
}

void StateHealing::GiveUpSource(std::string why, DeferredActions* actions) {
  RequestOf(transfer_->replacement())->given_up.push_back({transfer_->source(), std::move(why)});
  Cancel(actions);
}

void StateHealing::Tick(std::uint64_t now_ns, DeferredActions* actions) {
  if (transfer_.has_value() && transfer_->WaitsForSource() &&
      now_ns >= transfer_->since_ns() + kSilenceNs) {
    GiveUpSource(absl::StrCat("has said nothing for ", DurationText(absl::Nanoseconds(kSilenceNs))),
                 actions);
  }
  if (transfer_.has_value() && transfer_->WaitsForReplacement()) {
    GiveUpSlowReplacement(now_ns, actions);
  }
  if (transfer_.has_value() && transfer_->loaded.has_value()) GiveUpSilent(now_ns, actions);
  for (auto request = requests_.begin(); request != requests_.end();) {
    if (now_ns < request->deadline_ns) {
      ++request;
      continue;
    }
    request = Fail(request, TimedOut(*request), actions);
  }
}

void StateHealing::GiveUpSlowReplacement(std::uint64_t now_ns, DeferredActions* actions) {
  // It may not look at the first chunk before it has loaded what an earlier transfer brought.
  const bool reads = transfer_->phase() == StateTransfer::Phase::kReading && transfer_->chunk() > 0;
  const std::uint64_t patience_ns =
      reads ? kSilenceNs : kLoadNs + transfer_->bytes() * kHashNsPerByte;
  if (now_ns < transfer_->since_ns() + patience_ns) return;
  const auto request = RequestOf(transfer_->replacement());
  Fail(request, TooSlow(*request, patience_ns), actions);
}

std::vector<StateHealing::Request>::iterator StateHealing::Fail(
    std::vector<Request>::iterator request, absl::Status why, DeferredActions* actions) {
  members_->Send(request->replacement.rank, StateFailedMessage{std::move(why)}, actions);
  if (transfer_.has_value() && transfer_->replacement() == request->replacement) Cancel(actions);
  return requests_.erase(request);
}

void StateHealing::GiveUpSilent(std::uint64_t now_ns, DeferredActions* actions) {
  const std::uint64_t patience_ns = kSilenceNs + transfer_->bytes() * kHashNsPerByte;
  std::vector<RankSession> silent;
  for (const StateTransfer::Asked& asked : transfer_->asked()) {
    if (asked.answered || !asked.frozen_ns.has_value()) continue;
    if (now_ns < std::max(*asked.frozen_ns, transfer_->loaded_ns) + patience_ns) continue;
    silent.push_back(asked.session);
  }
  const std::string why =
      absl::StrCat("has sent no digests for ", DurationText(absl::Nanoseconds(patience_ns)));
  if (std::find(silent.begin(), silent.end(), transfer_->source()) != silent.end()) {
    return GiveUpSource(why, actions);
  }
  for (const RankSession session : silent) {
    RequestOf(transfer_->replacement())->given_up.push_back({session, why});
    transfer_->Drop(session.rank);
  }
}

void StateHealing::Stop(DeferredActions* actions) {
  stopped_ = true;
  if (transfer_.has_value()) Cancel(actions);
  requests_.clear();
}

// ---- For people ---------------------------------------------------------------------------------

std::vector<std::string> StateHealing::Refusals(const Request& request) {
  std::vector<std::string> whys;
  for (const GivenUp& given_up : request.given_up) {
    if (whys.size() == RankList::kNamed) {
      whys.push_back(absl::StrCat(request.given_up.size() - whys.size(), " more"));
      break;
    }
    whys.push_back(absl::StrCat("rank ", given_up.session.rank, " ", given_up.why));
  }
  return whys;
}

absl::Status StateHealing::Unavailable(const Request& request) const {
  const std::vector<std::string> whys = Refusals(request);
  return MakeError(absl::StatusCode::kUnavailable, reason::kStateUnavailable,
                   absl::StrCat("no rank of job '", terms_.job_id, "' gives rank ",
                                request.replacement.rank, " the state of the model: ",
                                whys.empty() ? "no survivor has it" : absl::StrJoin(whys, "; "),
                                ". Correct that, and fetch again."),
                   {{field::kJob, terms_.job_id}, {field::kRank, request.replacement.rank}});
}

std::string StateHealing::Waiting(const Request& request) const {
  const bool served = transfer_.has_value() && transfer_->replacement() == request.replacement;
  if (!served && transfer_.has_value()) {
    return absl::StrCat("rank ", transfer_->replacement().rank, " is being healed first");
  }
  if (!served) return "no rank that has the state has begun the step";
  const std::uint32_t source = transfer_->source().rank;
  switch (transfer_->phase()) {
    case StateTransfer::Phase::kOffering:
      return absl::StrCat("rank ", source, " has not offered its state");
    case StateTransfer::Phase::kWriting:
      return absl::StrCat("rank ", source, " has not written chunk ", transfer_->chunk());
    case StateTransfer::Phase::kCopying:
      return absl::StrCat("chunk ", transfer_->chunk(), " is being copied");
    case StateTransfer::Phase::kReading:
      return absl::StrCat("this rank has not read chunk ", transfer_->chunk());
    case StateTransfer::Phase::kLoading:
      break;
  }
  RankList late;
  for (const StateTransfer::Asked& asked : transfer_->asked()) {
    if (!asked.answered) late.Add(asked.session.rank);
  }
  if (!transfer_->loaded.has_value()) late.Add(request.replacement.rank);
  return absl::StrCat("no digests of rank ", late.Text());
}

absl::Status StateHealing::TimedOut(const Request& request) const {
  std::vector<std::string> whys = Refusals(request);
  whys.insert(whys.begin(), Waiting(request));
  return MakeError(
      absl::StatusCode::kDeadlineExceeded, reason::kStateUnavailable,
      absl::StrCat("rank ", request.replacement.rank, " of job '", terms_.job_id,
                   "' did not get the state of the model in time: ", absl::StrJoin(whys, "; "),
                   ". Look at those ranks, and fetch again."),
      {{field::kJob, terms_.job_id}, {field::kRank, request.replacement.rank}});
}

absl::Status StateHealing::TooSlow(const Request& request, std::uint64_t patience_ns) const {
  const std::string what =
      transfer_->phase() == StateTransfer::Phase::kReading
          ? absl::StrCat("has not read chunk ", transfer_->chunk(), " of the state of the model")
          : "has read the state of the model, and has not confirmed it";
  return MakeError(
      absl::StatusCode::kDeadlineExceeded, reason::kStateUnavailable,
      absl::StrCat("rank ", request.replacement.rank, " of job '", terms_.job_id, "' ", what,
                   " within ", DurationText(absl::Nanoseconds(patience_ns)),
                   ", and other replacements may wait for it. Look at what it does, and fetch "
                   "again."),
      {{field::kJob, terms_.job_id}, {field::kRank, request.replacement.rank}});
}

std::optional<HealingSnapshot> StateHealing::Snapshot() const {
  if (!transfer_.has_value()) return std::nullopt;
  return HealingSnapshot{transfer_->replacement().rank, transfer_->source().rank,
                         transfer_->moved(), transfer_->bytes()};
}

}  // namespace gradsync::daemon
