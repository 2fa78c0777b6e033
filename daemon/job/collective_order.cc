#include "daemon/job/collective_order.h"

#include "absl/strings/str_cat.h"

namespace gradsync::daemon {

std::optional<CollectiveOrder::Collective> CollectiveOrder::Begin(std::uint32_t rank,
                                                                  absl::string_view description) {
  const std::uint64_t number = ++begun_[rank];
  if (number > newest_) {
    newest_ = number;
    kept_.push_back({{number, rank, std::string(description)}});
    if (kept_.size() > kKept) kept_.pop_front();
  }
  const std::uint64_t behind = newest_ - number;
  if (behind >= kept_.size()) return std::nullopt;  // forgotten
  Entry& entry = kept_[kept_.size() - 1 - behind];
  if (entry.collective.description != description) return entry.collective;
  ++entry.ranks;
  while (!kept_.empty() && kept_.front().ranks == begun_.size()) kept_.pop_front();
  return std::nullopt;
}

std::string CollectiveOrder::Describe(std::uint64_t number) const {
  const std::uint64_t behind = newest_ - number;
  if (behind >= kept_.size()) return absl::StrCat("collective ", number);  // forgotten
  const Entry& entry = kept_[kept_.size() - 1 - behind];
  return absl::StrCat("collective ", number, " (", entry.collective.description, ")");
}

std::string CollectiveOrder::BegunBeyond(std::uint32_t rank, std::uint32_t other) const {
  return begun_[rank] <= begun_[other] ? "" : Describe(begun_[other] + 1);
}

}  // namespace gradsync::daemon
