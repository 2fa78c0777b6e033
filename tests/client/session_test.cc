// Joining and registering, against a real daemon.

#include <sys/resource.h>

#include <chrono>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/job_of_threads.h"

namespace gradsync {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::string MessageOf(const absl::Status& status) { return std::string(status.message()); }

TEST(SessionTest, JoinsAndLeaves) {
  const TestDaemon daemon;
  JobOfThreads job = JoinAll(daemon, 3, nullptr);
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(job.sessions[rank]->rank(), rank);
    EXPECT_EQ(job.sessions[rank]->world_size(), 3u);
    EXPECT_EQ(job.sessions[rank]->generation(), 1u);
  }
  EXPECT_NE(job.sessions[0]->incarnation(), job.sessions[1]->incarnation());
  OnEveryRank(3, [&](std::uint32_t rank) {
    EXPECT_TRUE(job.sessions[rank]->Leave().ok());
    const absl::Status after = job.sessions[rank]->Leave();
    EXPECT_EQ(after.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(ErrorReason(after), "LEFT");
  });
}

TEST(SessionTest, NoDaemonFailsAfterConnectTimeout) {
  const TemporaryDirectory directory;
  SessionOptions options;
  options.socket = directory.File("nobody.sock");
  options.job_id = "j";
  options.connect_timeout = absl::Milliseconds(50);
  const auto session = Session::Join(options);
  EXPECT_EQ(session.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(MessageOf(session.status()),
              AllOf(HasSubstr(options.socket), HasSubstr("start gradsyncd")));
}

TEST(SessionTest, TooManyOpenFilesAreNamed) {
  SessionOptions options;
  options.socket = "/nonexistent.sock";
  options.job_id = "j";
  rlimit limit{}, none{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  none.rlim_max = limit.rlim_max;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const absl::Status status = Session::Join(options).status();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  ExpectError(status, absl::StatusCode::kResourceExhausted, "OPEN_FILES");
}

TEST(SessionTest, MissingTokenIsRefused) {
  const TestDaemon daemon({"--require_token=true"});
  SessionOptions options = OptionsOf(daemon, 0, 1);
  auto session = Session::Join(options);
  EXPECT_EQ(session.status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(ErrorReason(session.status()), "CREDENTIALS");
  options.token = "secret";
  session = Session::Join(options);
  EXPECT_TRUE(session.ok()) << session.status();
}

TEST(SessionTest, GradientsAreAlignedAndZero) {
  const TestDaemon daemon;
  LayoutSpec spec;
  spec.parameters = {{"w1", {100, 3}, DataType::kFloat32},
                     {"b1", {3}, DataType::kFloat32},
                     {"scalar", {}, DataType::kFloat64},
                     {"empty", {0, 7}, DataType::kFloat32},
                     {"half", {5}, DataType::kFloat16}};
  spec.bucket_cap_bytes = 1024;
  spec.first_bucket_cap_bytes = 16;
  const JobOfThreads job = JoinAll(daemon, 2, &spec);
  const Layout& layout = *job.layouts[0];
  EXPECT_EQ(layout.name(), "default");
  EXPECT_EQ(layout.fingerprint(), job.layouts[1]->fingerprint());
  EXPECT_EQ(layout.next_step(), 1u);
  ASSERT_EQ(layout.parameter_count(), 5u);
  std::vector<std::uint64_t> counts;
  for (std::size_t i = 0; i < layout.parameter_count(); ++i) {
    const GradientView gradient = layout.gradient(i);
    counts.push_back(gradient.count);
    EXPECT_EQ(gradient.dtype, spec.parameters[i].dtype);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(gradient.data) % 64, 0u);
    ASSERT_LT(gradient.bucket, layout.bucket_count());
    const BucketView bucket = layout.bucket(gradient.bucket);
    EXPECT_EQ(bucket.dtype, gradient.dtype);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(bucket.data) % 128, 0u);
    const auto* bytes = static_cast<const char*>(gradient.data);
    for (std::size_t k = 0; k < gradient.count * ItemSize(gradient.dtype); ++k) {
      ASSERT_EQ(bytes[k], 0);
    }
  }
  EXPECT_THAT(counts, testing::ElementsAre(300, 3, 1, 0, 5));
}

TEST(SessionTest, EachLayoutHasItsOwnArenaAndSteps) {
  const TestDaemon daemon;
  LayoutSpec spec = FloatBuckets(1, 8);
  const JobOfThreads job = JoinAll(daemon, 2, &spec);
  spec.name = "discriminator";
  std::vector<std::unique_ptr<Layout>> second(2);
  OnEveryRank(2, [&](std::uint32_t rank) {
    auto layout = job.sessions[rank]->RegisterLayout(spec);
    ASSERT_TRUE(layout.ok()) << layout.status();
    second[rank] = *std::move(layout);
    Fill(second[rank]->bucket(0), rank == 0 ? 1 : 3);
    ASSERT_TRUE(MarkAllAndEnd(second[rank].get(), 1).ok());
    ASSERT_TRUE(second[rank]->WaitStep(1).ok());
    EXPECT_EQ(ValueOf(second[rank]->bucket(0)), 2);
    EXPECT_EQ(second[rank]->next_step(), 2u);
    EXPECT_EQ(job.layouts[rank]->next_step(), 1u);
    EXPECT_EQ(ValueOf(job.layouts[rank]->bucket(0)), 0);
  });
}

}  // namespace
}  // namespace gradsync
