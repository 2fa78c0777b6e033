// The ranks that a text names. A job may have 65,536 ranks.

#ifndef DAEMON_JOB_RANK_LIST_H_
#define DAEMON_JOB_RANK_LIST_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"

namespace gradsync::daemon {

// Keeps the first few ranks, and how many there are. Thread-compatible.
class RankList {
 public:
  // The most ranks that a text names.
  static constexpr std::size_t kNamed = 8;

  RankList() = default;
  explicit RankList(const std::vector<std::uint32_t>& ranks) {
    for (const std::uint32_t rank : ranks) Add(rank);
  }

  void Add(std::uint32_t rank) {
    if (named_.size() < kNamed) named_.push_back(rank);
    ++count_;
  }
  bool empty() const { return count_ == 0; }
  std::size_t count() const { return count_; }
  // The first one, for an error's field; empty if there is none.
  std::string First() const;

  // "1, 3", or "0, 1, 2, 3, 4, 5, 6, 7, 291 more".
  std::string Text() const;
  // The same, with the names that `name` returns instead of numbers.
  std::string Text(absl::FunctionRef<std::string(std::uint32_t rank)> name) const;

 private:
  std::vector<std::uint32_t> named_;
  std::size_t count_ = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_RANK_LIST_H_
