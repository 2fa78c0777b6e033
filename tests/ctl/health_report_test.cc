#include "tools/gradsyncctl/health_report.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gradsync {
namespace {

using grpc::health::v1::HealthCheckResponse;
using testing::ElementsAre;
using testing::IsEmpty;

const std::vector<ServiceHealth> kAllServe = {
    {"", HealthCheckResponse::SERVING}, {"gradsync.v1.GradientSync", HealthCheckResponse::SERVING}};
const std::vector<ServiceHealth> kNoneServe = {
    {"", HealthCheckResponse::NOT_SERVING},
    {"gradsync.v1.GradientSync", HealthCheckResponse::SERVICE_UNKNOWN}};

v1::GetStatusResponse Serving() {
  v1::GetStatusResponse status;
  status.set_state(v1::DAEMON_STATE_SERVING);
  return status;
}

TEST(HealthReportTest, CodesAreExitStatuses) {
  EXPECT_EQ(static_cast<int>(HealthCode::kOk), 0);
  EXPECT_EQ(static_cast<int>(HealthCode::kWarn), 1);
  EXPECT_EQ(static_cast<int>(HealthCode::kErr), 2);
  EXPECT_EQ(HealthCodeName(HealthCode::kWarn), "WARN");
}

TEST(HealthReportTest, ServingWithoutWarningsIsOk) {
  const HealthReport report = JudgeHealth(kAllServe, Serving());
  EXPECT_EQ(report.code, HealthCode::kOk);
  EXPECT_THAT(report.reasons, IsEmpty());
}

TEST(HealthReportTest, WarningsAreWarn) {
  v1::GetStatusResponse status = Serving();
  status.add_warnings("no CPU left");
  const HealthReport report = JudgeHealth(kAllServe, status);
  EXPECT_EQ(report.code, HealthCode::kWarn);
  EXPECT_THAT(report.reasons, ElementsAre("no CPU left"));
}

TEST(HealthReportTest, DrainingIsWarnAlthoughItDoesNotServe) {
  v1::GetStatusResponse status;
  status.set_state(v1::DAEMON_STATE_DRAINING);
  const HealthReport report = JudgeHealth(kNoneServe, status);
  EXPECT_EQ(report.code, HealthCode::kWarn);
  EXPECT_THAT(report.reasons, ElementsAre("the daemon drains: it takes no new sessions"));
}

TEST(HealthReportTest, NotServingIsErrAndNamesTheService) {
  v1::GetStatusResponse status = Serving();
  status.add_warnings("slow");
  const HealthReport report = JudgeHealth(kNoneServe, status);
  EXPECT_EQ(report.code, HealthCode::kErr);
  EXPECT_THAT(report.reasons, ElementsAre("the daemon is NOT_SERVING",
                                          "gradsync.v1.GradientSync is SERVICE_UNKNOWN", "slow"));
}

TEST(HealthReportTest, FailedJobWarnsInStatusOnly) {
  v1::GetStatusResponse status = Serving();
  v1::JobStatus* job = status.add_jobs();
  job->set_job_id("digits");
  job->set_state(v1::JOB_STATE_FAILED);
  job->set_failure("rank 1 was lost");
  EXPECT_EQ(JudgeHealth(kAllServe, status).code, HealthCode::kOk);
  const HealthReport report = JudgeStatus(status);
  EXPECT_EQ(report.code, HealthCode::kWarn);
  EXPECT_THAT(report.reasons, ElementsAre("job digits has failed: rank 1 was lost"));

  // Until it is back.
  v1::JobStatus* next = status.add_jobs();
  next->set_job_id("digits");
  next->set_generation(2);
  next->set_state(v1::JOB_STATE_RUNNING);
  EXPECT_EQ(JudgeStatus(status).code, HealthCode::kOk);
  next->set_uid(1);
  EXPECT_EQ(JudgeStatus(status).code, HealthCode::kWarn);
}

}  // namespace
}  // namespace gradsync
