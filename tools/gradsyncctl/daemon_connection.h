// One connection to a daemon's socket, for a few questions before a deadline.

#ifndef TOOLS_GRADSYNCCTL_DAEMON_CONNECTION_H_
#define TOOLS_GRADSYNCCTL_DAEMON_CONNECTION_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "gradsync/v1/introspection.grpc.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "proto/gradsync/limits.h"
#include "tools/gradsyncctl/health_report.h"

namespace gradsync {

// Thread-compatible. Every error's message is a sentence for people that names the socket and the
// next step; its code:
//   NOT_FOUND          no socket there, or no such job, layout or service.
//   UNAVAILABLE        nobody listens, or the connection was closed.
//   PERMISSION_DENIED  the socket's permissions, or the daemon's refusal.
//   INVALID_ARGUMENT   the path cannot be a socket's.
//   DEADLINE_EXCEEDED  no answer within the timeout.
//   UNIMPLEMENTED      the listener there is not a gradsyncd, or an older one.
//   RESOURCE_EXHAUSTED the answer is too long, here or for the daemon; or the user already waits
//                      for too many answers.
//   CANCELLED          a newer question of the user took this one's place, or the answer was not
//                      read within 10 s.
class DaemonConnection {
 public:
  // `timeout` bounds the connection and all the calls together. `most_bytes` bounds each answer.
  static absl::StatusOr<DaemonConnection> Open(const std::string& socket, absl::Duration timeout,
                                               std::size_t most_bytes = kMaxAnswerBytes);

  absl::StatusOr<v1::GetStatusResponse> GetStatus(const std::string& job);
  absl::StatusOr<v1::GetStatsResponse> GetStats(const std::string& job);
  absl::StatusOr<v1::GetTimelineResponse> GetTimeline(const std::string& job,
                                                      const std::string& layout,
                                                      std::uint32_t steps);
  // If the daemon does not know the service, this is no error: the answer is SERVICE_UNKNOWN.
  absl::StatusOr<ServiceHealth> CheckHealth(const std::string& service);

 private:
  DaemonConnection(std::string socket, absl::Duration timeout, absl::Time deadline,
                   std::size_t most_bytes)
      : socket_(std::move(socket)),
        timeout_(timeout),
        deadline_(deadline),
        most_bytes_(most_bytes) {}

  // OK, or the error in the words above.
  absl::Status Translate(const grpc::Status& status) const;

  std::string socket_;
  absl::Duration timeout_;
  absl::Time deadline_;
  std::size_t most_bytes_;
  std::unique_ptr<v1::Introspection::Stub> introspection_;
  std::unique_ptr<grpc::health::v1::Health::Stub> health_;
};

}  // namespace gradsync

#endif  // TOOLS_GRADSYNCCTL_DAEMON_CONNECTION_H_
