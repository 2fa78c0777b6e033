#include "daemon/job/step_report.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/base/error.h"
#include "daemon/job/rank_list.h"

namespace gradsync::daemon {
namespace {

// The largest number of bucket ranges that a message names for each rank.
constexpr std::size_t kNamedRanges = 8;

// "3", "3-7", "0-1, 4" of the positions that hold `value`.
std::string Ranges(const std::vector<bool>& flags, bool value) {
  std::vector<std::string> ranges;
  for (std::size_t i = 0; i < flags.size(); ++i) {
    if (flags[i] != value) continue;
    std::size_t last = i;
    while (last + 1 < flags.size() && flags[last + 1] == value) ++last;
    if (ranges.size() == kNamedRanges) {
      ranges.push_back("...");
      break;
    }
    ranges.push_back(i == last ? absl::StrCat(i) : absl::StrCat(i, "-", last));
    i = last;
  }
  return absl::StrJoin(ranges, ", ");
}

std::optional<std::size_t> FirstOf(const std::vector<bool>& flags, bool value) {
  const auto first = std::find(flags.begin(), flags.end(), value);
  if (first == flags.end()) return std::nullopt;
  return static_cast<std::size_t>(first - flags.begin());
}

}  // namespace

std::vector<std::uint32_t> StepReport::MissingRanks() const {
  std::vector<std::uint32_t> missing;
  for (std::uint32_t rank = 0; step_.begun() && rank < members_.world_size(); ++rank) {
    if (members_.IsAwaited(rank) && !step_.Ended(rank)) missing.push_back(rank);
  }
  return missing;
}

std::string StepReport::Missing() const {
  if (!step_.begun()) return "";
  std::vector<std::string> missing;
  for (const std::uint32_t rank : MissingRanks()) {
    if (missing.size() == RankList::kNamed) {
      missing.push_back("...");
      break;
    }
    if (step_.FirstUnmarked(rank).has_value()) {
      missing.push_back(absl::StrCat("rank ", members_.Name(rank), " has not marked bucket ",
                                     Ranges(step_.Marks(rank), false), " ready"));
    } else {
      missing.push_back(absl::StrCat("rank ", members_.Name(rank), " has not ended the step"));
    }
  }
  for (std::uint32_t rank = 0; rank < members_.world_size() && missing.size() < RankList::kNamed;
       ++rank) {
    const std::vector<bool> not_written = NotWritten(rank);
    if (!FirstOf(not_written, true).has_value()) continue;
    missing.push_back(absl::StrCat("rank ", members_.Name(rank), " has marked bucket ",
                                   Ranges(not_written, true),
                                   " ready, but its GPU has not written it"));
  }
  if (missing.empty() && step_.in_flight() > 0) missing.push_back("a reduction is running");
  return absl::StrJoin(missing, "; ");
}

LateRanks StepReport::Late() const {
  LateRanks late(members_);
  for (const std::uint32_t rank : MissingRanks()) {
    if (!step_.Has(rank)) {
      late.Add(rank, "begun it");
    } else if (step_.FirstUnmarked(rank).has_value()) {
      late.Add(rank, absl::StrCat("marked bucket ", Ranges(step_.Marks(rank), false), " ready"));
    } else {
      late.Add(rank, "ended it");
    }
  }
  return late;
}

std::vector<bool> StepReport::NotWritten(std::uint32_t rank) const {
  const SemaphorePage* const semaphores = agreement_.semaphores(rank);
  if (!agreement_.spec().on_gpu || semaphores == nullptr) return {};
  std::vector<bool> not_written(step_.buckets());
  for (std::size_t i = 0; i < step_.buckets(); ++i) {
    not_written[i] =
        step_.Marked(rank, i) && !step_.Reduced(i) && !semaphores->ReadyShown(i, step_.number());
  }
  return not_written;
}

absl::Status StepReport::Breach(absl::StatusCode code, Reason reason, std::uint32_t rank,
                                std::uint64_t step, std::optional<std::size_t> bucket,
                                absl::string_view what) const {
  const std::string index = bucket.has_value() ? absl::StrCat(*bucket) : "";
  return MakeError(code, reason,
                   absl::StrCat("layout '", agreement_.name(), "', rank ", rank, ", step ", step,
                                index.empty() ? "" : ", bucket ", index, ": ", what),
                   {{field::kJob, terms_.job_id},
                    {field::kRank, rank},
                    {field::kChannel, agreement_.channel()},
                    {field::kStep, step},
                    {field::kBucket, index}});
}

absl::Status StepReport::MalformedMap(std::uint32_t rank, std::uint64_t step,
                                      absl::string_view used_map) const {
  return Breach(absl::StatusCode::kInvalidArgument, reason::kMalformed, rank, step, std::nullopt,
                absl::StrCat("used_map of ", used_map.size(), " bytes, ",
                             (agreement_.spec().parameters.size() + 7) / 8, " expected"));
}

absl::Status StepReport::PositionMismatch(std::uint32_t rank, Position position,
                                          std::uint32_t other) const {
  const auto text = [](Position at) {
    return absl::StrCat("epoch ", at.epoch, ", batch ", at.batch);
  };
  return MakeError(
      absl::StatusCode::kFailedPrecondition, reason::kPositionMismatch,
      absl::StrCat("layout '", agreement_.name(), "', step ", step_.number(), ": rank ",
                   members_.Name(rank), " is at ", text(position), ", rank ", members_.Name(other),
                   " at ", text(*step_.PositionOf(other)),
                   ". Give every rank the same number of batches, and let a replacement skip those "
                   "that are done."),
      {{field::kJob, terms_.job_id},
       {field::kRank, rank},
       {field::kOtherRank, other},
       {field::kChannel, agreement_.channel()},
       {field::kStep, step_.number()}});
}

absl::Status StepReport::VoidOnGpus() const {
  return MakeError(
      absl::StatusCode::kAborted, reason::kStepVoid,
      absl::StrCat("layout '", agreement_.name(), "', step ", step_.number(),
                   ": the gradients of some rank never came to its GPU. The step is void on every "
                   "rank; redo it under the next number."),
      {{field::kJob, terms_.job_id},
       {field::kChannel, agreement_.channel()},
       {field::kStep, step_.number()}});
}

absl::Status StepReport::InDoubt(const absl::Status& doubt) const {
  return MakeError(
      absl::StatusCode::kAborted, reason::kStepInDoubt,
      absl::StrCat(
          "layout '", agreement_.name(), "', step ", step_.number(),
          " was lost after its last launch, so that it may be complete on some ranks' GPUs "
          "and void on others': ",
          doubt.message(),
          ". Compare the ranks' last steps, or go on from a checkpoint on every rank."),
      {{field::kJob, terms_.job_id},
       {field::kChannel, agreement_.channel()},
       {field::kStep, step_.number()}});
}

absl::Status StepReport::TimedOut() const {
  // The error's fields name the first missing rank, or none if only a reduction is missing. The
  // message names all of them.
  std::string rank, bucket;
  for (std::uint32_t other = 0; rank.empty() && other < members_.world_size(); ++other) {
    if (!members_.IsAwaited(other)) continue;
    auto index = step_.FirstUnmarked(other);
    if (!index.has_value()) index = FirstOf(NotWritten(other), true);
    if (step_.Ended(other) && !index.has_value()) continue;
    rank = absl::StrCat(other);
    if (index.has_value()) bucket = absl::StrCat(*index);
  }
  return MakeError(absl::StatusCode::kDeadlineExceeded, reason::kStepTimeout,
                   absl::StrCat("layout '", agreement_.name(), "', step ", step_.number(),
                                " was not finished within the job's step_timeout: ", Missing(),
                                ". The step is void on every rank: look at those ranks, then redo "
                                "it, or raise step_timeout."),
                   {{field::kJob, terms_.job_id},
                    {field::kRank, rank},
                    {field::kChannel, agreement_.channel()},
                    {field::kStep, step_.number()},
                    {field::kBucket, bucket}});
}

absl::Status StepReport::Released(std::uint32_t rank) const {
  return MakeError(
      absl::StatusCode::kFailedPrecondition, reason::kLayoutReleased,
      absl::StrCat(
          "layout '", agreement_.name(), "', step ", step_.number(), ": rank ", members_.Name(rank),
          " has released the layout, so no step of it can be complete. The step is void on "
          "every rank: release the layout on every rank, or on none."),
      {{field::kJob, terms_.job_id},
       {field::kRank, rank},
       {field::kChannel, agreement_.channel()},
       {field::kStep, step_.number()}});
}

}  // namespace gradsync::daemon
