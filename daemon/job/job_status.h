// The state of a job as plain values, for status and statistics.

#ifndef DAEMON_JOB_JOB_STATUS_H_
#define DAEMON_JOB_JOB_STATUS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "daemon/job/membership.h"
#include "daemon/telemetry/layout_stats.h"

namespace gradsync::daemon {

enum class JobPhase : std::uint8_t { kForming, kRunning, kFailed, kEnded };

struct LayoutSnapshot {
  std::string name;
  std::uint32_t channel = 0;
  std::uint64_t fingerprint = 0;
  std::size_t parameters = 0;
  std::size_t buckets = 0;
  std::uint64_t bytes = 0;
  std::uint64_t step = 0;
  std::string waiting_for;
  bool ready = false;
  LayoutStatsSnapshot stats;
};

struct RankSnapshot {
  std::uint32_t rank = 0;
  std::uint64_t incarnation = 0;
  RankState state = RankState::kLive;
  std::string node;  // empty: this one
};

// The state of the model on its way to a rank that came back after a loss.
struct HealingSnapshot {
  std::uint32_t rank = 0;
  std::uint32_t source = 0;
  std::uint64_t bytes_moved = 0;
  std::uint64_t bytes = 0;  // 0: the source has not said it yet
};

// The most missing ranks of a JobSnapshot, and the most former ones. A job may have 65,536 ranks of
// which one has joined.
inline constexpr std::size_t kListedRanks = 1024;

struct JobSnapshot {
  JobPhase phase = JobPhase::kForming;
  std::vector<RankSnapshot> ranks;  // with a session now
  // With a session before, on another node: the lowest kListedRanks.
  std::vector<RankSnapshot> former_ranks;
  std::uint32_t former_ranks_unlisted = 0;   // how many more there are
  std::vector<std::uint32_t> missing_ranks;  // have not joined: the lowest kListedRanks
  std::uint32_t missing_ranks_total = 0;     // also those that are not listed
  // Lost, and their replacements have not come. Not bounded: all had sessions at the same time.
  std::vector<std::uint32_t> held_ranks;
  std::optional<HealingSnapshot> healing;  // nullopt: no rank is being healed
  // They have joined, and a running step or operation waits for them.
  std::vector<std::uint32_t> waiting_ranks;
  std::vector<LayoutSnapshot> layouts;
  std::vector<LayoutSnapshot> released_layouts;  // the last ones whose name no layout has now
  std::string failure;
  std::uint64_t operations = 0;
  std::uint64_t operations_failed = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_JOB_STATUS_H_
