// Answers grpc.health.v1: whether the daemon and its services serve.

#ifndef DAEMON_RPC_HEALTH_ANSWERS_H_
#define DAEMON_RPC_HEALTH_ANSWERS_H_

#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/base/mutex.h"
#include "daemon/rpc/question_stream.h"
#include "grpc/health/v1/health.pb.h"

namespace gradsync::daemon {

// Thread-safe.
class HealthAnswers {
 public:
  using Request = grpc::health::v1::HealthCheckRequest;
  using Response = grpc::health::v1::HealthCheckResponse;
  using Stream = QuestionStream<Request, Response>;

  // Full names of the services, besides "" for the whole daemon. All serve from the beginning.
  explicit HealthAnswers(std::set<std::string> services) : services_(std::move(services)) {}

  // NOT_FOUND: there is no such service.
  absl::StatusOr<Response> Check(const Request& request) const;
  // Answers now, and again when the state changes.
  void Watch(const std::shared_ptr<Stream>& stream, const Request& request);
  // Nothing serves any more.
  void StopServing();

 private:
  Response StateOf(const std::string& service) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::set<std::string> services_;
  mutable Mutex mutex_;
  bool serving_ ABSL_GUARDED_BY(mutex_) = true;
  struct Watcher {
    std::weak_ptr<Stream> stream;
    std::string service;
  };
  std::vector<Watcher> watchers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_HEALTH_ANSWERS_H_
