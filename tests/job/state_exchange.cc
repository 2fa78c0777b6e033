#include "tests/job/state_exchange.h"

#include <algorithm>
#include <array>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kNonsense = 0xDEADDEADDEADDEADull;
constexpr std::size_t kWordBytes = sizeof(std::uint64_t);
// A fault comes at one of so many chances.
constexpr std::size_t kFaultRarity = 4;
constexpr std::uint64_t kHasteNs = 10'000'000'000;

// One item per word.
std::vector<StateDigest> DigestsOf(const ModelState& state) {
  std::vector<StateDigest> digests;
  for (const std::uint64_t word : state.Image()) {
    std::string digest(32, '\0');
    for (std::size_t i = 0; i < kWordBytes; ++i) digest[i] = static_cast<char>(word >> (8 * i));
    digests.push_back({absl::StrCat("word", digests.size()), std::move(digest)});
  }
  return digests;
}

}  // namespace

StateExchange::StateExchange(ModelRun* run, RankSession session, Send send)
    : run_(run),
      session_(session),
      send_(std::move(send)),
      staging_(std::make_shared<std::vector<std::uint64_t>>(kStagingWords, kNonsense)) {}

void StateExchange::Scribble() { std::fill(staging_->begin(), staging_->end(), kNonsense); }

StagingMemory StateExchange::Staging() const {
  return {staging_, reinterpret_cast<std::byte*>(staging_->data()), kStagingWords * kWordBytes};
}

// ---- Events -------------------------------------------------------------------------------------

void StateExchange::AddActions(bool lacks, bool waits, bool frozen,
                               std::vector<Action>* actions) const {
  const auto fault = [this](int left) { return left > 0 && run_->Random(kFaultRarity) == 0; };
  const Faults& left = run_->faults;
  if (lacks) {
    if (!asked_) actions->push_back(Action::kFetch);
    if (fault(left.hasty)) {
      actions->push_back(!asked_                           ? Action::kFetchHastily
                         : loaded_ && run_->Random(2) == 0 ? Action::kConfirmAgain
                                                           : Action::kFetchAgain);
    }
  }
  if (due_.has_value()) actions->push_back(Action::kReadChunk);
  if (transfer_ != 0 && image_.size() == ModelState::kWords && !due_.has_value() && !loaded_) {
    actions->push_back(Action::kLoad);
    if (fault(left.wrong_loads)) actions->push_back(Action::kLoadWrongly);
    if (fault(left.bad_loads)) actions->push_back(Action::kLoadBadly);
  }
  if (!question_.has_value()) return;
  const Question& question = *question_;
  if (question.cancelled) return actions->push_back(Action::kStopReading);
  if (question.silent || !waits) return;
  // Nothing limits the time for digests but the request itself: a state may be large.
  const bool moves = question.offer && question.words < ModelState::kWords;
  if (moves && frozen && fault(left.silences)) actions->push_back(Action::kBeSilent);
  if (question.offer && !question.offered) {
    actions->push_back(Action::kOffer);
    if (fault(left.refusals)) actions->push_back(Action::kRefuse);
    return;
  }
  if (question.due.has_value()) actions->push_back(Action::kWriteChunk);
  if (!question.digests_sent) actions->push_back(Action::kSendDigests);
}

bool StateExchange::Do(Action action, ModelState* state) {
  switch (action) {
    case Action::kFetch:
      Fetch(/*hastily=*/false);
      return true;
    case Action::kFetchHastily:
      --run_->faults.hasty;
      Fetch(/*hastily=*/true);
      return true;
    case Action::kFetchAgain:
      --run_->faults.hasty;
      Fetch(/*hastily=*/false);
      return true;
    case Action::kConfirmAgain:
      --run_->faults.hasty;
      SendDigests(transfer_, *state);
      return true;
    case Action::kReadChunk:
      ReadChunk();
      return true;
    case Action::kLoad:
      Load(std::nullopt, state);
      return true;
    case Action::kLoadWrongly:
      --run_->faults.wrong_loads;
      Load(reason::kRanksDiverged, state);
      return true;
    case Action::kLoadBadly:
      --run_->faults.bad_loads;
      Load(reason::kStateRefused, state);
      return true;
    case Action::kStopReading:
      question_.reset();
      return true;
    case Action::kBeSilent:
      --run_->faults.silences;
      question_->silent = true;
      excused_ = true;
      return true;
    case Action::kOffer:
      Offer();
      return true;
    case Action::kRefuse:
      --run_->faults.refusals;
      send_([this, transfer = question_->transfer](Job* job) {
        excused_ = true;
        return job->RefuseState(session_, transfer, "no memory");
      });
      question_.reset();
      return true;
    case Action::kWriteChunk:
      WriteChunk(*state);
      return true;
    case Action::kSendDigests:
      question_->digests_sent = true;
      SendDigests(question_->transfer, *state);
      return true;
    default:
      return false;
  }
}

