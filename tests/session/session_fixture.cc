#include "tests/session/session_fixture.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {
namespace {

JobEnvironment Environment(const Clock* clock, Reducer* reducer, UserExecutor* executor) {
  JobEnvironment environment;
  environment.clock = clock;
  environment.reducer = reducer;
  environment.executor = executor;
  return environment;
}

}  // namespace

void Populate(int memfd, std::size_t bytes) {
  void* const address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
  ASSERT_NE(address, MAP_FAILED);
  std::memset(address, 0, bytes);
  munmap(address, bytes);
  ASSERT_EQ(fcntl(memfd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL), 0);
}

SessionFixture::SessionFixture(const SessionPolicy& policy)
    : jobs_(Environment(&clock_, &reducer_, &copier_), /*quota_jobs_per_user=*/8),
      sessions_(policy, &jobs_, &quota_, &executor_, &clock_) {}

void SessionFixture::TearDown() {
  for (const auto& session : sessions_.Sessions()) {
    sessions_.End(session, absl::AbortedError("the test has ended"));
  }
  reducer_.CompleteAll();
  RunAll();
}

void SessionFixture::RunAll() {
  while (executor_.pending() > 0 || copier_.pending() > 0) {
    (executor_.pending() > 0 ? executor_ : copier_).RunNext();
  }
}

SessionPolicy SessionFixture::Policy() {
  SessionPolicy policy;
  policy.lease_ns = 30 * kSecondNs;
  policy.staging_bytes = kStagingBytes;
  policy.quota_sessions_per_user = 4;
  policy.quota_layouts_per_session = 2;
  return policy;
}

ClientProcess SessionFixture::Client(uid_t uid, pid_t pid) {
  ClientProcess process;
  process.uid = uid;
  process.gid = uid;
  process.pid = pid;
  return process;
}

absl::Status SessionFixture::Opened::end() const {
  const auto ends = sink->Of<SessionEndMessage>();
  EXPECT_LE(ends.size(), 1u);
  return ends.empty() ? absl::OkStatus() : ends.back().status;
}

SessionFixture::Opened SessionFixture::Open(std::uint32_t rank, std::uint32_t world_size,
                                            const ClientProcess& process, const std::string& job_id,
                                            const std::string& token) {
  OpenRequest request;
  request.job_id = job_id;
  request.token = token;
  request.rank = rank;
  request.world_size = world_size;
  auto sink = std::make_shared<RecordingSink>();
  auto session = OpenNow(process, request, sink);
  return {std::move(session), std::move(sink)};
}

LayoutRequest SessionFixture::Layout(std::uint64_t elements, const std::string& name) {
  LayoutRequest request;
  request.spec.name = name;
  request.spec.explicit_buckets = {{DataType::kFloat32, elements}};
  request.deadline_ns = ~std::uint64_t{0};
  return request;
}

absl::StatusOr<Session::Registration> SessionFixture::RegisterNow(const Opened& opened,
                                                                  const LayoutRequest& request) {
  absl::StatusOr<Session::Registration> answer = absl::UnknownError("not answered");
  bool answered = false;
  opened->RegisterLayout(request, [&](auto registration) {
    answer = std::move(registration);
    answered = true;
  });
  if (!answered) RunAll();
  return answer;
}

absl::StatusOr<std::shared_ptr<Session>> SessionFixture::OpenNow(
    const ClientProcess& process, const OpenRequest& request, std::shared_ptr<SessionSink> sink) {
  absl::StatusOr<std::shared_ptr<Session>> answer = absl::UnknownError("not answered");
  sessions_.Open(process, request, std::move(sink),
                 [&answer](auto session) { answer = std::move(session); });
  return answer;
}

Session::Registration SessionFixture::Register(const Opened& opened, const LayoutRequest& request) {
  auto registration = RegisterNow(opened, request);
  EXPECT_TRUE(registration.ok()) << registration.status();
  return registration.ok() ? *std::move(registration) : Session::Registration{};
}

void ExpectError(const absl::Status& status, absl::StatusCode code, absl::string_view reason,
                 std::initializer_list<absl::string_view> parts) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_EQ(DetailsOf(status).reason, reason) << status;
  for (const absl::string_view part : parts) {
    EXPECT_TRUE(absl::StrContains(status.message(), part)) << part << " in: " << status;
  }
}

}  // namespace gradsync::daemon
