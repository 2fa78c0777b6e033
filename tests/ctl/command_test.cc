// gradsyncctl against a server with prepared answers: what it prints where, and its exit status.

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/base/unique_fd.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/ctl/fake_introspection.h"
#include "tests/kit/obey_permissions.h"
#include "tests/kit/temporary_directory.h"
#include "tools/gradsyncctl/run_command.h"

namespace gradsync {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

struct Outcome {
  int exit_status = -1;
  std::string out;
  std::string error;
};

Outcome RunCtl(const std::vector<std::string>& arguments, const char* socket_variable = nullptr) {
  std::ostringstream out;
  std::ostringstream error;
  const int exit_status = RunCommand(arguments, socket_variable, out, error);
  return {exit_status, out.str(), error.str()};
}

// A listening socket that gRPC does not stand behind.
daemon::UniqueFd ListenAt(const std::string& path) {
  daemon::UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  EXPECT_EQ(bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_EQ(listen(fd.get(), 8), 0);
  return fd;
}

class CommandTest : public testing::Test {
 protected:
  CommandTest() {
    v1::GetStatusResponse& status = daemon_.introspection().status;
    status.set_version("9.8.7");
    status.set_state(v1::DAEMON_STATE_SERVING);
    status.set_socket(daemon_.socket());
    AddJob("digits", "model");
  }

  // Adds a job with one layout, one committed step and statistics.
  void AddJob(const std::string& id, const std::string& layout) {
    FakeIntrospection& fake = daemon_.introspection();
    v1::JobStatus* job = fake.status.add_jobs();
    job->set_job_id(id);
    job->set_world_size(1);
    job->set_state(v1::JOB_STATE_RUNNING);
    v1::SessionStatus* session = job->add_sessions();
    session->set_state("live");
    session->set_client("a-client");
    job->add_layouts()->set_name(layout);
    v1::JobStats* stats = fake.stats.add_jobs();
    stats->set_job_id(id);
    stats->add_layouts()->set_name(layout);
    for (std::uint64_t number = 1; number <= 3; ++number) {
      v1::StepTimeline* step = fake.timeline.add_steps();
      step->set_step(number);
      step->set_verdict(v1::VERDICT_COMPLETE);
      step->set_commit_ns(9000);
      v1::BucketTimes* bucket = step->add_buckets();
      bucket->add_ready_ns(1000);
      bucket->set_start_ns(2000);
      bucket->set_finish_ns(8000);
    }
  }

  // Asks the fake daemon.
  Outcome Ask(std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), {"--socket", daemon_.socket()});
    return RunCtl(arguments);
  }

  FakeDaemon daemon_;
};

TEST_F(CommandTest, StatusIsText) {
  const Outcome outcome = Ask({"status"});
  EXPECT_EQ(outcome.exit_status, 0) << outcome.error;
  EXPECT_THAT(outcome.out, StartsWith("gradsyncd 9.8.7: serving"));
  EXPECT_THAT(outcome.out, HasSubstr("\ndigits "));
  EXPECT_THAT(outcome.out, Not(HasSubstr("a-client")));
  EXPECT_EQ(outcome.error, "");
}

TEST_F(CommandTest, StatusOfOneJobListsItsRanks) {
  AddJob("other", "model");
  const Outcome outcome = Ask({"status", "--job", "other"});
  EXPECT_EQ(outcome.exit_status, 0) << outcome.error;
  EXPECT_THAT(outcome.out, HasSubstr("a-client"));
  EXPECT_THAT(outcome.out, Not(HasSubstr("digits")));
}

TEST_F(CommandTest, SocketMayComeFromTheEnvironment) {
  EXPECT_EQ(RunCtl({"status"}, daemon_.socket().c_str()).exit_status, 0);
}

