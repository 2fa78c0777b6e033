// What a Session and its Layouts share: the stream, the identity, and why the session ended.

#ifndef CLIENT_SRC_CONNECTION_H_
#define CLIENT_SRC_CONNECTION_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/include/gradsync/client.h"
#include "client/src/error.h"
#include "client/src/job_channel.h"
#include "client/src/session_stream.h"
#include "client/src/staging_memory.h"
#include "client/src/state_fetch.h"
#include "client/src/state_reader.h"

namespace gradsync::v1 {
class LayoutAssigned;
class LayoutReady;
class OperationFailed;
class SessionOpened;
}  // namespace gradsync::v1

namespace gradsync::client {

class LayoutRegistration;
class StepClient;

// Counters of SessionStatistics. Own synchronization; times in nanoseconds.
struct SessionCounters {
  std::atomic<std::uint64_t> steps_complete{0};
  std::atomic<std::uint64_t> steps_void{0};
  std::atomic<std::uint64_t> buckets_marked{0};
  std::atomic<std::uint64_t> bytes_reduced{0};
  std::atomic<std::int64_t> mark_ready_ns{0};
  std::atomic<std::int64_t> exposed_ns{0};
};

// Passes every message of the daemon to its receiver: a registration, a layout's steps, the job's
// channel, or a transfer of the model's state.
//
// Thread-safe. The Session, each of its layouts, and the stream's thread until the stream ends
// share ownership. The Session closes it.
//
// Lock order: a StepClient's lock, then the JobChannel's. One of these, the StateReader's or the
// StateFetch's lock, then the stream's. This class's lock, then a LayoutRegistration's. No
// StepClient's or JobChannel's lock is taken under this class's lock.
class Connection final : public StreamReceiver,
                         public StateSender,
                         public std::enable_shared_from_this<Connection> {
 public:
  // Connects, joins, and maps the staging memory. Statuses: those of Session::Join.
  static absl::StatusOr<std::shared_ptr<Connection>> Open(const SessionOptions& options);

  // For Open.
  explicit Connection(const SessionOptions& options);
  ~Connection() override;

  // Constant once Open has returned.
  const SessionOptions& options() const { return options_; }
  std::uint64_t incarnation() const { return incarnation_; }
  std::uint64_t generation() const { return generation_; }
  // True if the session takes the place of a lost one.
  bool replacement() const { return replacement_; }
  // Zero: no lease.
  absl::Duration lease() const { return lease_; }
  // In a replacement, the layouts that the job has now; else empty.
  const std::vector<CurrentLayout>& current_layouts() const { return current_layouts_; }
  StagingMemory& staging() const { return *staging_; }
  ErrorFields Fields() const { return {options_.job_id, options_.rank, {}, {}, {}}; }

  SessionCounters& counters() { return counters_; }
  JobChannel& job_channel() { return job_channel_; }
  StateReader& state_reader() { return state_reader_; }
  StateFetch& state_fetch() { return state_fetch_; }
  SessionStream& stream() { return *stream_; }

  // When the last message arrived, and when the last one was sent; nanoseconds of CLOCK_MONOTONIC.
  std::int64_t heard_ns() const { return heard_ns_.load(std::memory_order_relaxed); }
  std::int64_t said_ns() const { return stream_ == nullptr ? 0 : stream_->sent_ns(); }

  // OK until the session ends, then why it ended.
  absl::Status End() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits for the session's end. OK: it has not ended within `timeout`.
  absl::Status AwaitEnd(absl::Duration timeout) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits, after Leave or Finish, until the daemon ends the session. `call`: which of the two it
  // was.
  absl::Status AwaitGoodEnd(absl::string_view call) const ABSL_LOCKS_EXCLUDED(mutex_);
  // True once the session has ended. It becomes true before any call returns why.
  bool HasEnded() const ABSL_LOCKS_EXCLUDED(mutex_);

  // Leaves the job: this rank takes part in nothing more. FAILED_PRECONDITION while a step is open;
  // then nothing changes.
  absl::Status BeginLeave(absl::string_view call) ABSL_LOCKS_EXCLUDED(mutex_);
  // Every rank has left and this one stayed: it takes part again.
  void EndLeave() { left_.store(false); }
  bool left() const { return left_.load(); }
  // True if this is a replacement that does not have the state of the model yet: it may begin no
  // step.
  bool loading() const { return state_fetch_.loading(); }

  // Passes the answers to a RegisterLayout to `registration` until Withdraw. Returns its
  // request_id.
  std::uint64_t Announce(LayoutRegistration* registration) ABSL_LOCKS_EXCLUDED(mutex_);
  void Withdraw(std::uint64_t request_id) ABSL_LOCKS_EXCLUDED(mutex_);
  // Passes messages about steps of `channel` to `steps`, as long as `steps` has an owner.
  void Attach(std::uint32_t channel, const std::shared_ptr<StepClient>& steps)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Returns, once, the daemon's newest notice that this rank waits for others. "" if there is none,
  // or if the daemon has answered since.
  std::string TakeNotice() ABSL_LOCKS_EXCLUDED(notice_mutex_);

  // Ends the stream, and the session if it has not ended yet. Takes at most 5 s.
  void Close() ABSL_LOCKS_EXCLUDED(mutex_);

  // StreamReceiver:
  void OnMessage(const v1::SessionResponse& message) override;
  void OnStreamEnd(const StreamEnd& end) override;

  // StateSender:
  void SendState(v1::SessionRequest request) override;

 private:
  absl::Status Join(absl::Time deadline);
  // `text`: the notice; "" forgets an older one.
  void SetNotice(absl::string_view text) ABSL_LOCKS_EXCLUDED(notice_mutex_);
  void OnOpened(const v1::SessionOpened& opened) ABSL_LOCKS_EXCLUDED(mutex_);
  // False: another kind of message.
  bool OnStateMessage(const v1::SessionResponse& message);
  void OnFailed(const v1::OperationFailed& failed) ABSL_LOCKS_EXCLUDED(mutex_);
  std::shared_ptr<StepClient> StepsOf(std::uint32_t channel) ABSL_LOCKS_EXCLUDED(mutex_);
  // The first call counts. Releases every wait. Tells the layouts first, then End() and the
  // registrations. So a trainer whose registration fails gets the same error from the steps of
  // every layout.
  void SetEnd(absl::Status end) ABSL_LOCKS_EXCLUDED(mutex_);

  // Constant after construction.
  const SessionOptions options_;

  // Written by Open, before any other thread uses the object.
  std::uint64_t incarnation_ = 0;
  std::uint64_t generation_ = 0;
  bool replacement_ = false;
  absl::Duration lease_;
  std::string staging_nonce_;
  std::uint64_t staging_bytes_ = 0;
  std::vector<CurrentLayout> current_layouts_;
  std::shared_ptr<StagingMemory> staging_;
  std::unique_ptr<SessionStream> stream_;

  // Own synchronization.
  SessionCounters counters_;
  JobChannel job_channel_;
  StateReader state_reader_;
  StateFetch state_fetch_;
  std::atomic<bool> left_{false};
  std::atomic<std::int64_t> heard_ns_{0};

  mutable absl::Mutex mutex_;
  bool opened_ ABSL_GUARDED_BY(mutex_) = false;
  // Why the session ends. Layouts get this first, through ending_. All others get the same value
  // afterwards, through end_.
  absl::Status ending_ ABSL_GUARDED_BY(mutex_);
  absl::Status end_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t last_request_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::uint64_t, LayoutRegistration*> registrations_ ABSL_GUARDED_BY(mutex_);
  std::map<std::uint32_t, std::weak_ptr<StepClient>> steps_ ABSL_GUARDED_BY(mutex_);

  // Held only while a text is copied. No other lock is taken under it.
  absl::Mutex notice_mutex_;
  std::string notice_ ABSL_GUARDED_BY(notice_mutex_);
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_CONNECTION_H_
