// TerminateMpsClient, with a script instead of MPS's control program. The script records the
// commands that it gets.

#include "daemon/worker/mps_control.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace gradsync::daemon {
namespace {

using ::testing::HasSubstr;

class MpsControlTest : public ::testing::Test {
 protected:
  // Writes the script. Its `body` finds the command in $command.
  void Write(const std::string& body) {
    std::ofstream script(options_.program);
    script << "#!/bin/sh\nread -r command\necho \"$command\" >>" << log_ << "\n" << body << "\n";
    script.close();
    ASSERT_EQ(chmod(options_.program.c_str(), 0700), 0);
  }

  std::string Told() const {
    std::ifstream log(log_);
    return {std::istreambuf_iterator<char>(log), {}};
  }

  absl::Status Terminate(pid_t client, bool lives = true) const {
    return TerminateMpsClient(options_, client, [lives] { return lives; });
  }

  static constexpr char kTwoServers[] =
      "case \"$command\" in\n"
      "get_server_list) echo 70; echo 71;;\n"
      "'get_client_list 70') echo 800;;\n"
      "'get_client_list 71') echo 'PID list'; echo 810; echo 811;;\n"
      "esac";

  const std::string folder_ = ::testing::TempDir();
  const std::string log_ = folder_ + "/told";
  MpsControlOptions options_{folder_ + "/nvidia-cuda-mps-control", absl::Seconds(30)};

  void SetUp() override { std::filesystem::remove(log_); }
};

TEST_F(MpsControlTest, TerminatesAClientOnTheServerThatServesIt) {
  Write(kTwoServers);
  const absl::Status status = Terminate(811);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(Told(),
            "get_server_list\nget_client_list 70\nget_client_list 71\nterminate_client 71 811\n");
}

TEST_F(MpsControlTest, LeavesAnUnknownClientAlone) {
  Write(kTwoServers);
  EXPECT_EQ(Terminate(812).code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Told(), ::testing::Not(HasSubstr("terminate_client")));
}

TEST_F(MpsControlTest, LeavesAnEndedClientAlone) {
  Write(kTwoServers);
  EXPECT_EQ(Terminate(811, /*lives=*/false).code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Told(), ::testing::Not(HasSubstr("terminate_client")));
}

TEST_F(MpsControlTest, MissingProgramIsNotFound) {
  options_.program = "nvidia-cuda-mps-control-of-no-machine";
  EXPECT_EQ(Terminate(811).code(), absl::StatusCode::kNotFound);
}

TEST_F(MpsControlTest, FailingProgramIsNamed) {
  Write("exit 3");
  const absl::Status status = Terminate(811);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(status.message(), HasSubstr("get_server_list failed"));
}

TEST_F(MpsControlTest, HangingProgramIsKilled) {
  options_.limit = absl::Milliseconds(200);
  Write("exec tail -f /dev/null");
  EXPECT_EQ(Terminate(811).code(), absl::StatusCode::kDeadlineExceeded);
}

}  // namespace
}  // namespace gradsync::daemon
