// An operation that a session refuses does not touch the staging memory. The daemon sends what the
// test says.

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "client/include/gradsync/client.h"
#include "gtest/gtest.h"
#include "tests/client/job_of_threads.h"
#include "tests/client/scripted_daemon.h"

namespace gradsync {
namespace {

v1::SessionOpened WithShortLease() {
  v1::SessionOpened opened;
  opened.set_staging_bytes(4096);
  opened.set_lease_ms(100);
  return opened;
}

class RefusedOperationTest : public testing::Test {
 protected:
  RefusedOperationTest() : daemon_(WithShortLease()) {
    SessionOptions options;
    options.socket = daemon_.socket();
    options.job_id = "scripted";
    options.world_size = 2;
    auto joined = Session::Join(options);
    EXPECT_TRUE(joined.ok()) << joined.status();
    if (joined.ok()) session_ = *std::move(joined);
  }

  absl::Status AllReduce(std::string data) {
    return session_->AllReduce(data.data(), data.size(), DataType::kUint8, ReduceOp::kSum);
  }
  // The first bytes of the staging memory.
  std::string Staged(std::size_t bytes) {
    return {reinterpret_cast<const char*>(daemon_.staging()), bytes};
  }

  ScriptedDaemon daemon_;
  std::unique_ptr<Session> session_;
};

// When the daemon continues, it may still read the data of the first one.
TEST_F(RefusedOperationTest, LeavesTheDataOfAnOperationThatWasGivenUp) {
  ExpectError(AllReduce("first"), absl::StatusCode::kUnavailable, "DAEMON_SILENT");
  EXPECT_EQ(Staged(5), "first");
  ExpectError(AllReduce("other"), absl::StatusCode::kUnavailable, "DAEMON_SILENT");
  EXPECT_EQ(Staged(5), "first");
}

TEST_F(RefusedOperationTest, LeavesTheMemoryOfARankThatHasLeft) {
  ExpectError(session_->LeaveAndStay(absl::ZeroDuration()).status(),
              absl::StatusCode::kDeadlineExceeded, "WAIT_TIMEOUT");
  ExpectError(AllReduce("other"), absl::StatusCode::kFailedPrecondition, "LEFT");
  EXPECT_EQ(Staged(5), std::string(5, '\0'));
}

}  // namespace
}  // namespace gradsync
