// A job whose ranks are threads of the test.

#ifndef TESTS_CLIENT_JOB_OF_THREADS_H_
#define TESTS_CLIENT_JOB_OF_THREADS_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "client/include/gradsync/client.h"
#include "tests/kit/test_daemon.h"

namespace gradsync {

// Rank `rank` of job "test" on `daemon`.
SessionOptions OptionsOf(const TestDaemon& daemon, std::uint32_t rank, std::uint32_t world_size);

// One job of this process: a session, and a layout, for each rank.
struct JobOfThreads {
  std::vector<std::unique_ptr<Session>> sessions;
  std::vector<std::unique_ptr<Layout>> layouts;
};

// Runs `body` for every rank, each on a thread of its own, and waits for all.
void OnEveryRank(std::uint32_t world_size, const std::function<void(std::uint32_t rank)>& body);

// Joins every rank; registers `spec` on each unless it is null. Fails the test if that fails.
JobOfThreads JoinAll(const std::vector<SessionOptions>& options, const LayoutSpec* spec);
JobOfThreads JoinAll(const TestDaemon& daemon, std::uint32_t world_size, const LayoutSpec* spec);

// `buckets` float32 buckets of `count` elements.
LayoutSpec FloatBuckets(std::size_t buckets, std::uint64_t count);

// Every element of a bucket.
void Fill(const BucketView& bucket, float value);
// The value that all elements have; NaN if they differ.
float ValueOf(const BucketView& bucket);

// Marks every bucket and ends the step.
absl::Status MarkAllAndEnd(Layout* layout, std::uint64_t step);

// Fails the test unless `status` has this code and reason.
void ExpectError(const absl::Status& status, absl::StatusCode code, const std::string& reason);

}  // namespace gradsync

#endif  // TESTS_CLIENT_JOB_OF_THREADS_H_