void StateExchange::SendDigests(std::uint64_t transfer, const ModelState& state) {
  send_([this, transfer, digests = DigestsOf(state)](Job* job) {
    answered_ = transfer;
    return job->TakeDigests(session_, transfer, digests);
  });
  if (!question_.has_value()) return;
  const bool has_written = !question_->offer || question_->words == ModelState::kWords;
  if (question_->digests_sent && has_written) question_.reset();
}

// ---- The source ---------------------------------------------------------------------------------

void StateExchange::Offer() {
  question_->offered = true;
  send_([this, transfer = question_->transfer](Job* job) {
    return job->OfferState(session_, transfer, ModelState::kWords * kWordBytes, Staging());
  });
}

void StateExchange::WriteChunk(const ModelState& state) {
  Question& question = *question_;
  const StateChunkMessage chunk = *question.due;
  question.due.reset();
  const auto image = state.Image();
  Scribble();
  for (std::size_t i = 0; i < chunk.bytes / kWordBytes; ++i) {
    (*staging_)[i] = image[question.words++];
  }
  send_([this, transfer = chunk.transfer, number = chunk.chunk](Job* job) {
    return job->StateWritten(session_, transfer, number);
  });
  if (question.digests_sent && question.words == ModelState::kWords) question_.reset();
}

// ---- The replacement ----------------------------------------------------------------------------

void StateExchange::Fetch(bool hastily) {
  if (asked_) {
    if (transfer_ != 0) {
      left_transfer_ = transfer_;
      left_loaded_ = loaded_;
    }
    const std::optional<Reason> fault = fault_;
    Forget();
    fault_ = fault;  // until the daemon has read this
  }
  asked_ = true;
  ++requests_;
  hasty_ = hastily;
  send_([this, hastily](Job* job) {
    return job->FetchState(session_, Staging(), hastily ? kHasteNs : 0);
  });
}

void StateExchange::ReadChunk() {
  for (std::size_t i = 0; i < due_->bytes / kWordBytes; ++i) image_.push_back((*staging_)[i]);
  send_([this, transfer = due_->transfer, chunk = due_->chunk](Job* job) {
    return job->StateRead(session_, transfer, chunk);
  });
  due_.reset();
}

void StateExchange::Load(std::optional<Reason> fault, ModelState* state) {
  std::array<std::uint64_t, ModelState::kWords> image;
  std::copy(image_.begin(), image_.end(), image.begin());
  fault_ = fault;
  loaded_ = true;
  if (fault.has_value() && fault->text() == reason::kStateRefused) {
    return send_([this, transfer = transfer_](Job* job) {
      return job->RefuseState(session_, transfer, "no such parameter");
    });
  }
  if (fault.has_value()) ++image[run_->Random(image.size())];
  *state = ModelState::Of(image);
  SendDigests(transfer_, *state);
}

void StateExchange::Forget() {
  transfer_ = 0;
  image_.clear();
  due_.reset();
  loaded_ = false;
  fault_.reset();
}

// ---- Messages -----------------------------------------------------------------------------------

std::string StateExchange::Receive(const SessionMessage& message, bool begun) {
  if (const auto* asked = std::get_if<StateQuestionMessage>(&message)) {
    if (!begun) return "asked for the state while it may change";
    if (question_.has_value() && !question_->cancelled) return "asked again during a transfer";
    question_ = Question{};
    question_->transfer = asked->transfer;
    question_->offer = asked->offer;
  } else if (const auto* begin = std::get_if<StateBeginMessage>(&message)) {
    if (requests_ == 0 || admitted_) return "a transfer begins, for which it did not ask";
    asked_ = true;
    if (begin->bytes != ModelState::kWords * kWordBytes) return "not the bytes that were offered";
    Forget();
    transfer_ = begin->transfer;
  } else if (const auto* chunk = std::get_if<StateChunkMessage>(&message)) {
    if (!chunk->write) {
      if (chunk->transfer <= left_transfer_) return "";
      if (chunk->transfer != transfer_ || due_.has_value()) return "a chunk of another transfer";
      due_ = *chunk;
    } else if (question_.has_value() && question_->transfer == chunk->transfer) {
      if (question_->due.has_value()) return "asked for a chunk before it has written the last one";
      question_->due = *chunk;
    }
  } else if (const auto* admitted = std::get_if<StateAdmittedMessage>(&message)) {
    const bool loaded = admitted->transfer == left_transfer_ ? left_loaded_ : loaded_;
    const bool known = admitted->transfer == left_transfer_ || admitted->transfer == transfer_;
    if (!known || !loaded) return "admitted before it has loaded";
    if (fault_.has_value()) return "admitted with a wrong state";
    admitted_ = true;
  } else if (const auto* cancelled = std::get_if<StateCancelledMessage>(&message)) {
    if (cancelled->transfer == transfer_ && !admitted_) Forget();
    if (question_.has_value() && question_->transfer == cancelled->transfer) StopReading();
  } else if (std::holds_alternative<StateFailedMessage>(message)) {
    if (admitted_ || requests_ == 0) return "a failure of no request";
    --requests_;
    Forget();
    asked_ = false;
  }
  return "";
}

}  // namespace gradsync::daemon
