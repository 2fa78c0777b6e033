// The actions that a change of a job's state causes. They run once the job's lock is released.

#ifndef DAEMON_JOB_DEFERRED_ACTIONS_H_
#define DAEMON_JOB_DEFERRED_ACTIONS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "daemon/job/rank_session.h"
#include "daemon/job/session_message.h"
#include "daemon/reduce/reducer.h"

namespace gradsync::daemon {

// A plain value of one call. Job::Transaction carries the actions out.
struct DeferredActions {
  // Tells Membership::Send() which sessions `flushes` already has. Send() sets it at the first
  // message; unique in its job; 0: there is no message yet.
  std::uint64_t number = 0;
  absl::InlinedVector<ReduceOperation*, 8> reductions;
  std::vector<GivenUpStep> given_up;
  absl::InlinedVector<std::shared_ptr<SessionSink>, 8> flushes;
  absl::InlinedVector<std::function<void()>, 1> work;  // for the executor, in this order
  // Memory that the job no longer uses. The executor drops the last reference, because unmapping
  // takes milliseconds.
  std::vector<std::shared_ptr<void>> releases;
  // Sessions whose early messages broke the protocol, and how. These sessions end.
  std::vector<std::pair<RankSession, absl::Status>> breaches;
  // The notices about late ranks, for the log.
  std::vector<std::string> late;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_DEFERRED_ACTIONS_H_
