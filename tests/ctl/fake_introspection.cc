#include "tests/ctl/fake_introspection.h"

#include <grpcpp/health_check_service_interface.h>

#include <algorithm>

#include "gtest/gtest.h"

namespace gradsync {

grpc::Status FakeIntrospection::GetStatus(grpc::ServerContext* /*context*/,
                                          const v1::GetStatusRequest* request,
                                          v1::GetStatusResponse* response) {
  *response = status;
  response->clear_jobs();
  for (const v1::JobStatus& job : status.jobs()) {
    if (request->job_id().empty() || request->job_id() == job.job_id()) *response->add_jobs() = job;
  }
  return verdict;
}

grpc::Status FakeIntrospection::GetStats(grpc::ServerContext* /*context*/,
                                         const v1::GetStatsRequest* request,
                                         v1::GetStatsResponse* response) {
  *response = stats;
  response->clear_jobs();
  for (const v1::JobStats& job : stats.jobs()) {
    if (request->job_id().empty() || request->job_id() == job.job_id()) *response->add_jobs() = job;
  }
  return verdict;
}

grpc::Status FakeIntrospection::GetTimeline(grpc::ServerContext* /*context*/,
                                            const v1::GetTimelineRequest* request,
                                            v1::GetTimelineResponse* response) {
  const int steps = std::max(1, static_cast<int>(request->steps()));
  for (int i = std::max(0, timeline.steps_size() - steps); i < timeline.steps_size(); ++i) {
    *response->add_steps() = timeline.steps(i);
  }
  return verdict;
}

FakeDaemon::FakeDaemon() {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  builder.AddListeningPort("unix:" + socket(), grpc::InsecureServerCredentials());
  builder.RegisterService(&introspection_);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) {
    ADD_FAILURE() << "no server at " << socket();
    return;
  }
  SetServing(true);
  SetServing("gradsync.v1.GradientSync", true);
  SetServing("gradsync.v1.Introspection", true);
}

FakeDaemon::~FakeDaemon() {
  if (server_ != nullptr) server_->Shutdown();
}

void FakeDaemon::SetServing(const std::string& service, bool serving) {
  server_->GetHealthCheckService()->SetServingStatus(service, serving);
}

void FakeDaemon::SetServing(bool serving) {
  server_->GetHealthCheckService()->SetServingStatus(serving);
}

}  // namespace gradsync
