#include "daemon/job/operation_channel.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "daemon/job/pieces.h"
#include "daemon/job/rank_list.h"
#include "proto/gradsync/limits.h"

namespace gradsync::daemon {
namespace {

// The number of operations that are kept for late ranks. A rank that is further behind gets a
// failure without details.
constexpr std::size_t kKeptOperations = 64;
constexpr std::uint64_t kNoDeadline = ~std::uint64_t{0};

}  // namespace

bool OperationSpec::operator==(const OperationSpec& other) const {
  return kind == other.kind && root == other.root && bytes == other.bytes && dtype == other.dtype &&
         count == other.count && op == other.op;
}

std::string OperationSpec::Describe() const {
  switch (kind) {
    case OperationKind::kBarrier:
      return "barrier";
    case OperationKind::kBroadcast:
      return absl::StrCat(
          "broadcast of ", bytes, " bytes from ",
          root == kRootIsLowestLive ? "the lowest live rank" : absl::StrCat("rank ", root));
    case OperationKind::kAllReduce:
      return absl::StrCat("all-reduce (", ReduceOpName(op), ") of ", count, " ",
                          DataTypeName(dtype));
  }
  return "";
}

OperationChannel::OperationChannel(const JobTerms& terms, Membership* members, OnMoved reduced,
                                   OnMoved copied)
    : terms_(terms), members_(members), copied_(std::move(copied)), ranks_(members->world_size()) {
  reduction_.user = terms.user;
  reduction_.flow = terms.flow;
  reduction_.done = [this, reduced = std::move(reduced)](const ReduceTimes&) {
    reduced(reduction_.failure);
  };
  broadcast_.flow = terms.flow;
  broadcast_.done = [this](const ReduceTimes&) { copied_(broadcast_.failure); };
}

absl::Status OperationChannel::Breach(std::uint32_t rank, std::uint64_t sequence,
                                      absl::string_view what) const {
  return MakeError(
      absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation,
      absl::StrCat("rank ", rank, ", operation ", sequence, " of the job's channel: ", what),
      {{field::kJob, terms_.job_id}, {field::kRank, rank}, {field::kChannel, 0}});
}

absl::Status OperationChannel::Join(std::uint32_t rank, std::uint64_t sequence,
                                    const OperationSpec& spec, StagingMemory staging,
                                    std::uint64_t deadline_ns, DeferredActions* actions) {
  if (state_ == State::kCutMoving || state_ == State::kCut) {
    return absl::OkStatus();  // the session is about to end
  }
  RankOperation& mine = ranks_[rank];
  if (mine.waiting) return Breach(rank, sequence, "begun before the last one was answered");
  if (sequence != mine.sequence + 1) {
    return Breach(rank, sequence,
                  absl::StrCat("out of order; the next one is ", mine.sequence + 1));
  }
  if (state_ != State::kIdle && sequence > sequence_) {
    return Breach(rank, sequence,
                  absl::StrCat("begun before the other ranks had ended operation ", sequence_));
  }
  mine.sequence = sequence;
  if (sequence <= sequence_ && !(state_ != State::kIdle && sequence == sequence_)) {
    const absl::Status answer = AnswerLate(rank, sequence, spec);
    if (answer.ok()) {
      members_->Send(rank, OperationDoneMessage{sequence}, actions);
    } else {
      members_->Send(rank, OperationFailedMessage{sequence, answer}, actions);
    }
    return absl::OkStatus();
  }
  mine.waiting = true;
  mine.staging = std::move(staging);
  if (state_ == State::kIdle) {
    state_ = State::kJoining;
    sequence_ = sequence;
    first_rank_ = rank;
    spec_ = spec;
    deadline_ns_ = deadline_ns;
    chunk_ = 0;
    moved_ = 0;
    for (std::uint32_t other = 0; other < ranks_.size(); ++other) {
      ranks_[other].excused = IsRecovering((*members_)[other].state);
    }
  } else if (!(spec == spec_)) {
    Fail(Mismatch(sequence, first_rank_, spec_, rank, spec), actions);
    return absl::OkStatus();
  }
  deadline_ns_ = std::min(deadline_ns_, deadline_ns);
  MaybeRun(actions);
  return absl::OkStatus();
}

absl::Status OperationChannel::Mismatch(std::uint64_t sequence, std::uint32_t first_rank,
                                        const OperationSpec& theirs, std::uint32_t rank,
                                        const OperationSpec& mine) const {
  return MakeError(absl::StatusCode::kFailedPrecondition, reason::kOperationMismatch,
                   absl::StrCat("the ranks disagree on operation ", sequence, ": rank ",
                                members_->Name(first_rank), " called ", theirs.Describe(),
                                ", rank ", members_->Name(rank), " called ", mine.Describe(),
                                ". Call the same operations in the same order on every rank."),
                   {{field::kJob, terms_.job_id},
                    {field::kRank, rank},
                    {field::kOtherRank, first_rank},
                    {field::kChannel, 0}});
}

absl::Status OperationChannel::AnswerLate(std::uint32_t rank, std::uint64_t sequence,
                                          const OperationSpec& spec) const {
  const auto found = ended_.find(sequence);
  if (found == ended_.end()) {
    return MakeError(
        absl::StatusCode::kDeadlineExceeded, reason::kOperationTimeout,
        absl::StrCat(
            "operation ", sequence, " ended on the other ranks long ago; rank ", rank,
            " is far behind them. Call the same operations on every rank, and join again."),
        {{field::kJob, terms_.job_id}, {field::kRank, rank}, {field::kChannel, 0}});
  }
  const Ended& ended = found->second;
  if (ended.failure != nullptr) return ended.failure(rank);
  if (!(spec == ended.spec)) return Mismatch(sequence, ended.first_rank, ended.spec, rank, spec);
  if (spec.bytes == 0 && spec.count == 0) return absl::OkStatus();
  return Breach(rank, sequence,
                absl::StrCat(spec.Describe(),
                             ", which the other ranks completed while this one was lost; its data "
                             "is gone. Start this rank again, and on every rank make this call "
                             "after the step's verdict."));
}

void OperationChannel::Remember(FailureOf failure) {
  ended_[sequence_] = Ended{spec_, first_rank_, std::move(failure)};
  if (ended_.size() > kKeptOperations) ended_.erase(ended_.begin());
}

void OperationChannel::MaybeRun(DeferredActions* actions) {
  if (state_ != State::kJoining) return;
  const auto is_late = [this](std::uint32_t rank) { return Needs(rank) && !ranks_[rank].waiting; };
  if (late_.Any(members_->world_size(), is_late)) return;
  if (spec_.kind == OperationKind::kAllReduce && spec_.count > 0) {
    reduction_.dtype = spec_.dtype;
    reduction_.count = spec_.count;
    reduction_.SetBuffers(Bind(&reduction_));
    const auto divisor = terms_.options.divide_by_world ? ranks_.size() : reduction_.ranks.size();
    const bool average = spec_.op == ReduceOp::kAverage;
    reduction_.op = average ? ReduceOp::kSum : spec_.op;
    reduction_.scale = average ? 1.0 / static_cast<double>(divisor) : 1.0;
    state_ = State::kMoving;
    actions->reductions.push_back(&reduction_);
    return;
  }
  if (spec_.kind == OperationKind::kBroadcast && spec_.bytes > 0) {
    root_ = spec_.root;
    if (root_ == kRootIsLowestLive) {
      root_ = 0;
      while (!ranks_[root_].waiting) ++root_;  // at least one rank waits
    }
    if (!ranks_[root_].waiting) {
      Fail(Breach(root_, sequence_, "the root of the broadcast has left"), actions);
      return;
    }
    return AwaitChunk(actions);
  }
  Complete(actions);
}

void OperationChannel::AwaitChunk(DeferredActions* actions) {
  state_ = State::kWriting;
  ranks_[root_].owes_chunk = true;
  members_->Send(root_, ChunkReadyMessage{sequence_, chunk_, 0, /*write=*/true}, actions);
}

bool OperationChannel::Runs(std::uint64_t sequence) const {
  return state_ != State::kIdle && state_ != State::kCutMoving && state_ != State::kCut &&
         sequence == sequence_ && failing_.ok();
}

bool OperationChannel::Moved(State next) {
  state_ = state_ == State::kCutMoving ? State::kCut : next;
  return state_ == next;
}

HostBuffers OperationChannel::Bind(ReduceOperation* operation) const {
  HostBuffers buffers;
  operation->ranks.clear();
  operation->failure = absl::OkStatus();
  operation->number = sequence_;
  for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (!ranks_[rank].waiting) continue;
    buffers.push_back(ranks_[rank].staging.data);
    operation->ranks.push_back(rank);
  }
  return buffers;
}

