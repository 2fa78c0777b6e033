// A gRPC server with prepared answers on a Unix socket of its own: what gradsyncctl talks to here.

#ifndef TESTS_CTL_FAKE_INTROSPECTION_H_
#define TESTS_CTL_FAKE_INTROSPECTION_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "gradsync/v1/introspection.grpc.pb.h"
#include "tests/kit/temporary_directory.h"

namespace gradsync {

// Set the answers before the first question.
class FakeIntrospection final : public v1::Introspection::Service {
 public:
  v1::GetStatusResponse status;
  v1::GetStatsResponse stats;
  v1::GetTimelineResponse timeline;
  grpc::Status verdict;  // of every call

  grpc::Status GetStatus(grpc::ServerContext* context, const v1::GetStatusRequest* request,
                         v1::GetStatusResponse* response) override;
  grpc::Status GetStats(grpc::ServerContext* context, const v1::GetStatsRequest* request,
                        v1::GetStatsResponse* response) override;
  // Answers with the last `steps` steps of `timeline`.
  grpc::Status GetTimeline(grpc::ServerContext* context, const v1::GetTimelineRequest* request,
                           v1::GetTimelineResponse* response) override;
};

// Serves it, and grpc.health.v1 as SERVING for the daemon and its services.
class FakeDaemon {
 public:
  FakeDaemon();
  ~FakeDaemon();

  FakeIntrospection& introspection() { return introspection_; }
  void SetServing(const std::string& service, bool serving);
  void SetServing(bool serving);  // all of them
  std::string socket() const { return directory_.File("d.sock"); }

 private:
  TemporaryDirectory directory_;
  FakeIntrospection introspection_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace gradsync

#endif  // TESTS_CTL_FAKE_INTROSPECTION_H_
