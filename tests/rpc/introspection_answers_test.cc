#include "daemon/rpc/introspection_answers.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/base/unique_fd.h"
#include "daemon/job/job_port.h"
#include "daemon/rpc/connections.h"
#include "daemon/rpc/node_status_source.h"
#include "daemon/session/descriptor_quota.h"
#include "tests/job/recording_sink.h"
#include "tests/session/session_fixture.h"

namespace gradsync::daemon {
namespace {

using Names = std::set<std::string>;

// No user of a test: the daemon's own user, which the test plays, sees everything.
constexpr uid_t kTenant = 54321, kOther = 54322;

const PodPlace kNode{PodPlace::Kind::kNode, {}};
const PodPlace kUnknown{};
const PodPlace kPodA{PodPlace::Kind::kPod, *PodId::Parse("6f1e0c4a93d24a578f0e1b2c3d4e5f60")};
const PodPlace kPodB{PodPlace::Kind::kPod, *PodId::Parse("0a4d5e7c111142229333abcdefabcdef")};

ClientProcess Process(uid_t uid, const PodPlace& place, pid_t pid = 1) {
  ClientProcess process;
  process.uid = uid;
  process.pid = pid;
  process.place = place;
  return process;
}

// Jobs that other nodes coordinate.
class FakeNodes final : public NodeStatusSource {
 public:
  explicit FakeNodes(std::vector<RemoteJobSnapshot> jobs) : jobs_(std::move(jobs)) {}
  JobNodes NodesOf(const Job&) override { return {}; }
  std::vector<RemoteJobSnapshot> RemoteJobs(RemoteJobFilter wanted) override {
    std::vector<RemoteJobSnapshot> found;
    for (const RemoteJobSnapshot& job : jobs_) {
      if (wanted({job.uid, job.job_id, job.incarnations})) found.push_back(job);
    }
    return found;
  }

 private:
  const std::vector<RemoteJobSnapshot> jobs_;
};

class IntrospectionTest : public SessionFixture {
 protected:
  void SetUp() override {
    Begin("a", Process(kTenant, kPodA, 11));
    Begin("b", Process(kTenant, kPodB, 12));
    Begin("node", Process(kTenant, kNode, 13));
    Begin("other", Process(kOther, kNode, 14));
    Begin("root", Process(0, kPodB, 15));
  }
  void Begin(const std::string& job, const ClientProcess& process) {
    sessions_of_test_.push_back(Open(0, 3, process, job));
    ASSERT_TRUE(sessions_of_test_.back().session.ok());
  }
  IntrospectionContext Context() {
    IntrospectionContext context;
    context.sessions = &sessions_;
    context.jobs = &jobs_;
    context.quota = &quota_;
    context.gpu_quota = &gpu_quota_;
    context.control_quota = &control_quota_;
    context.engine_quota = &engine_quota_;
    context.clock = &clock_;
    return context;
  }
  // A job with a rank of this session; null: with none.
  static RemoteJobSnapshot RemoteJob(const std::string& job_id, uid_t uid, const Session* session) {
    RemoteJobSnapshot job;
    job.uid = uid;
    job.job_id = job_id;
    if (session != nullptr) job.incarnations = {session->identity().incarnation};
    return job;
  }
  static Names RemoteJobsOf(const v1::GetStatusResponse& status) {
    Names names;
    for (const auto& job : status.remote_jobs()) names.insert(job.job_id());
    return names;
  }
  // Checks all answers, each of which must show these jobs and as many users.
  void ExpectSees(const IntrospectionContext& context, const ClientProcess& asker,
                  const Names& jobs, std::size_t users, const std::string& who) {
    const IntrospectionAnswers answers(context);
    Names status, stats;
    const v1::GetStatusResponse all = answers.Status(asker, {});
    for (const auto& job : all.jobs()) status.insert(job.job_id());
    const v1::GetStatsResponse numbers = answers.Stats(asker, {});
    for (const auto& job : numbers.jobs()) stats.insert(job.job_id());
    EXPECT_EQ(status, jobs) << who;
    EXPECT_EQ(stats, jobs) << who;
    EXPECT_EQ(static_cast<std::size_t>(all.users_size()), users) << who;
    for (const char* job : {"a", "b", "node", "other", "root"}) {
      v1::GetStatusRequest request;
      request.set_job_id(job);
      EXPECT_EQ(answers.Status(asker, request).jobs_size(), static_cast<int>(jobs.count(job)))
          << who << " asks for " << job;
    }
  }