absl::Status OperationChannel::ChunkWritten(std::uint32_t rank, std::uint64_t sequence,
                                            std::uint64_t chunk, std::uint64_t bytes,
                                            DeferredActions* actions) {
  if (!Runs(sequence)) return absl::OkStatus();
  RankOperation& mine = ranks_[rank];
  if (state_ != State::kWriting || !mine.owes_chunk || chunk != chunk_) {
    return Breach(rank, sequence, absl::StrCat("chunk ", chunk, " written out of order"));
  }
  const std::uint64_t most = std::min(mine.staging.bytes, spec_.bytes - moved_);
  if (bytes == 0 || bytes > most) {
    return Breach(rank, sequence,
                  absl::StrCat("chunk ", chunk, " of ", bytes, " bytes; 1 to ", most, " expected"));
  }
  chunk_bytes_ = bytes;
  mine.owes_chunk = false;
  state_ = State::kMoving;
  const HostBuffers buffers = Bind(&broadcast_);
  if (std::find(buffers.begin(), buffers.end(), nullptr) != buffers.end()) {
    broadcast_.count = bytes;
    auto& work = broadcast_.work.emplace<NodeBroadcast>();
    work.buffers = buffers;
    work.root = rank;
    actions->reductions.push_back(&broadcast_);
    return absl::OkStatus();
  }
  // The copy runs without the lock, so it holds references that keep the memory mapped.
  std::vector<StagingMemory> receivers;
  for (RankOperation& other : ranks_) {
    if (other.waiting && &other != &mine) receivers.push_back(other.staging);
  }
  Pieces copy([source = mine.staging, receivers, copied = copied_] { copied(absl::OkStatus()); });
  for (const StagingMemory& receiver : receivers) {
    copy.AddCopy(receiver.data, mine.staging.data, bytes);
  }
  copy.Begin(actions);
  return absl::OkStatus();
}

