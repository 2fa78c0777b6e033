#include "daemon/peer/epoch_table.h"

#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/base/error.h"
#include "daemon/base/logging.h"
#include "daemon/base/tenant.h"

namespace gradsync::daemon {
namespace {

// How often it says that the nodes of a job must wait.
constexpr std::uint64_t kSayNs = 10'000'000'000;

}  // namespace

absl::StatusOr<std::shared_ptr<EngineEpoch>> EpochTable::EpochFor(
    const NodeLinks& links, const JobIdentity& job, absl::FunctionRef<Suspected()> suspected,
    NodeLinks* flush) {
  if (closed_) return absl::CancelledError("the node group has ended");
  if (current_ != nullptr && current_->failure().ok() && current_->links() == links) {
    return current_;
  }
  if (absl::Status may = CheckRate(links, job); !may.ok()) {
    const std::uint64_t now_ns = environment_->clock->NowNs();
    if (said_ns_ == 0 || now_ns >= said_ns_ + kSayNs) {
      said_ns_ = now_ns;
      LogLimitedByAddress(LogLevel::kWarning, "nodes cannot meet yet",
                          {{"job", job_id_},
                           {"uid", job.payer()},
                           {"address", links.front()->address()},
                           {"why", may.message()}});
    }
    return may;
  }
  const Tenant user = job.payer();
  Retire(flush);
  const std::uint64_t epoch = ++last_epoch_;
  current_ = std::make_shared<EngineEpoch>(
      epoch, user, links, *environment_,
      [suspected = suspected(), epoch](const absl::Status& why) { suspected(epoch, why); });
  LogLimitedByAddress(LogLevel::kInfo, "nodes meet",
                      {{"job", job_id_},
                       {"uid", user},
                       {"epoch", current_->epoch()},
                       {"address", links.empty() ? "" : links.front()->address()},
                       {"nodes", absl::StrJoin(current_->node_names(), ",")}});
  flush->insert(flush->end(), links.begin(), links.end());
  return current_;
}

absl::Status EpochTable::CheckRate(const NodeLinks& links, const JobIdentity& job) const {
  if (environment_->rate == nullptr || links.empty()) return absl::OkStatus();
  const NodeLink& first = *links.front();
  const std::uint64_t now_ns = environment_->clock->NowNs();
  const Tenant user = job.payer();
  if (environment_->rate->Take(job.origin == nullptr ? &user : nullptr, first.address(),
                               first.network(), now_ns)) {
    return absl::OkStatus();
  }
  return MakeError(
      absl::StatusCode::kResourceExhausted, reason::kQuota,
      absl::StrCat("the nodes of job '", job_id_, "' cannot connect yet: within a few seconds, ",
                   "too many engines were begun for user ", user.Text(), ", or for the nodes of ",
                   first.address()),
      {{field::kJob, job_id_}});
}

absl::StatusOr<std::shared_ptr<EngineEpoch>> EpochTable::Find(std::uint64_t epoch,
                                                              const NodeLink* link,
                                                              absl::string_view what) const {
  std::shared_ptr<EngineEpoch> found;
  if (current_ != nullptr && current_->epoch() == epoch) found = current_;
  for (const auto& retired : retired_) {
    if (retired->epoch() == epoch) found = retired;
  }
  if (found == nullptr) return nullptr;
  const absl::Status malformed = CheckNodeOf(*found, link, what);
  if (!malformed.ok()) return malformed;
  return found;
}

std::vector<std::shared_ptr<EngineEpoch>> EpochTable::EpochsOf(const NodeLink* link) const {
  std::vector<std::shared_ptr<EngineEpoch>> epochs;
  for (const auto& retired : retired_) {
    if (retired->Includes(link)) epochs.push_back(retired);
  }
  if (current_ != nullptr && current_->Includes(link)) epochs.push_back(current_);
  return epochs;
}

NodeLinks EpochTable::LateNodes() const {
  NodeLinks late = current_ == nullptr ? NodeLinks() : current_->LateNodes();
  for (const auto& retired : retired_) {
    for (auto& link : retired->LateNodes()) late.push_back(std::move(link));
  }
  return late;
}

absl::StatusOr<std::shared_ptr<Rendezvous>> EpochTable::StoreOf(std::uint64_t epoch,
                                                                const NodeLink* link) const {
  if (current_ == nullptr || current_->epoch() != epoch) return nullptr;
  const absl::Status malformed = CheckNodeOf(*current_, link, "a rendezvous");
  if (!malformed.ok()) return malformed;
  return current_->store();
}

absl::Status EpochTable::CheckNodeOf(const EngineEpoch& epoch, const NodeLink* link,
                                     absl::string_view what) const {
  if (link == nullptr || epoch.Includes(link)) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kInvalidArgument, reason::kMalformed,
      absl::StrCat("node ", link->node_name(), " sent ", what, " for epoch ", epoch.epoch(),
                   " of job '", job_id_, "', but is not part of that engine"),
      {{field::kJob, job_id_}, {field::kNode, link->node_name()}});
}

void EpochTable::Retire(NodeLinks* flush) {
  if (current_ == nullptr) return;
  if (current_->failure().ok()) current_->Fail(absl::CancelledError("the nodes have changed"));
  current_->End();
  flush->insert(flush->end(), current_->links().begin(), current_->links().end());
  retired_.push_back(std::exchange(current_, nullptr));
  Reap();
}

void EpochTable::Reap() {
  // An epoch stays here until all nodes have answered its launches; Find() finds it here.
  for (auto it = retired_.begin(); it != retired_.end();) {
    EngineEpoch::Reap(*it, environment_->reaper);
    it = (*it)->reaped() && (*it)->ledger().empty() ? retired_.erase(it) : std::next(it);
  }
}

void EpochTable::Close(NodeLinks* flush) {
  closed_ = true;
  Retire(flush);
}

}  // namespace gradsync::daemon
