#include "client/src/session_options.h"

#include "client/src/fd_socket.h"
#include "gmock/gmock.h"
#include "gradsync/limits.h"
#include "gradsync/shared_memory.h"
#include "gtest/gtest.h"
#include "proto/gradsync/v1/gradsync.pb.h"

namespace gradsync::client {
namespace {

using testing::HasSubstr;

SessionOptions Valid() {
  SessionOptions options;
  options.job_id = "j";
  options.rank = 1;
  options.world_size = 2;
  return options;
}

template <typename Change>
void ExpectRefused(const char* option, const Change& change) {
  SessionOptions options = Valid();
  change(&options);
  const absl::Status status = ValidateOptions(options);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << option;
  EXPECT_THAT(std::string(status.message()), HasSubstr(option));
  // Join refuses it the same way, before it connects.
  EXPECT_EQ(Session::Join(options).status(), status);
}

TEST(SessionOptionsTest, MalformedOptionIsNamed) {
  EXPECT_TRUE(ValidateOptions(Valid()).ok());
  ExpectRefused("job_id", [](SessionOptions* options) { options->job_id = ""; });
  ExpectRefused("job_id", [](SessionOptions* options) { options->job_id.assign(129, 'x'); });
  ExpectRefused("job_id", [](SessionOptions* options) { options->job_id = "a\nb"; });
  ExpectRefused("job_id", [](SessionOptions* options) { options->job_id = "größe"; });
  ExpectRefused("token", [](SessionOptions* options) { options->token.assign(4097, 'x'); });
  ExpectRefused("world_size", [](SessionOptions* options) { options->world_size = 0; });
  ExpectRefused("rank", [](SessionOptions* options) { options->rank = 2; });
  ExpectRefused("socket", [](SessionOptions* options) { options->socket = ""; });
  ExpectRefused("socket", [](SessionOptions* options) { options->socket = "/tmp/gradsyncd"; });
  ExpectRefused("socket", [](SessionOptions* options) {
    options->socket = "/" + std::string(100, 'x') + ".sock";
  });
  ExpectRefused("on_rank_loss", [](SessionOptions* options) {
    options->on_rank_loss = static_cast<LossPolicy>(9);
  });
  ExpectRefused("divisor",
                [](SessionOptions* options) { options->divisor = static_cast<Divisor>(0); });
  ExpectRefused("state_source", [](SessionOptions* options) {
    options->state_source = static_cast<StateSource>(3);
  });
  ExpectRefused("hold_timeout",
                [](SessionOptions* options) { options->hold_timeout = -absl::Seconds(1); });
  ExpectRefused("step_timeout",
                [](SessionOptions* options) { options->step_timeout = -absl::Seconds(1); });
  ExpectRefused("nccl.max_ctas", [](SessionOptions* options) { options->nccl.max_ctas = 65; });
  ExpectRefused("nccl.algorithm", [](SessionOptions* options) {
    options->nccl.algorithm = static_cast<NcclAlgorithm>(7);
  });
  ExpectRefused("nccl.protocol", [](SessionOptions* options) {
    options->nccl.protocol = static_cast<NcclProtocol>(4);
  });
  ExpectRefused("nccl.wire_type", [](SessionOptions* options) {
    options->nccl.wire_type = static_cast<NcclWireType>(4);
  });
}

TEST(SessionOptionsTest, FillsOpenSession) {
  SessionOptions options = Valid();
  options.token = "secret";
  options.divisor = Divisor::kWorld;
  options.on_rank_loss = LossPolicy::kHold;
  options.state_source = StateSource::kTrainer;
  options.hold_timeout = absl::Microseconds(2500);
  options.step_timeout = absl::Microseconds(1500);
  options.nccl = {16, NcclAlgorithm::kNvls, NcclProtocol::kSimple, NcclWireType::kFloat16};
  v1::OpenSession open;
  FillOpenSession(options, &open);
  EXPECT_EQ(open.protocol().oldest(), kProtocolOldest);
  EXPECT_EQ(open.protocol().newest(), kProtocolNewest);
  EXPECT_EQ(open.shared_memory_abi(), kSharedMemoryAbi);
  EXPECT_EQ(open.job_id(), "j");
  EXPECT_EQ(open.token(), "secret");
  EXPECT_EQ(open.rank(), 1u);
  EXPECT_EQ(open.world_size(), 2u);
  EXPECT_EQ(open.options().divisor(), v1::DIVISOR_WORLD);
  EXPECT_EQ(open.options().on_rank_loss(), v1::LOSS_POLICY_HOLD);
  EXPECT_EQ(open.options().state_source(), v1::STATE_SOURCE_TRAINER);
  EXPECT_EQ(open.options().hold_timeout_ms(), 3u);
  EXPECT_EQ(open.options().step_timeout_ms(), 2u);
  EXPECT_EQ(open.options().nccl().max_ctas(), 16u);
  EXPECT_EQ(open.options().nccl().algorithm(), v1::NCCL_ALGORITHM_NVLS);
  EXPECT_EQ(open.options().nccl().protocol(), v1::NCCL_PROTOCOL_SIMPLE);
  EXPECT_EQ(open.options().nccl().wire_type(), v1::NCCL_WIRE_TYPE_FLOAT16);
}

TEST(SessionOptionsTest, ZeroStepTimeoutIsTheDaemonsDefault) {
  v1::OpenSession open;
  FillOpenSession(Valid(), &open);
  EXPECT_EQ(open.options().step_timeout_ms(), 0u);
}

TEST(SessionOptionsTest, TimeoutsRoundUpAndAreBounded) {
  EXPECT_EQ(TimeoutMs(absl::Seconds(2)), 2000u);
  EXPECT_EQ(TimeoutMs(absl::Nanoseconds(1)), 1u);
  EXPECT_EQ(TimeoutMs(absl::ZeroDuration()), 1u);
  EXPECT_EQ(TimeoutMs(-absl::InfiniteDuration()), 1u);
  EXPECT_EQ(TimeoutMs(absl::InfiniteDuration()), 10ull * 365 * 24 * 3600 * 1000);
}

TEST(SessionOptionsTest, FdSocketIsBesideTheSocket) {
  EXPECT_EQ(FdSocketPath("/run/gradsync/gradsyncd.sock"), "/run/gradsync/gradsyncd-fd.sock");
}

}  // namespace
}  // namespace gradsync::client
