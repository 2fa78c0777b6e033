// A node that joins a job on another node's daemon, with a patience of 2 s instead of a daemon's
// 20 s, which NodesTest.JoinFailsInTimeWithoutACoordinator waits for.
//
//   tls_node LISTEN COORDINATOR JOB [CERTIFICATE KEY CA]
//
// It joins as rank 1 of 2 and prints "CODE REASON MESSAGE" in one line. It has a process of its own
// because gRPC with TLS and the test's gRPC without it do not fit into one.

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "daemon/base/clock.h"
#include "daemon/base/error.h"
#include "daemon/base/fair_executor.h"
#include "daemon/job/job_table.h"
#include "daemon/peer/peer_service.h"
#include "gradsync/shared_memory.h"
#include "gradsync/v1/gradsync.pb.h"
#include "proto/gradsync/limits.h"
#include "tests/engine/event.h"
#include "tests/job/recording_sink.h"
#include "tests/kit/deadline.h"

namespace gradsync::daemon {
namespace {

JoinRequest RequestOf(const std::string& coordinator, const std::string& job) {
  JoinRequest request;
  request.key.job_id = job;
  request.rank = 1;
  request.world_size = 2;
  request.incarnation = 1;
  request.coordinator = coordinator;
  request.patience_ns = std::uint64_t{2'000'000'000} * kScale;
  auto message = std::make_shared<v1::OpenSession>();
  message->mutable_protocol()->set_oldest(kProtocolOldest);
  message->mutable_protocol()->set_newest(kProtocolNewest);
  message->set_shared_memory_abi(kSharedMemoryAbi);
  message->set_job_id(job);
  message->set_rank(request.rank);
  message->set_world_size(request.world_size);
  request.message = std::move(message);
  return request;
}

absl::Status Join(const PeerOptions& options, const JoinRequest& request) {
  const MonotonicClock clock;
  FairExecutor executor(/*threads=*/1);
  JobTable jobs(JobEnvironment(), 0);  // no job is coordinated here
  PeerEnvironment environment;
  environment.jobs = &jobs;
  environment.executor = &executor;
  environment.clock = &clock;
  Event joined;
  const auto peers = PeerService::Start(options, environment);
  if (!peers.ok()) return peers.status();
  (*peers)->Join(request, std::make_shared<RecordingSink>(),
                 [&joined](const auto& job) { joined.Set(job.status()); });
  return joined.Wait().value_or(absl::DeadlineExceededError("no answer"));
}

}  // namespace
}  // namespace gradsync::daemon

int main(int argc, char** argv) {
  if (argc != 4 && argc != 7) return 2;
  gradsync::daemon::PeerOptions options;
  options.listen = argv[1];
  options.node_name = argv[1];
  if (argc == 7) {
    options.tls_certificate = argv[4];
    options.tls_key = argv[5];
    options.tls_ca = argv[6];
  }
  const absl::Status joined =
      gradsync::daemon::Join(options, gradsync::daemon::RequestOf(argv[2], argv[3]));
  const std::string reason = gradsync::daemon::DetailsOf(joined).reason;
  std::printf("%s %s %s\n", absl::StatusCodeToString(joined.code()).c_str(), reason.c_str(),
              std::string(joined.message()).c_str());
  return 0;
}
