#include <cstdlib>

#include "client/include/gradsync/client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gradsync {
namespace {

using testing::HasSubstr;

class EnvironmentTest : public testing::Test {
 protected:
  EnvironmentTest() {
    setenv("RANK", "3", 1);
    setenv("WORLD_SIZE", "8", 1);
    setenv("TORCHELASTIC_RUN_ID", "night-1", 1);
    setenv("MASTER_ADDR", "node0.cluster", 1);
    setenv("MASTER_PORT", "29500", 1);
    unsetenv("GRADSYNC_SOCKET");
    unsetenv("GRADSYNC_JOB_TOKEN");
    unsetenv("GRADSYNC_COORDINATOR");
    unsetenv("LOCAL_WORLD_SIZE");
  }

  static void ExpectFault(const char* variable) {
    const auto options = SessionOptions::FromEnvironment();
    ASSERT_EQ(options.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(options.status().message()), HasSubstr(variable));
    EXPECT_EQ(ErrorReason(options.status()), "MALFORMED");
  }
};

TEST_F(EnvironmentTest, ReadsTorchrunVariables) {
  const auto options = SessionOptions::FromEnvironment();
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->rank, 3u);
  EXPECT_EQ(options->world_size, 8u);
  EXPECT_EQ(options->job_id, "night-1@node0.cluster:29500");
  EXPECT_EQ(options->token, "");
  EXPECT_EQ(options->coordinator, "node0.cluster");
  EXPECT_EQ(options->socket, "/run/gradsync/gradsyncd.sock");
}

TEST_F(EnvironmentTest, ReadsGradsyncVariables) {
  setenv("GRADSYNC_SOCKET", "/tmp/mine.sock", 1);
  setenv("GRADSYNC_JOB_TOKEN", "secret", 1);
  setenv("GRADSYNC_COORDINATOR", "10.0.0.1:7000", 1);
  const auto options = SessionOptions::FromEnvironment();
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->socket, "/tmp/mine.sock");
  EXPECT_EQ(options->token, "secret");
  EXPECT_EQ(options->coordinator, "10.0.0.1:7000");
}

TEST_F(EnvironmentTest, NoCoordinatorIfEveryRankIsLocal) {
  setenv("LOCAL_WORLD_SIZE", "8", 1);
  EXPECT_EQ(SessionOptions::FromEnvironment()->coordinator, "");
  setenv("GRADSYNC_COORDINATOR", "10.0.0.1:7000", 1);
  EXPECT_EQ(SessionOptions::FromEnvironment()->coordinator, "10.0.0.1:7000");
  unsetenv("GRADSYNC_COORDINATOR");
  setenv("LOCAL_WORLD_SIZE", "4", 1);
  EXPECT_EQ(SessionOptions::FromEnvironment()->coordinator, "node0.cluster");
}

TEST_F(EnvironmentTest, RunIdDefaultsToNone) {
  unsetenv("TORCHELASTIC_RUN_ID");
  const auto options = SessionOptions::FromEnvironment();
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->job_id, "none@node0.cluster:29500");
}

TEST_F(EnvironmentTest, MissingVariableIsNamed) {
  for (const char* variable : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    const std::string before = getenv(variable);
    unsetenv(variable);
    ExpectFault(variable);
    setenv(variable, "", 1);
    ExpectFault(variable);
    setenv(variable, before.c_str(), 1);
  }
}

TEST_F(EnvironmentTest, MissingOptionIsNamedWithTorchrun) {
  const std::pair<const char*, const char*> options[] = {{"RANK", "rank"},
                                                         {"WORLD_SIZE", "world_size"},
                                                         {"MASTER_ADDR", "job_id"},
                                                         {"MASTER_PORT", "job_id"}};
  for (const auto& [variable, option] : options) {
    const std::string before = getenv(variable);
    unsetenv(variable);
    const std::string message(SessionOptions::FromEnvironment().status().message());
    EXPECT_THAT(message, HasSubstr(std::string("the option ") + option));
    EXPECT_THAT(message, HasSubstr("torchrun --nproc_per_node="));
    setenv(variable, before.c_str(), 1);
  }
}

TEST_F(EnvironmentTest, GivenOptionsWin) {
  setenv("GRADSYNC_SOCKET", "/tmp/mine.sock", 1);
  setenv("GRADSYNC_JOB_TOKEN", "secret", 1);
  setenv("GRADSYNC_COORDINATOR", "10.0.0.1:7000", 1);
  GivenOptions given;
  given.socket = "/tmp/given.sock";
  given.job_id = "given";
  given.token = "";
  given.rank = 0;
  given.world_size = 2;
  given.coordinator = "";
  const auto options = SessionOptions::FromEnvironment(given);
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->socket, "/tmp/given.sock");
  EXPECT_EQ(options->job_id, "given");
  EXPECT_EQ(options->token, "");
  EXPECT_EQ(options->rank, 0u);
  EXPECT_EQ(options->world_size, 2u);
  EXPECT_EQ(options->coordinator, "");
}

TEST_F(EnvironmentTest, GivenOptionNeedsNoVariable) {
  GivenOptions given;
  unsetenv("RANK");
  given.rank = 0;
  EXPECT_EQ(SessionOptions::FromEnvironment(given)->world_size, 8u);
  unsetenv("WORLD_SIZE");
  given.world_size = 4;
  EXPECT_EQ(SessionOptions::FromEnvironment(given)->world_size, 4u);
  unsetenv("MASTER_ADDR");
  unsetenv("MASTER_PORT");
  unsetenv("TORCHELASTIC_RUN_ID");
  given.job_id = "given";
  const auto options = SessionOptions::FromEnvironment(given);
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->coordinator, "");
}

TEST_F(EnvironmentTest, MalformedGivenOptionIsNamed) {
  const auto message = [](const GivenOptions& given) {
    return std::string(SessionOptions::FromEnvironment(given).status().message());
  };
  GivenOptions given;
  given.world_size = 0;
  EXPECT_THAT(message(given), HasSubstr("SessionOptions.world_size is 0"));
  given.world_size = 2;  // RANK is 3
  EXPECT_THAT(message(given), HasSubstr("RANK is 3, but world_size is 2"));
  given.rank = 2;
  EXPECT_THAT(message(given), HasSubstr("SessionOptions.rank is 2"));
}

TEST_F(EnvironmentTest, MalformedVariableIsNamed) {
  const std::pair<const char*, const char*> faults[] = {
      {"RANK", "-1"},       {"RANK", "first"},         {"RANK", "8"},
      {"WORLD_SIZE", "0"},  {"WORLD_SIZE", "8 ranks"}, {"WORLD_SIZE", "4294967296"},
      {"MASTER_PORT", "0"}, {"MASTER_PORT", "65536"},
  };
  for (const auto& [variable, value] : faults) {
    SCOPED_TRACE(std::string(variable) + "=" + value);
    const std::string before = getenv(variable);
    setenv(variable, value, 1);
    ExpectFault(variable);
    setenv(variable, before.c_str(), 1);
  }
}

}  // namespace
}  // namespace gradsync