TEST_F(CommandTest, StatusJsonIsTheMessage) {
  const Outcome outcome = Ask({"status", "--json"});
  EXPECT_EQ(outcome.exit_status, 0) << outcome.error;
  const nlohmann::json json = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(json.at("version"), "9.8.7");
  EXPECT_EQ(json.at("state"), "DAEMON_STATE_SERVING");
  EXPECT_EQ(json.at("arena_bytes"), "0");
  EXPECT_EQ(json.at("jobs").at(0).at("job_id"), "digits");
}

TEST_F(CommandTest, TakesAnswersThatAreLongerThanGrpcsDefaultLimit) {
  const std::string text(5 << 20, 'x');
  daemon_.introspection().status.add_notices(text);
  daemon_.introspection().stats.mutable_jobs(0)->mutable_layouts(0)->set_name(text);
  for (const char* command : {"status", "stats", "health"}) {
    const Outcome outcome = Ask({command, "--json", "--timeout", "60"});
    EXPECT_EQ(outcome.exit_status, 0) << command << ": " << outcome.error;
  }
  EXPECT_GT(Ask({"status", "--timeout", "60"}).out.size(), text.size());
}

TEST_F(CommandTest, StatusAndStatsWarnOfAFailedJobOrAWarning) {
  daemon_.introspection().status.add_warnings("few CPUs");
  for (const char* command : {"status", "stats"}) {
    const Outcome outcome = Ask({command});
    EXPECT_EQ(outcome.exit_status, 1);
    EXPECT_THAT(outcome.out, HasSubstr("WARN  few CPUs\n"));
    EXPECT_EQ(Ask({command, "--json"}).exit_status, 1);
  }
  daemon_.introspection().status.clear_warnings();
  daemon_.introspection().status.mutable_jobs(0)->set_state(v1::JOB_STATE_FAILED);
  EXPECT_EQ(Ask({"status"}).exit_status, 1);
  EXPECT_EQ(Ask({"stats"}).exit_status, 1);
}

TEST_F(CommandTest, StatsAreTextOrTheMessage) {
  const Outcome text = Ask({"stats"});
  EXPECT_EQ(text.exit_status, 0) << text.error;
  EXPECT_THAT(text.out, HasSubstr("job digits"));
  const Outcome json = Ask({"stats", "--json", "--job", "digits"});
  EXPECT_EQ(json.exit_status, 0) << json.error;
  EXPECT_EQ(nlohmann::json::parse(json.out).at("jobs").at(0).at("layouts").at(0).at("name"),
            "model");
}

TEST_F(CommandTest, UnknownJobIsNamedWithTheKnownOnes) {
  AddJob("other", "model");
  for (const char* command : {"status", "stats", "timeline"}) {
    const Outcome outcome = Ask({command, "--job", "nope"});
    EXPECT_EQ(outcome.exit_status, 2);
    EXPECT_EQ(outcome.out, "");
    EXPECT_EQ(outcome.error, "gradsyncctl: no job nope; there is: digits, other\n");
  }
}

TEST_F(CommandTest, RemoteJobNamesItsCoordinator) {
  v1::GetStatusResponse& status = daemon_.introspection().status;
  status.clear_jobs();
  v1::RemoteJobStatus* job = status.add_remote_jobs();
  job->set_job_id("digits");
  job->set_coordinator("10.0.0.1:7417");
  job->set_node_name("alpha");
  job->add_sessions()->set_client("a-client");
  const Outcome shown = Ask({"status", "--job", "digits"});
  EXPECT_EQ(shown.exit_status, 0) << shown.error;
  EXPECT_THAT(shown.out, HasSubstr("a-client"));
  for (const char* command : {"stats", "timeline"}) {
    const Outcome outcome = Ask({command, "--job", "digits"});
    EXPECT_EQ(outcome.exit_status, 2);
    EXPECT_THAT(outcome.error, HasSubstr("by the daemon of node alpha at 10.0.0.1:7417"));
  }
  EXPECT_EQ(Ask({"stats"}).exit_status, 0);
}

