// What gradsyncctl says of an answer that is too long.

#include "tools/gradsyncctl/daemon_connection.h"

#include <grpcpp/grpcpp.h>

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "tests/ctl/fake_introspection.h"
#include "tests/kit/deadline.h"

namespace gradsync {
namespace {

constexpr std::size_t kMostBytes = 64 << 10;

class DaemonConnectionTest : public testing::Test {
 protected:
  absl::StatusOr<DaemonConnection> Open() {
    return DaemonConnection::Open(daemon_.socket(), absl::Milliseconds(kPatienceMs), kMostBytes);
  }

  FakeDaemon daemon_;
};

TEST_F(DaemonConnectionTest, TooLongAnAnswerNamesTheLimitAndTheNextStep) {
  daemon_.introspection().status.add_notices(std::string(kMostBytes, 'n'));
  auto connection = Open();
  ASSERT_TRUE(connection.ok()) << connection.status();
  const absl::Status refused = connection->GetStatus("").status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(refused.message(),
            absl::StrCat("the daemon at ", daemon_.socket(),
                         " has an answer of more than 64.0 KiB: ask about one job, as with "
                         "'gradsyncctl status --job ID', or for fewer steps"));
  EXPECT_TRUE(connection->GetStats("").ok()) << "the connection goes on";
}

TEST_F(DaemonConnectionTest, RefusalWithTheSameCodeKeepsItsWords) {
  daemon_.introspection().verdict = grpc::Status(grpc::RESOURCE_EXHAUSTED, "too many questions");
  auto connection = Open();
  ASSERT_TRUE(connection.ok()) << connection.status();
  EXPECT_EQ(connection->GetStatus("").status().message(),
            absl::StrCat("the daemon at ", daemon_.socket(), ": too many questions"));
}

// The daemon's gRPC uses the same words for a long question.
TEST_F(DaemonConnectionTest, RefusalOfALongQuestionKeepsItsWords) {
  const std::string words = "Received message larger than max (70000 vs. 4096)";
  daemon_.introspection().verdict = grpc::Status(grpc::RESOURCE_EXHAUSTED, words);
  auto connection = Open();
  ASSERT_TRUE(connection.ok()) << connection.status();
  EXPECT_EQ(connection->GetStatus("").status().message(),
            absl::StrCat("the daemon at ", daemon_.socket(), ": ", words));
}

}  // namespace
}  // namespace gradsync
