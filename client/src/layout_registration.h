// One RegisterLayout: the daemon's answers so far.

#ifndef CLIENT_SRC_LAYOUT_REGISTRATION_H_
#define CLIENT_SRC_LAYOUT_REGISTRATION_H_

#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/include/gradsync/client.h"
#include "proto/gradsync/v1/gradsync.pb.h"

namespace gradsync::client {

class Connection;

// Thread-safe: the caller of RegisterLayout waits, and the stream's thread answers. The object
// lives on the caller's stack. The caller announces it to the connection and withdraws it.
class LayoutRegistration {
 public:
  void OnAssigned(const v1::LayoutAssigned& assigned) ABSL_LOCKS_EXCLUDED(mutex_);
  // False if it is another registration's answer.
  bool OnReady(const v1::LayoutReady& ready) ABSL_LOCKS_EXCLUDED(mutex_);
  // The registration has failed or the session has ended.
  void OnFailed(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);

  absl::StatusOr<v1::LayoutAssigned> AwaitAssigned(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<v1::LayoutReady> AwaitReady(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  // The daemon's refusal, or why the session ended; OK if neither came until `deadline`.
  absl::Status AwaitFailure(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  absl::Status AwaitLocked(const bool* answered, absl::Time deadline)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::Mutex mutex_;
  bool is_assigned_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_ready_ ABSL_GUARDED_BY(mutex_) = false;
  v1::LayoutAssigned assigned_ ABSL_GUARDED_BY(mutex_);
  v1::LayoutReady ready_ ABSL_GUARDED_BY(mutex_);
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);
};

// Session::RegisterLayout; Session::ReplaceLayout if `old` is not null.
absl::StatusOr<std::unique_ptr<Layout>> RegisterLayout(
    const std::shared_ptr<Connection>& connection, const LayoutSpec& spec, const Layout* old);

}  // namespace gradsync::client

#endif  // CLIENT_SRC_LAYOUT_REGISTRATION_H_
