#include "daemon/job/rank_list.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace gradsync::daemon {

std::string RankList::First() const { return named_.empty() ? "" : absl::StrCat(named_.front()); }

std::string RankList::Text() const {
  return Text([](std::uint32_t rank) { return std::to_string(rank); });
}

std::string RankList::Text(absl::FunctionRef<std::string(std::uint32_t rank)> name) const {
  std::vector<std::string> parts;
  parts.reserve(kNamed + 1);
  for (const std::uint32_t rank : named_) parts.push_back(name(rank));
  if (count_ > named_.size()) parts.push_back(absl::StrCat(count_ - named_.size(), " more"));
  return absl::StrJoin(parts, ", ");
}

}  // namespace gradsync::daemon
