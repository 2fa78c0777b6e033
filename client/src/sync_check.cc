#include "client/src/sync_check.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/src/connection.h"
#include "client/src/error.h"
#include "client/src/job_channel.h"
#include "client/src/sha256.h"
#include "client/src/state_answer.h"
#include "client/src/state_image.h"
#include "client/src/state_reader.h"
#include "client/src/utf8.h"
#include "proto/gradsync/v1/gradsync.pb.h"

namespace gradsync::client {
namespace {

// No list is larger; a daemon that says so is broken.
constexpr std::uint64_t kMaxListBytes = std::uint64_t{1} << 30;

// An entry of a list: 2 bytes of the name's length, little-endian; the name; the digest.
absl::string_view TakeEntry(absl::string_view* list) {
  if (list->size() < 2) return {};
  const std::size_t name =
      static_cast<unsigned char>((*list)[0]) + 256u * static_cast<unsigned char>((*list)[1]);
  const std::size_t bytes = std::min(2 + name + Sha256::kDigestBytes, list->size());
  const absl::string_view entry = list->substr(0, bytes);
  list->remove_prefix(bytes);
  return entry;
}

absl::string_view NameOf(absl::string_view entry) {
  if (entry.size() < 2 + Sha256::kDigestBytes) return {};
  return entry.substr(2, entry.size() - 2 - Sha256::kDigestBytes);
}

}  // namespace

std::string SyncCheck::ListOf(absl::Span<const StateItem> items,
                              const std::vector<std::string>& digests) {
  std::string list;
  for (std::size_t i = 0; i < items.size(); ++i) {
    list.push_back(static_cast<char>(items[i].name.size() % 256));
    list.push_back(static_cast<char>(items[i].name.size() / 256));
    absl::StrAppend(&list, items[i].name, digests[i]);
  }
  return list;
}

std::int64_t SyncCheck::Compare(absl::string_view root, absl::string_view mine) {
  if (root == mine) return kSame;
  for (std::int64_t index = 0;; ++index) {
    const absl::string_view theirs = TakeEntry(&root);
    if (theirs.empty() || theirs != TakeEntry(&mine)) return kDiffers + index;
  }
}

absl::Status SyncCheck::Verdict(const std::vector<std::int64_t>& said, absl::string_view root,
                                const std::string& job) {
  std::string ranks;
  std::size_t first = said.size();
  std::size_t root_rank = said.size();
  std::size_t differ = 0;
  for (std::size_t rank = 0; rank < said.size(); ++rank) {
    if (said[rank] >= kSame && root_rank == said.size()) root_rank = rank;
    if (said[rank] < kDiffers) continue;
    if (first == said.size()) first = rank;
    if (++differ <= 10) absl::StrAppend(&ranks, differ > 1 ? ", " : "", rank);
  }
  if (differ == 0) return absl::OkStatus();
  if (differ > 10) absl::StrAppend(&ranks, " and ", differ - 10, " more");
  const std::int64_t index = said[first] - kDiffers;
  absl::string_view entry;
  for (std::int64_t i = 0; i <= index; ++i) entry = TakeEntry(&root);
  const std::string item = entry.empty() ? absl::StrCat("has more items, from item ", index)
                                         : absl::StrCat("differs in '", ValidUtf8(NameOf(entry)),
                                                        "' (item ", index, ")");
  ErrorFields fields;
  fields.job = job;
  fields.rank = static_cast<std::uint32_t>(first);
  return MakeError(
      absl::StatusCode::kFailedPrecondition, reason::kRanksDiverged,
      absl::StrCat(
          "the ranks do not have the same state of the model: ", differ > 1 ? "ranks " : "rank ",
          ranks, differ > 1 ? " differ from rank " : " differs from rank ", root_rank,
          ". First of them, rank ", first, " ", item, "; load one checkpoint on every rank"),
      fields);
}

absl::Status SyncCheck::Hash(absl::Span<const StateItem> items, std::vector<std::string>* digests) {
  StateReader& reader = connection_.state_reader();
  const StateReader::OwnReading reading(&reader);
  Sha256 hash;
  for (const StateItem& item : items) {
    for (std::size_t done = 0; done < item.bytes;) {
      const std::size_t piece = std::min(StateAnswer::kPieceBytes, item.bytes - done);
      hash.Add(static_cast<const std::byte*>(item.data) + done, piece);
      done += piece;
      if (reading.interrupted()) {
        return absl::CancelledError("CheckInSync was interrupted");
      }
    }
    digests->push_back(hash.Finish());
  }
  return absl::OkStatus();
}

absl::Status SyncCheck::Run(absl::Span<const StateItem> items, absl::Duration timeout) {
  if (auto status = ValidateItems(items); !status.ok()) return status;
  if (auto end = connection_.End(); !end.ok()) return end;
  std::vector<std::string> digests;
  if (auto status = Hash(items, &digests); !status.ok()) {
    auto end = connection_.End();
    return end.ok() ? status : end;
  }
  const std::string mine = ListOf(items, digests);

  const absl::Time deadline = absl::Now() + timeout;
  JobChannel& channel = connection_.job_channel();
  std::uint64_t bytes = mine.size();
  if (auto status = channel.Broadcast(reinterpret_cast<std::byte*>(&bytes), sizeof(bytes),
                                      kLowestLiveRank, deadline - absl::Now());
      !status.ok()) {
    return status;
  }
  if (bytes > kMaxListBytes) {
    return MakeError(absl::StatusCode::kInternal, reason::kProtocolViolation,
                     "CheckInSync got an impossible list of another rank", connection_.Fields());
  }
  // The root's own list stays as it is.
  std::string root = mine;
  root.resize(bytes);
  if (auto status = channel.Broadcast(reinterpret_cast<std::byte*>(root.data()), bytes,
                                      kLowestLiveRank, deadline - absl::Now());
      !status.ok()) {
    return status;
  }
  std::vector<std::int64_t> said(connection_.options().world_size);
  said[connection_.options().rank] = Compare(root, mine);
  if (auto status = channel.AllReduce(reinterpret_cast<std::byte*>(said.data()), said.size(),
                                      DataType::kInt64, ReduceOp::kSum, deadline - absl::Now());
      !status.ok()) {
    return status;
  }
  return Verdict(said, root, connection_.options().job_id);
}

}  // namespace gradsync::client