TEST_F(CommandTest, NoticeDoesNotWarn) {
  daemon_.introspection().status.add_notices("as it was meant");
  const Outcome outcome = Ask({"status"});
  EXPECT_EQ(outcome.exit_status, 0);
  EXPECT_THAT(outcome.out, HasSubstr("NOTE  as it was meant"));
  EXPECT_EQ(Ask({"health"}).exit_status, 0);
}

TEST_F(CommandTest, TimelineDrawsTheLastStepOfTheOnlyLayout) {
  const Outcome outcome = Ask({"timeline"});
  EXPECT_EQ(outcome.exit_status, 0) << outcome.error;
  EXPECT_THAT(outcome.out,
              StartsWith("step 3 of model, job digits: complete, 1 bucket in 8.00 us;"));
  EXPECT_THAT(Ask({"timeline", "--steps", "2"}).out, StartsWith("step 2 of model"));
  EXPECT_THAT(Ask({"timeline", "--step", "2"}).out, StartsWith("step 2 of model"));
  EXPECT_THAT(Ask({"timeline", "--step", "9"}).error,
              HasSubstr("step 9 is not among the last steps that the daemon keeps: "));
  const Outcome json = Ask({"timeline", "--json", "--steps", "64"});
  EXPECT_EQ(nlohmann::json::parse(json.out).at("steps").size(), 3u);
}

TEST_F(CommandTest, TimelineListsJobsAndLayoutsToChooseFrom) {
  daemon_.introspection().status.mutable_jobs(0)->add_layouts()->set_name("head");
  EXPECT_EQ(Ask({"timeline"}).error,
            "gradsyncctl: job digits has several layouts: choose one with --layout: model, head\n");
  EXPECT_EQ(Ask({"timeline", "--layout", "tail"}).error,
            "gradsyncctl: no layout tail; there is: model, head\n");
  EXPECT_EQ(Ask({"timeline", "--layout", "head"}).exit_status, 0);
  AddJob("other", "model");
  EXPECT_EQ(Ask({"timeline"}).error,
            "gradsyncctl: there are several jobs: choose one with --job: digits, other\n");
  EXPECT_EQ(Ask({"timeline", "--job", "other"}).exit_status, 0);
}

TEST_F(CommandTest, TimelineChoosesTheOnlyLiveJobAndCountsGenerationsOnce) {
  v1::GetStatusResponse& status = daemon_.introspection().status;
  AddJob("digits", "model");
  status.mutable_jobs(1)->set_state(v1::JOB_STATE_FAILED);
  AddJob("old", "model");
  status.mutable_jobs(2)->set_state(v1::JOB_STATE_ENDED);
  const Outcome outcome = Ask({"timeline"});
  EXPECT_EQ(outcome.exit_status, 0) << outcome.error;
  EXPECT_THAT(outcome.out, HasSubstr("of model, job digits"));
}

TEST_F(CommandTest, TimelineWithoutLayoutOrJobSaysWhatIsMissing) {
  daemon_.introspection().status.mutable_jobs(0)->clear_layouts();
  EXPECT_EQ(Ask({"timeline"}).error, "gradsyncctl: job digits has no layout yet\n");
  daemon_.introspection().status.clear_jobs();
  const Outcome outcome = Ask({"timeline"});
  EXPECT_EQ(outcome.exit_status, 2);
  EXPECT_EQ(outcome.error, "gradsyncctl: the daemon has no job, so no timeline\n");
}

