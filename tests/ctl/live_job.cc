// A job of two ranks for tests that ask a real daemon about it: live_job SOCKET JOB_ID
//
// Runs three steps of a layout "model" of two buckets. Step 2 has an element that is Inf. Step 3
// has a gradient norm of 5. Then step 4 waits for rank 1. The program prints "waiting" and reads a
// command from stdin: "finish" completes the step, leaves the job and prints "finished"; "lose"
// ends rank 1 without Leave, and prints "lost" once rank 0 knows of the loss.

#include <cmath>
#include <future>
#include <iostream>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gradsync/client.h"

namespace {

constexpr std::uint32_t kRanks = 2;
constexpr int kSteps = 3;

struct Rank {
  std::unique_ptr<gradsync::Session> session;
  std::unique_ptr<gradsync::Layout> layout;
};

[[noreturn]] void Fail(const absl::Status& status) {
  std::cerr << "live_job: " << status << std::endl;
  std::exit(1);
}

void Check(const absl::Status& status) {
  if (!status.ok()) Fail(status);
}

// Returns when every rank has done the same.
Rank Join(const std::string& socket, const std::string& job, std::uint32_t number) {
  gradsync::SessionOptions options;
  options.socket = socket;
  options.job_id = job;
  options.rank = number;
  options.world_size = kRanks;
  auto session = gradsync::Session::Join(options);
  Check(session.status());
  gradsync::LayoutSpec spec;
  spec.name = "model";
  spec.explicit_buckets = {{gradsync::DataType::kFloat32, 1 << 16},
                           {gradsync::DataType::kFloat32, 1 << 10}};
  auto layout = (*session)->RegisterLayout(spec);
  Check(layout.status());
  return {*std::move(session), *std::move(layout)};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) Fail(absl::InvalidArgumentError("usage: live_job SOCKET JOB_ID"));
  std::future<Rank> joining = std::async(std::launch::async, Join, argv[1], argv[2], 1u);
  Rank ranks[kRanks] = {Join(argv[1], argv[2], 0), {}};
  ranks[1] = joining.get();

  for (int step = 1; step <= kSteps; ++step) {
    for (Rank& rank : ranks) {
      for (std::size_t bucket = 0; bucket < 2; ++bucket) {
        // Zeros otherwise.
        static_cast<float*>(rank.layout->bucket(bucket).data)[7] =
            step == 2 ? INFINITY : static_cast<float>(3 + bucket);
      }
    }
    for (std::size_t bucket = 0; bucket < 2; ++bucket) {
      for (Rank& rank : ranks) Check(rank.layout->MarkReady(step, bucket));
    }
    for (Rank& rank : ranks) Check(rank.layout->EndStep(step));
    for (Rank& rank : ranks) Check(rank.layout->WaitStep(step).status());
  }
  constexpr int kOpen = kSteps + 1;
  Check(ranks[0].layout->MarkReady(kOpen, 0));
  // The answer names the late ranks, so the daemon knows the step by then.
  const absl::Status missing = ranks[0].layout->WaitBucket(kOpen, 0, absl::Milliseconds(1));
  if (missing.code() != absl::StatusCode::kDeadlineExceeded) Fail(missing);
  std::cout << "waiting" << std::endl;

  std::string command;
  std::getline(std::cin, command);
  if (command == "lose") {
    ranks[1] = {};
    const absl::Status loss = ranks[0].layout->WaitStep(kOpen).status();
    if (loss.code() != absl::StatusCode::kAborted) Fail(loss);
    std::cout << "lost" << std::endl;
    return 0;
  }
  Check(ranks[0].layout->MarkReady(kOpen, 1));
  for (std::size_t bucket = 0; bucket < 2; ++bucket) {
    Check(ranks[1].layout->MarkReady(kOpen, bucket));
  }
  for (Rank& rank : ranks) Check(rank.layout->EndStep(kOpen));
  for (Rank& rank : ranks) Check(rank.layout->WaitStep(kOpen).status());
  for (Rank& rank : ranks) Check(rank.session->Leave());
  std::cout << "finished" << std::endl;
  return 0;
}
