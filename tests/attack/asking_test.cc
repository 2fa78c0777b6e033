// Asking the daemon never fails, whatever another user does: a kubelet would end a daemon that does
// not answer. Meanwhile the job of a third user goes on. Runs outside Bazel's sandbox: inside it
// root cannot become another user.

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "grpc/health/v1/health.grpc.pb.h"
#include "gtest/gtest.h"
#include "tests/attack/neighbours.h"
#include "tests/attack/raw_http2.h"
#include "tests/fault/trainer.h"
#include "tests/kit/deadline.h"
#include "tests/kit/test_daemon.h"

namespace gradsync::attack {
namespace {

using grpc::health::v1::Health;
using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

// An ordinary user without a job.
constexpr uid_t kAsker = 34570;

// This user asks everything that can be asked, again and again.
void ExpectAnswers(const TestDaemon& daemon, uid_t user = geteuid(),
                   std::uint64_t patience_ns = kProbeNs) {
  EXPECT_EQ(Ask(daemon, user, patience_ns), "ANSWERED") << "user " << user;
}

// Asks everything before an attack. Returns how long one answer may take under it.
std::uint64_t AskWhileIdle(const TestDaemon& daemon, uid_t user = geteuid()) {
  const std::uint64_t asked_ns = NowNs();
  ExpectAnswers(daemon, user);
  // On a busy machine answers are late without the attack, too. So under it one answer may take
  // longer than a probe waits, by as much as all thirty take without it.
  return kProbeNs + (NowNs() - asked_ns);
}

struct Case {
  std::string attack;
  std::vector<std::string> prefix;  // of the daemon's command
  uid_t users = 1;                  // that attack at the same time
};

class Asking : public testing::TestWithParam<Case> {};

TEST_P(Asking, NeverFails) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  TestDaemon daemon({}, {}, GetParam().prefix);
  LetEveryoneIn(daemon);
  InnocentJob job(daemon);
  ASSERT_TRUE(job.ready());
  const StepTimes idle = job.Run(200);
  ASSERT_EQ(idle.error, "");
  const std::uint64_t patience_ns = AskWhileIdle(daemon);

  std::vector<std::unique_ptr<Attacker>> attackers;
  for (uid_t user = 0; user < GetParam().users; ++user) {
    attackers.push_back(std::make_unique<Attacker>(daemon, GetParam().attack, kAttacker + user));
    ASSERT_TRUE(attackers.back()->ready());
  }
  ExpectAnswers(daemon, geteuid(), patience_ns);
  ExpectAnswers(daemon, kAsker, patience_ns);
  const StepTimes attacked = job.Run(200);
  EXPECT_EQ(attacked.error, "");
  EXPECT_EQ(attacked.wrong, 0u);
  ExpectAnswers(daemon, geteuid(), patience_ns);
  std::cout << "idle: " << idle << "\nattacked: " << attacked
            << "\nan answer may take: " << patience_ns / 1'000'000 << " ms" << std::endl;
  // A job can begin, too.
  InnocentJob another(daemon, {"--job=another"});
  EXPECT_TRUE(another.ready());
  EXPECT_EQ(another.Run(20).error, "");
  EXPECT_EQ(daemon.Stop(), 0) << "it ends meanwhile, too";
}

INSTANTIATE_TEST_SUITE_P(
    Attacks, Asking,
    testing::Values(Case{"reflection_streams", {}}, Case{"zero_window", {}},
                    Case{"stall_and_close", {"/usr/bin/prlimit", "--nofile=1024:1024"}},
                    Case{"status_flood", {}}, Case{"nothings", {}, /*users=*/3}, Case{"bulk", {}},
                    Case{"side_clients", {}, /*users=*/5},
                    Case{"connections", {"/usr/bin/prlimit", "--nofile=1024:1024"}},
                    Case{"many_layouts", {"/usr/bin/prlimit", "--nofile=1024:1024"}, /*users=*/2}),
    [](const auto& one) { return one.param.attack; });

// The attacker's own user is not locked out either: a container's probe may have the trainers'
// user.
class AskingAsTheAttacker : public testing::TestWithParam<uid_t> {};

TEST_P(AskingAsTheAttacker, NeverFails) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  for (const char* attack : {"reflection_streams", "zero_window"}) {
    const TestDaemon daemon;
    LetEveryoneIn(daemon);
    const std::uint64_t patience_ns = AskWhileIdle(daemon, GetParam());
    const Attacker attacker(daemon, attack, GetParam());
    ASSERT_TRUE(attacker.ready());
    ExpectAnswers(daemon, GetParam(), patience_ns);
  }
}