void OperationChannel::Copied(DeferredActions* actions) {
  if (!Moved(State::kReading)) return;
  if (!failing_.ok()) {
    Fail(failing_, actions);
    return;
  }
  for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (!ranks_[rank].waiting || rank == root_) continue;
    ranks_[rank].owes_chunk = true;
    members_->Send(rank, ChunkReadyMessage{sequence_, chunk_, chunk_bytes_, /*write=*/false},
                   actions);
  }
  MaybeNextChunk(actions);
}

absl::Status OperationChannel::ChunkRead(std::uint32_t rank, std::uint64_t sequence,
                                         std::uint64_t chunk, DeferredActions* actions) {
  if (!Runs(sequence)) return absl::OkStatus();
  if (state_ != State::kReading || chunk != chunk_ || !ranks_[rank].owes_chunk) {
    return Breach(rank, sequence, absl::StrCat("chunk ", chunk, " read out of order"));
  }
  ranks_[rank].owes_chunk = false;
  MaybeNextChunk(actions);
  return absl::OkStatus();
}

void OperationChannel::MaybeNextChunk(DeferredActions* actions) {
  const auto owes_chunk = [this](std::uint32_t rank) { return ranks_[rank].owes_chunk; };
  if (late_.Any(members_->world_size(), owes_chunk)) return;
  moved_ += chunk_bytes_;
  ++chunk_;
  if (moved_ == spec_.bytes) {
    Complete(actions);
  } else {
    AwaitChunk(actions);
  }
}

void OperationChannel::Reduced(DeferredActions* actions) {
  if (!Moved(State::kIdle)) return;
  if (!failing_.ok()) {
    Fail(failing_, actions);
  } else {
    Complete(actions);
  }
}

void OperationChannel::Complete(DeferredActions* actions) {
  for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    // A session that came after a loss has not called it.
    if (!ranks_[rank].waiting || ranks_[rank].excused) continue;
    members_->Send(rank, OperationDoneMessage{sequence_}, actions);
  }
  const bool without_some = std::any_of(ranks_.begin(), ranks_.end(),
                                        [](const RankOperation& rank) { return rank.excused; });
  if (without_some) Remember(nullptr);
  ++completed_;
  Close();
}

void OperationChannel::Fail(FailureOf failure, DeferredActions* actions) {
  failing_ = failure(first_rank_);
  if (busy()) return;
  for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (!ranks_[rank].waiting || ranks_[rank].excused) continue;
    members_->Send(rank, OperationFailedMessage{sequence_, failure(rank)}, actions);
  }
  Remember(std::move(failure));
  ++failed_count_;
  Close();
}

void OperationChannel::Close() {
  for (RankOperation& rank : ranks_) {
    rank.waiting = false;
    rank.owes_chunk = false;
    rank.excused = false;
    rank.staging = StagingMemory{};
  }
  state_ = State::kIdle;
  failing_ = absl::OkStatus();
  // Removes the operations that every rank has passed.
  std::uint64_t slowest = sequence_;
  for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (members_->IsAwaited(rank)) slowest = std::min(slowest, ranks_[rank].sequence);
  }
  ended_.erase(ended_.begin(), ended_.upper_bound(slowest));
}

bool OperationChannel::InOperation(std::uint32_t rank) const {
  return ranks_[rank].waiting && !ranks_[rank].excused;
}

void OperationChannel::RankLeft(DeferredActions* actions) { MaybeRun(actions); }

