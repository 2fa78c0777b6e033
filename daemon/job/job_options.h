// The options that all ranks of a job must agree on when they join.

#ifndef DAEMON_JOB_JOB_OPTIONS_H_
#define DAEMON_JOB_JOB_OPTIONS_H_

#include <cstdint>
#include <string>

#include "proto/gradsync/nccl_settings.h"

namespace gradsync::daemon {

// What the loss of a rank does. docs/failures.md, "Loss policies", describes both.
enum class OnRankLoss : std::uint8_t {
  kAbort,  // the job ends
  kHold,   // the running step waits until another session takes the rank's place: HoldPolicy
};

// With kHold: who brings the state of the model to a replacement.
enum class StateSource : std::uint8_t {
  kTrainer,   // the trainers themselves
  kSurvivor,  // a rank that has it, through the daemon
};

struct JobOptions {
  bool divide_by_world = false;  // averages divide by the world size, not by the live ranks
  std::uint64_t step_timeout_ns = 0;
  NcclSettings nccl;
  OnRankLoss on_rank_loss = OnRankLoss::kAbort;
  std::uint64_t hold_timeout_ns = 0;  // kHold: how long others wait for a lost rank
  StateSource state_source = StateSource::kTrainer;

  bool Holds() const { return on_rank_loss == OnRankLoss::kHold; }
  // Survivors bring the state of the model to replacements.
  bool HealsFromSurvivors() const { return Holds() && state_source == StateSource::kSurvivor; }
};

// The first option that differs: "divisor is world, but the ranks that joined before have
// live_ranks". Empty if the options are the same.
std::string FirstDifference(const JobOptions& before, const JobOptions& given);

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_JOB_OPTIONS_H_