INSTANTIATE_TEST_SUITE_P(Of, AskingAsTheAttacker, testing::Values(uid_t{0}, kAttacker),
                         [](const auto& user) {
                           return user.param == 0 ? "Root" : "AnOrdinaryUser";
                         });

class Watcher {
 public:
  Watcher(const TestDaemon& daemon, const std::string& service)
      : stub_(Health::NewStub(
            grpc::CreateChannel("unix:" + daemon.socket(), grpc::InsecureChannelCredentials()))) {
    context_.set_deadline(std::chrono::system_clock::now() +
                          std::chrono::milliseconds(kPatienceMs));
    HealthCheckRequest request;
    request.set_service(service);
    reader_ = stub_->Watch(&context_, request);
  }
  // UNKNOWN at the end of the stream.
  HealthCheckResponse::ServingStatus Next() {
    HealthCheckResponse response;
    return reader_->Read(&response) ? response.status() : HealthCheckResponse::UNKNOWN;
  }

 private:
  std::unique_ptr<Health::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<HealthCheckResponse>> reader_;
};

TEST(HealthWatch, TellsTheStateNowAndWhenTheDaemonDrains) {
  TestDaemon daemon;
  fault::Trainer trainer(daemon, 0, 1);
  ASSERT_TRUE(trainer.Join().ok());
  ASSERT_TRUE(trainer.Do("register").ok());
  ASSERT_TRUE(trainer.Do("mark 1 0").ok());  // the daemon waits for the step
  Watcher unknown(daemon, "gradsync.v1.Nothing");
  EXPECT_EQ(unknown.Next(), HealthCheckResponse::SERVICE_UNKNOWN);
  Watcher all(daemon, ""), one(daemon, "gradsync.v1.GradientSync");
  EXPECT_EQ(all.Next(), HealthCheckResponse::SERVING);
  EXPECT_EQ(one.Next(), HealthCheckResponse::SERVING);
  daemon.process().Signal(SIGTERM);
  EXPECT_EQ(all.Next(), HealthCheckResponse::NOT_SERVING);
  EXPECT_EQ(one.Next(), HealthCheckResponse::NOT_SERVING);
}

// A client's header or text adds no line to the daemon's log.
TEST(AskingClient, ForgesNoLineOfTheLog) {
  const TestDaemon daemon;
  const std::uint64_t patience_ns = AskWhileIdle(daemon);
  RawHttp2 client(daemon.socket(), 65535);
  // gRPC logs values that it cannot read.
  client.CallWithHeader("/grpc.health.v1.Health/Check", "grpc-timeout",
                        "1\x01\nERROR forged line job=innocent");
  client.CallWithHeader("/grpc.health.v1.Health/Check", "grpc-encoding",
                        "x\nERROR forged line job=innocent");
  client.Call("/grpc.health.v1.Health/Check", "\x0a\x01\xff");  // it is no UTF-8
  ExpectAnswers(daemon, geteuid(), patience_ns);
  EXPECT_EQ(daemon.Log().find("\nERROR forged"), std::string::npos) << daemon.Log();
  EXPECT_NE(daemon.Log().find("gRPC says="), std::string::npos) << daemon.Log();
  EXPECT_NE(daemon.Log().find("Protocol Buffers says="), std::string::npos) << daemon.Log();
  EXPECT_EQ(daemon.Log().find("[libprotobuf"), std::string::npos) << daemon.Log();
}

}  // namespace
}  // namespace gradsync::attack
