// How a replacement gets the state of the model from a survivor.

#ifndef CLIENT_SRC_STATE_FETCH_H_
#define CLIENT_SRC_STATE_FETCH_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/include/gradsync/client.h"

namespace gradsync::v1 {
class StateBegin;
class StateChunk;
class StateFailed;
}  // namespace gradsync::v1

namespace gradsync::client {

class Connection;

// Thread-safe. A part of the Connection. Statuses: those of Session. Legal call order:
//
//   (Fetch+ Confirm+)*
//
// The daemon may begin a new transfer at any time. Then Fetch drops the bytes that have arrived,
// and goes on with the new transfer.
class StateFetch {
 public:
  explicit StateFetch(Connection* connection) : connection_(*connection) {}

  absl::StatusOr<StateImage> Fetch(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Confirm(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);

  // The session replaces a lost one whose state comes from a survivor: it may begin no step until
  // StateAdmitted.
  void OnReplacement() ABSL_LOCKS_EXCLUDED(mutex_);
  bool loading() const {
    const Phase phase = phase_.load();
    return phase == Phase::kLoading || phase == Phase::kAsked;
  }

  // The daemon's messages, on the stream's thread.
  void OnBegin(const v1::StateBegin& begin) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnChunk(const v1::StateChunk& chunk) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnCancelled(std::uint64_t transfer) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnAdmitted(std::uint64_t transfer) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnFailed(const v1::StateFailed& failed) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnSessionEnd(const absl::Status& end) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  enum class Phase {
    kOrdinary,  // the session replaces no lost one, or gets its state from elsewhere
    kLoading,   // it has no state yet, and has not asked the daemon for it
    kAsked,     // FetchState is sent, and has not failed
    kAdmitted,  // it has the state, and may begin steps
  };
  struct Chunk {
    std::uint64_t number;
    std::uint64_t bytes;
  };
  struct Transfer {
    std::uint64_t number;
    std::uint64_t bytes;
    std::uint32_t source;
    std::uint64_t chunks = 0;         // copied
    std::uint64_t received = 0;       // bytes
    std::optional<Chunk> chunk = {};  // to copy
    bool fetched = false;             // Fetch has returned it
  };

  // FAILED_PRECONDITION PROTOCOL_VIOLATION.
  absl::Status OutOfOrder(absl::string_view what) const;
  // Sends StateRefused, which ends the session, and returns `why`.
  absl::Status Refuse(std::uint64_t transfer, const absl::Status& why);
  absl::Status Broken(absl::string_view what) const;
  absl::Status NotFetchedInTime() const;
  absl::Status NotConfirmedInTime(absl::Duration timeout) const;
  // Waits until the previous call has ended: calls run one after the other. After Ctrl-C a call may
  // still run although its caller no longer waits for it. False: that call still runs at
  // `deadline`.
  bool BeginCall(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  void EndCall() ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns why this session may not fetch the state. Forgets a state that Fetch has returned.
  absl::Status BeginFetch() ABSL_LOCKS_EXCLUDED(mutex_);
  // Asks the daemon for the state, unless it was asked. The caller has the staging memory.
  absl::Status Ask(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits until the transfer has a chunk to copy, or has ended. Returns a copy of `transfer_`.
  absl::StatusOr<Transfer> AwaitChunk(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);

  Connection& connection_;

  // Written under the lock, and read without it by every call that marks a bucket.
  std::atomic<Phase> phase_{Phase::kOrdinary};

  absl::Mutex mutex_;
  bool in_call_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<Transfer> transfer_ ABSL_GUARDED_BY(mutex_);
  // Sent by the daemon. Kept until a call returns it, or asks for the state again.
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);
  absl::Status end_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_STATE_FETCH_H_