  ArenaQuota gpu_quota_{1 << 20};
  ArenaQuota control_quota_{1 << 20};
  ArenaQuota engine_quota_{1 << 20};
  std::vector<Opened> sessions_of_test_;
};

const Names kAll = {"a", "b", "node", "other", "root"};

TEST_F(IntrospectionTest, ShowsTheJobsOfTheAskersPod) {
  const IntrospectionContext context = Context();
  ExpectSees(context, Process(kTenant, kPodA), {"a"}, 1, "a user in a pod");
  ExpectSees(context, Process(kTenant, kPodB), {"b"}, 1, "the same user in another pod");
  ExpectSees(context, Process(kTenant, kNode), {"node"}, 1, "the same user in no pod");
  ExpectSees(context, Process(kTenant, kUnknown), {"node"}, 1, "nobody knows where");
  ExpectSees(context, Process(kOther, kPodA), {}, 0, "another user in the pod");
}

TEST_F(IntrospectionTest, RootOfTheNodeSeesAllAndRootOfAPodItsPod) {
  IntrospectionContext context = Context();
  ExpectSees(context, Process(0, kNode), kAll, 5, "root on the node");
  ExpectSees(context, Process(geteuid(), kNode), kAll, 5, "the daemon's user");
  ExpectSees(context, Process(0, kPodA), {"a"}, 1, "root in a pod");
  ExpectSees(context, Process(0, kPodB), {"b", "root"}, 2, "root in a pod with a job of root");
  ExpectSees(context, Process(0, kUnknown), {}, 0, "root, nobody knows where");
  context.pod = kPodA.pod;
  ExpectSees(context, Process(0, kPodA), kAll, 5, "root in the daemon's pod");
  ExpectSees(context, Process(0, kPodB), {"b", "root"}, 2, "root in another pod");
}

TEST_F(IntrospectionTest, RootOfAPodSeesAllIfTheOptionSaysSo) {
  IntrospectionContext context = Context();
  context.pod_root_sees_all = true;
  ExpectSees(context, Process(0, kPodB), kAll, 5, "root in a pod");
  ExpectSees(context, Process(0, kUnknown), kAll, 5, "root, nobody knows where");
  ExpectSees(context, Process(kTenant, kPodA), {"a"}, 1, "another user");
}

TEST_F(IntrospectionTest, JobOfSeveralPodsIsSeenFromEach) {
  ASSERT_TRUE(Open(1, 3, Process(kTenant, kPodB, 16), "a").session.ok());
  const IntrospectionContext context = Context();
  ExpectSees(context, Process(kTenant, kPodA), {"a"}, 1, "the first pod");
  ExpectSees(context, Process(kTenant, kPodB), {"a", "b"}, 1, "the second pod");
}

TEST_F(IntrospectionTest, ShowsWhatTheEnginesOfAUserTake) {
  const auto held = engine_quota_.Reserve(Process(kTenant, kPodA).tenant(), 1000);
  ASSERT_TRUE(held.ok()) << held.status();
  const v1::GetStatusResponse status =
      IntrospectionAnswers(Context()).Status(Process(kTenant, kPodA), {});
  ASSERT_EQ(status.users_size(), 1);
  EXPECT_EQ(status.users(0).engine_bytes(), 1000u);
  EXPECT_EQ(status.users(0).engine_quota_bytes(), std::uint64_t{1} << 20);
}

// Such a user may be about to use up its quota of calls.
TEST_F(IntrospectionTest, ShowsUsersWhoHoldNoMemory) {
  constexpr uid_t kCaller = 54323, kConnected = 54324, kOnlyRefused = 54325;
  DescriptorQuota descriptors(100);
  Connections connections(&descriptors);
  const UniqueFd accepted(open("/dev/null", O_RDONLY | O_CLOEXEC));
  const auto admitted = connections.Admit(accepted, Process(kConnected, kNode));
  ASSERT_TRUE(admitted.ok()) << admitted.status();
  for (const uid_t user : {kConnected, kCaller, kOnlyRefused})
    connections.CountRefused(Tenant(user));
  std::set<Tenant> counted;
  IntrospectionContext context = Context();
  context.connections = &connections;
  context.open_calls = [&](TenantFilter wanted) {
    counted.clear();
    std::map<Tenant, std::uint64_t> calls;
    for (const Tenant& user : {Tenant(kCaller), Tenant(kConnected), Tenant(kOnlyRefused)}) {
      if (!wanted(user)) continue;
      counted.insert(user);
      calls[user] = user.uid == kCaller ? 7 : 0;
    }
    return calls;
  };
  const IntrospectionAnswers answers(context);
  std::map<uid_t, v1::UserMemory> seen;
  const v1::GetStatusResponse all = answers.Status(Process(0, kNode), {});
  for (const v1::UserMemory& user : all.users()) seen[user.uid()] = user;
  EXPECT_EQ(seen.count(kOnlyRefused), 0u);
  EXPECT_EQ(seen[kConnected].connections(), 1u);
  EXPECT_EQ(seen[kConnected].calls(), 0u);
  EXPECT_EQ(seen[kConnected].connections_refused(), 1u);
  EXPECT_EQ(seen[kCaller].connections(), 0u);
  EXPECT_EQ(seen[kCaller].calls(), 7u);
  EXPECT_EQ(seen[kCaller].connections_refused(), 1u);

  const v1::GetStatusResponse own = answers.Status(Process(kConnected, kNode), {});
  ASSERT_EQ(own.users_size(), 1);
  EXPECT_EQ(own.users(0).uid(), kConnected);
  EXPECT_EQ(counted, std::set<Tenant>{Tenant(kConnected)})
      << "others' calls cost the asker nothing";
}

TEST_F(IntrospectionTest, NamesThePodOfASessionAndOfAUser) {
  const v1::GetStatusResponse status =
      IntrospectionAnswers(Context()).Status(Process(kTenant, kPodA), {});
  ASSERT_EQ(status.jobs_size(), 1);
  EXPECT_EQ(status.jobs(0).sessions(0).pod(), "6f1e0c4a-93d2-4a57-8f0e-1b2c3d4e5f60");
  ASSERT_EQ(status.users_size(), 1);
  EXPECT_EQ(status.users(0).uid(), kTenant);
  EXPECT_EQ(status.users(0).pod(), "6f1e0c4a-93d2-4a57-8f0e-1b2c3d4e5f60");
}

// One trainer can begin a job of 65,536 ranks. Its answer stays short.
TEST_F(IntrospectionTest, ListsTheLowestMissingRanksAndCountsAll) {
  JoinRequest join;  // on another node, so its ranks are no sessions of this user here
  join.key = {kTenant, "wide", ""};
  join.rank = 2;
  join.world_size = 1200;
  join.incarnation = 99;
  absl::Status joined;
  jobs_.Join(join, std::make_shared<RecordingSink>(),
             [&](const absl::StatusOr<Joined>& job) { joined = job.status(); });
  ASSERT_TRUE(joined.ok()) << joined;
  v1::GetStatusRequest request;
  request.set_job_id("wide");
  const v1::GetStatusResponse status =
      IntrospectionAnswers(Context()).Status(Process(0, kNode), request);
  ASSERT_EQ(status.jobs_size(), 1);
  const v1::JobStatus& job = status.jobs(0);
  EXPECT_EQ(job.missing_ranks_total(), 1199u);
  ASSERT_EQ(job.missing_ranks_size(), 1024);
  EXPECT_EQ(job.missing_ranks(1), 1u);
  EXPECT_EQ(job.missing_ranks(2), 3u);
  EXPECT_EQ(job.missing_ranks(1023), 1024u);
  EXPECT_LT(job.ByteSizeLong(), 4096u);
}

TEST_F(IntrospectionTest, CountsTheFormerRanksThatItDoesNotList) {
  constexpr std::uint32_t kRanks = 1030;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    const std::uint64_t incarnation = 100 + rank;
    const auto job =
        jobs_.Join({kTenant, "wide", ""}, rank, kRanks, {}, incarnation,
                   std::make_shared<RecordingSink>(), {rank == 0 ? "" : "beta", {}, nullptr});
    ASSERT_TRUE(job.ok()) << job.status();
    if (rank == 0) continue;  // so that the job goes on
    ASSERT_TRUE((*job)->Leave({rank, incarnation}, /*exit=*/true).ok());
  }
  FakeNodes nodes({});
  IntrospectionContext context = Context();
  context.nodes = &nodes;
  v1::GetStatusRequest request;
  request.set_job_id("wide");
  const v1::GetStatusResponse status =
      IntrospectionAnswers(context).Status(Process(0, kNode), request);
  ASSERT_EQ(status.jobs_size(), 1);
  ASSERT_EQ(status.jobs(0).nodes_size(), 2);
  EXPECT_EQ(status.jobs(0).nodes(1).name(), "beta");
  EXPECT_EQ(status.jobs(0).nodes(1).ranks_size(), 1024);
  EXPECT_EQ(status.jobs(0).former_ranks_unlisted(), 5u);
}

// The source copies only those.
TEST_F(IntrospectionTest, AsksForTheRemoteJobsThatTheAskerMaySee) {
  FakeNodes nodes({RemoteJob("far a", kTenant, sessions_of_test_[0].session->get()),
                   RemoteJob("far node", kTenant, sessions_of_test_[2].session->get()),
                   RemoteJob("far other", kOther, sessions_of_test_[3].session->get()),
                   RemoteJob("waiting", kTenant, nullptr)});
  IntrospectionContext context = Context();
  context.nodes = &nodes;
  const IntrospectionAnswers answers(context);
  const auto seen = [&](const ClientProcess& asker, const v1::GetStatusRequest& request = {}) {
    return RemoteJobsOf(answers.Status(asker, request));
  };
  EXPECT_EQ(seen(Process(kTenant, kPodA)), (Names{"far a"}));
  EXPECT_EQ(seen(Process(kTenant, kNode)), (Names{"far node", "waiting"}));
  EXPECT_EQ(seen(Process(kOther, kNode)), (Names{"far other"}));
  EXPECT_EQ(seen(Process(0, kNode)), (Names{"far a", "far node", "far other", "waiting"}));
  v1::GetStatusRequest one;
  one.set_job_id("far a");
  EXPECT_EQ(seen(Process(0, kNode), one), (Names{"far a"}));
}

}  // namespace
}  // namespace gradsync::daemon
