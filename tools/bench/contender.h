// One implementation in a contest: takes a turn in each iteration.

#ifndef TOOLS_BENCH_CONTENDER_H_
#define TOOLS_BENCH_CONTENDER_H_

#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tools/bench/child_process.h"
#include "tools/bench/rank_team.h"

namespace gradsync::bench {

// What one all-reduce took.
struct Turn {
  // From the last rank's call to that rank's return. Roofline: first element to last. On a GPU,
  // of what it does by itself: by its own clock.
  std::int64_t time_ns = 0;
  // gradsync alone: until each rank's MarkReady had returned, and the stages of `time_ns`: from the
  // last rank's call to the daemon, to the reduction's start, to its finish, to the rank's return.
  std::array<std::int64_t, kMaxRanks> mark_ns = {};
  std::array<std::int64_t, 4> stages_ns = {};
  // On GPUs: until each rank could enqueue what needs the average, and how often one waited for its
  // GPU until then.
  std::array<std::int64_t, kMaxRanks> enqueue_ns = {};
  std::uint64_t host_synchronizations = 0;
  // Of every process that took part, their --busy threads, filling and checking excluded.
  std::int64_t cpu_ns = 0;
  std::uint64_t wrong = 0;  // elements, over all ranks
};

// (SetUp Take* TearDown)*. Used by the main thread. Statuses are those of RankTeam::Do().
class Contender {
 public:
  // `servers`: the processes that reduce for the ranks, if there are such; outlive the contender.
  Contender(std::unique_ptr<RankTeam> team, const std::vector<ChildProcess>* servers)
      : team_(std::move(team)), servers_(servers) {}
  virtual ~Contender() = default;

  Implementation implementation() const { return team_->implementation(); }

  // Buffers of `bytes` in every rank.
  virtual absl::Status SetUp(std::uint64_t bytes);
  // The ranks rewrite their buffers, reduce them, and count wrong elements.
  absl::StatusOr<Turn> Take(std::uint64_t iteration, bool check_all);
  virtual absl::Status TearDown();

 protected:
  // The timed part: all but `wrong`.
  virtual absl::StatusOr<Turn> Reduce(std::uint64_t iteration);

  RankTeam& team() { return *team_; }

 private:
  std::int64_t HelpersCpuNs() const;

  const std::unique_ptr<RankTeam> team_;
  const std::vector<ChildProcess>* const servers_;
};

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_CONTENDER_H_