bool OperationChannel::DoesWithout(std::uint32_t rank, const OperationSpec& spec) const {
  if (spec.kind == OperationKind::kBarrier) return true;
  return spec.kind == OperationKind::kBroadcast && spec.root != kRootIsLowestLive &&
         spec.root != rank;
}

std::string OperationChannel::NeedOf(std::uint32_t rank) const {
  if (state_ == State::kIdle || ranks_[rank].excused || DoesWithout(rank, spec_)) return "";
  // Every rank's data is there already: the sum is whole.
  if (state_ == State::kMoving && spec_.kind == OperationKind::kAllReduce) return "";
  return absl::StrCat("operation ", sequence_, " (", spec_.Describe(), ") needed it");
}

void OperationChannel::RankLost(std::uint32_t rank, DeferredActions* actions) {
  RankOperation& mine = ranks_[rank];
  if (state_ == State::kIdle || mine.excused) return;
  mine.excused = true;
  // A sum in progress still reads the lost memory, which Close() gives up.
  if (spec_.kind == OperationKind::kAllReduce) return;
  mine.waiting = mine.owes_chunk = false;
  mine.staging = StagingMemory{};
  const bool waits = std::any_of(ranks_.begin(), ranks_.end(),
                                 [](const RankOperation& other) { return other.waiting; });
  if (!waits) deadline_ns_ = kNoDeadline;  // the next rank that joins sets it
  MaybeRun(actions);
  if (state_ == State::kReading) MaybeNextChunk(actions);
}

std::uint64_t OperationChannel::RankHealed(std::uint32_t rank, std::uint64_t last) {
  RankOperation& mine = ranks_[rank];
  mine.sequence = LastBefore(rank, last);
  mine.excused = false;  // the operation in progress is one of its own
  return mine.sequence + 1;
}

void OperationChannel::RankResumed(std::uint32_t rank) {
  ranks_[rank].sequence = sequence_;
  ended_.clear();  // all of them are of operations that this rank has missed
}

void OperationChannel::Stop() { state_ = busy() ? State::kCutMoving : State::kCut; }

void OperationChannel::ReleaseMemory() {
  for (RankOperation& rank : ranks_) rank.staging = StagingMemory{};
}

std::vector<std::uint32_t> OperationChannel::MissingRanks() const {
  std::vector<std::uint32_t> missing;
  const bool begun = std::any_of(ranks_.begin(), ranks_.end(),
                                 [](const RankOperation& rank) { return rank.waiting; });
  for (std::uint32_t rank = 0; begun && rank < ranks_.size(); ++rank) {
    if (!Needs(rank)) continue;
    if (!ranks_[rank].waiting || ranks_[rank].owes_chunk) missing.push_back(rank);
  }
  return missing;
}

void OperationChannel::Tick(std::uint64_t now_ns, DeferredActions* actions) {
  if (!Runs(sequence_)) return;
  if (now_ns < deadline_ns_) {
    // Each chunk of a broadcast is a wait of its own.
    if (late_notice_.Due(now_ns, sequence_, chunk_)) TellLate(now_ns, actions);
    return;
  }
  Fail(
      [sequence = sequence_, what = spec_.Describe(), missing = RankList(MissingRanks()),
       job = terms_.job_id, hint = members_->AbsenceHint()](std::uint32_t reader) {
        const auto name = [reader](std::uint32_t rank) {
          return absl::StrCat(rank, rank == reader ? " (this rank)" : "");
        };
        return MakeError(
            absl::StatusCode::kDeadlineExceeded, reason::kOperationTimeout,
            absl::StrCat("operation ", sequence, " (", what, ") was not finished in time; ",
                         missing.empty()
                             ? "its reduction or copy is still running. It failed on every "
                               "rank: "
                             : absl::StrCat("waited for rank ", missing.Text(name),
                                            ". It failed on every rank: see where those ranks "
                                            "are, or "),
                         "give it a longer timeout.", hint),
            {{field::kJob, job}, {field::kRank, missing.First()}, {field::kChannel, 0}});
      },
      actions);
}

void OperationChannel::TellLate(std::uint64_t now_ns, DeferredActions* actions) {
  LateRanks late(*members_);
  std::vector<std::uint32_t> waiting;
  for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (!Needs(rank)) continue;
    if (!ranks_[rank].waiting) {
      late.Add(rank, "called it");
    } else if (ranks_[rank].owes_chunk) {
      late.Add(rank, state_ == State::kWriting ? "written its part" : "read its part");
    } else {
      waiting.push_back(rank);
    }
  }
  late_notice_.Tell(now_ns, absl::StrCat("operation ", sequence_, " (", spec_.Describe(), ")"),
                    late, waiting, members_, actions);
}

}  // namespace gradsync::daemon
