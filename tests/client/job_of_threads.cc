#include "tests/client/job_of_threads.h"

#include <cmath>
#include <thread>
#include <utility>

#include "gtest/gtest.h"

namespace gradsync {

SessionOptions OptionsOf(const TestDaemon& daemon, std::uint32_t rank, std::uint32_t world_size) {
  SessionOptions options;
  options.socket = daemon.socket();
  options.job_id = "test";
  options.rank = rank;
  options.world_size = world_size;
  return options;
}

void OnEveryRank(std::uint32_t world_size, const std::function<void(std::uint32_t)>& body) {
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&body, rank] { body(rank); });
  }
  for (std::thread& thread : threads) thread.join();
}

JobOfThreads JoinAll(const std::vector<SessionOptions>& options, const LayoutSpec* spec) {
  JobOfThreads job;
  job.sessions.resize(options.size());
  job.layouts.resize(options.size());
  OnEveryRank(static_cast<std::uint32_t>(options.size()), [&](std::uint32_t rank) {
    auto session = Session::Join(options[rank]);
    ASSERT_TRUE(session.ok()) << session.status();
    job.sessions[rank] = *std::move(session);
    if (spec == nullptr) return;
    auto layout = job.sessions[rank]->RegisterLayout(*spec);
    ASSERT_TRUE(layout.ok()) << layout.status();
    job.layouts[rank] = *std::move(layout);
  });
  return job;
}

JobOfThreads JoinAll(const TestDaemon& daemon, std::uint32_t world_size, const LayoutSpec* spec) {
  std::vector<SessionOptions> options;
  for (std::uint32_t rank = 0; rank < world_size; ++rank) {
    options.push_back(OptionsOf(daemon, rank, world_size));
  }
  return JoinAll(options, spec);
}

LayoutSpec FloatBuckets(std::size_t buckets, std::uint64_t count) {
  LayoutSpec spec;
  spec.explicit_buckets.assign(buckets, {DataType::kFloat32, count});
  return spec;
}

void Fill(const BucketView& bucket, float value) {
  for (std::uint64_t i = 0; i < bucket.count; ++i) static_cast<float*>(bucket.data)[i] = value;
}

float ValueOf(const BucketView& bucket) {
  const auto* values = static_cast<const float*>(bucket.data);
  for (std::uint64_t i = 1; i < bucket.count; ++i) {
    if (values[i] != values[0]) return std::nanf("");
  }
  return values[0];
}

absl::Status MarkAllAndEnd(Layout* layout, std::uint64_t step) {
  for (std::size_t i = 0; i < layout->bucket_count(); ++i) {
    if (auto status = layout->MarkReady(step, i); !status.ok()) return status;
  }
  return layout->EndStep(step);
}

void ExpectError(const absl::Status& status, absl::StatusCode code, const std::string& reason) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_EQ(ErrorReason(status), reason) << status;
}

}  // namespace gradsync