TEST_F(CommandTest, HealthIsZeroOneTwo) {
  Outcome outcome = Ask({"health"});
  EXPECT_EQ(outcome.exit_status, 0) << outcome.error;
  EXPECT_THAT(outcome.out, StartsWith("OK  gradsyncd 9.8.7"));

  daemon_.introspection().status.add_warnings("few CPUs");
  outcome = Ask({"health"});
  EXPECT_EQ(outcome.exit_status, 1);
  EXPECT_THAT(outcome.out, HasSubstr("  few CPUs\n"));

  // A probe asks grpc.health.v1. If the daemon does not say the rest, that is a warning.
  daemon_.introspection().verdict = grpc::Status(grpc::RESOURCE_EXHAUSTED, "too many questions");
  outcome = Ask({"health"});
  EXPECT_EQ(outcome.exit_status, 1);
  EXPECT_THAT(outcome.out, StartsWith("WARN  gradsyncd\n"));
  EXPECT_THAT(outcome.out, HasSubstr("too many questions"));
  daemon_.introspection().verdict = grpc::Status::OK;

  daemon_.SetServing("gradsync.v1.GradientSync", false);
  outcome = Ask({"health"});
  EXPECT_EQ(outcome.exit_status, 2);
  EXPECT_THAT(outcome.out, HasSubstr("gradsync.v1.GradientSync is NOT_SERVING\n"));

  daemon_.SetServing(false);
  daemon_.introspection().status.set_state(v1::DAEMON_STATE_DRAINING);
  outcome = Ask({"health", "--json"});
  EXPECT_EQ(outcome.exit_status, 1);
  const nlohmann::json json = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(json.at("code"), "WARN");
  EXPECT_EQ(json.at("exit_status"), 1);
  EXPECT_EQ(json.at("services").at(""), "NOT_SERVING");
}

TEST_F(CommandTest, RefusalOfTheDaemonIsShown) {
  daemon_.introspection().verdict =
      grpc::Status(grpc::StatusCode::PERMISSION_DENIED, "not for you\x1B[2J");
  const Outcome outcome = Ask({"status"});
  EXPECT_EQ(outcome.exit_status, 2);
  EXPECT_EQ(outcome.error,
            "gradsyncctl: the daemon at " + daemon_.socket() + ": not for you?[2J\n");
}

TEST_F(CommandTest, OlderDaemonIsReported) {
  daemon_.introspection().verdict = grpc::Status(grpc::StatusCode::UNIMPLEMENTED, "");
  EXPECT_THAT(Ask({"status"}).error, HasSubstr("an older one than this gradsyncctl"));
}

TEST(UsageTest, FaultsGoToErrorWithAHintAndExitTwo) {
  const Outcome outcome = RunCtl({"stat"});
  EXPECT_EQ(outcome.exit_status, 2);
  EXPECT_EQ(outcome.out, "");
  EXPECT_EQ(outcome.error,
            "gradsyncctl: unknown command 'stat'; the commands are status, stats, timeline, "
            "health and doctor\nTry 'gradsyncctl --help'.\n");
}

TEST(UsageTest, HelpAndVersionGoToOutAndExitZero) {
  EXPECT_THAT(RunCtl({"--help"}).out, StartsWith("Usage: gradsyncctl COMMAND"));
  EXPECT_THAT(RunCtl({"stats", "--help"}).out, StartsWith("Usage: gradsyncctl stats"));
  EXPECT_THAT(
      RunCtl({"status", "--help"}).out,
      AllOf(HasSubstr("\nUsers "), HasSubstr("\n  IN THE DAEMON "), HasSubstr("ENGINE QUOTA"),
            HasSubstr("DAEMON QUOTA"), HasSubstr("\n  CONNECTIONS "), HasSubstr("\n  CALLS "),
            HasSubstr("\n  REFUSED ")));
  EXPECT_THAT(RunCtl({"--version"}).out, StartsWith("gradsyncctl 0."));
  EXPECT_EQ(RunCtl({"--help"}).exit_status, 0);
}

TEST(UnreachableTest, MissingSocketNamesTheStartCommand) {
  const TemporaryDirectory directory;
  const std::string path = directory.File("none.sock");
  for (const char* command : {"status", "stats", "timeline", "health"}) {
    const Outcome outcome = RunCtl({command, "--socket", path});
    EXPECT_EQ(outcome.exit_status, 2);
    EXPECT_EQ(outcome.out, "");
    EXPECT_THAT(outcome.error, HasSubstr(absl::StrCat("no daemon at ", path,
                                                      ": start it with 'gradsyncd --socket=", path,
                                                      "', or name its socket with --socket PATH")));
  }
}

TEST(UnreachableTest, HealthJsonSaysErr) {
  const TemporaryDirectory directory;
  const Outcome outcome = RunCtl({"health", "--json", "--socket", directory.File("none.sock")});
  EXPECT_EQ(outcome.exit_status, 2);
  EXPECT_EQ(nlohmann::json::parse(outcome.out).at("code"), "ERR");
}

TEST(UnreachableTest, EndedDaemonIsReported) {
  const TemporaryDirectory directory;
  const std::string path = directory.File("d.sock");
  ListenAt(path).reset();
  const Outcome outcome = RunCtl({"status", "--socket", path});
  EXPECT_EQ(outcome.exit_status, 2);
  EXPECT_THAT(outcome.error, HasSubstr("no daemon at " + path + " any more"));
}

TEST(UnreachableTest, PathThatIsNoSocketOrTooLongIsReported) {
  const TemporaryDirectory directory;
  const std::string path = directory.File("file");
  std::ofstream(path) << "text";
  EXPECT_THAT(RunCtl({"status", "--socket", path}).error, HasSubstr(path + " is not a socket"));
  const Outcome outcome = RunCtl({"status", "--socket", directory.File(std::string(120, 'x'))});
  EXPECT_EQ(outcome.exit_status, 2);
  EXPECT_THAT(outcome.error, HasSubstr("is longer than 107 bytes"));
}

TEST(UnreachableTest, SilentDaemonTimesOut) {
  const TemporaryDirectory directory;
  const daemon::UniqueFd listener = ListenAt(directory.File("d.sock"));
  const Outcome outcome =
      RunCtl({"status", "--socket", directory.File("d.sock"), "--timeout", "0.2"});
  EXPECT_EQ(outcome.exit_status, 2);
  EXPECT_THAT(outcome.error, HasSubstr("did not answer within 200ms"));
}

TEST(UnreachableTest, ClosedConnectionIsReported) {
  const TemporaryDirectory directory;
  const daemon::UniqueFd listener = ListenAt(directory.File("d.sock"));
  std::thread closer(
      [&listener] { daemon::UniqueFd(accept(listener.get(), nullptr, nullptr)).reset(); });
  const Outcome outcome = RunCtl({"status", "--socket", directory.File("d.sock")});
  closer.join();
  EXPECT_EQ(outcome.exit_status, 2);
  EXPECT_THAT(outcome.error, HasSubstr("closed the connection"));
}

TEST(UnreachableTest, PermissionIsExplained) {
  const TemporaryDirectory directory;
  const std::string path = directory.File("d.sock");
  const daemon::UniqueFd listener = ListenAt(path);
  ASSERT_EQ(chmod(path.c_str(), 0), 0);
  Outcome outcome;
  std::thread asker([&] {
    ObeyPermissions();
    outcome = RunCtl({"status", "--socket", path});
  });
  asker.join();
  EXPECT_EQ(outcome.exit_status, 2);
  EXPECT_THAT(outcome.error, HasSubstr("not allowed to connect to " + path));
  EXPECT_THAT(outcome.error, HasSubstr("join its group"));
}

TEST(UnreachableTest, FolderThatHidesTheSocketIsExplained) {
  const TemporaryDirectory directory;
  ASSERT_EQ(chmod(directory.path().c_str(), 0010), 0);
  Outcome outcome;
  std::thread asker([&] {
    ObeyPermissions();
    outcome = RunCtl({"status", "--socket", directory.File("d.sock")});
  });
  asker.join();
  EXPECT_EQ(chmod(directory.path().c_str(), 0700), 0);
  EXPECT_EQ(outcome.exit_status, 2);
  EXPECT_THAT(outcome.error, HasSubstr("of its folder " + directory.path()));
}

}  // namespace
}  // namespace gradsync
