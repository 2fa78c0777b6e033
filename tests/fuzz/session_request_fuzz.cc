// A client's stream: the bytes of its messages, each behind its length in two bytes, little-endian.
// They are parsed as gRPC does it, decoded, and taken by the rank's job, which is on this node or
// forwards them to another one. The rank is alone in its job, so it completes whole steps.
//
// A message that breaks the protocol ends the stream.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "daemon/arena/arena_quota.h"
#include "daemon/base/tenant.h"
#include "daemon/job/job.h"
#include "daemon/peer/forwarding_job.h"
#include "daemon/rpc/decode.h"
#include "daemon/rpc/rank_dispatch.h"
#include "gradsync/v1/gradsync.pb.h"
#include "proto/gradsync/limits.h"
#include "tests/fuzz/byte_reader.h"
#include "tests/fuzz/check.h"
#include "tests/fuzz/fuzzed_rank.h"
#include "tests/job/held_reducer.h"
#include "tests/job/manual_executor.h"
#include "tests/job/recording_sink.h"
#include "tests/kit/manual_clock.h"

namespace gradsync::daemon {
namespace {

constexpr RankSession kSession{0, 1};
constexpr uid_t kUser = 1000;

void CheckOpen(const v1::OpenSession& message) {
  std::uint32_t protocol = 0;
  const auto open = DecodeOpen(message, &protocol);
  if (!open.ok()) return;
  FUZZ_CHECK(protocol >= kProtocolOldest && protocol <= kProtocolNewest);
  FUZZ_CHECK(open->world_size > 0 && open->rank < open->world_size);
  FUZZ_CHECK(!open->job_id.empty() && open->job_id.size() <= kMaxJobIdBytes);
  FUZZ_CHECK(std::all_of(open->job_id.begin(), open->job_id.end(), absl::ascii_isprint));
  FUZZ_CHECK(open->token.size() <= kMaxTokenBytes);
  FUZZ_CHECK((open->message != nullptr) == !open->coordinator.empty());
}

class World {
 public:
  explicit World(fuzz::ByteReader reader) : reader_(reader) {
    forwards_ = reader_.Bool();
    const bool little = reader_.Bool();
    limits_.parameters = 16;
    limits_.buckets = 8;
    limits_.staging_bytes = FuzzedRank::kStagingBytes;
    const auto sink = std::make_shared<RecordingSink>();
    rank_ = std::make_unique<FuzzedRank>(kSession, forwards_ ? Elsewhere(sink) : Here(sink), sink,
                                         MemoryAccount{little ? &memory_ : nullptr, Tenant(kUser)});
  }

  void Run() {
    absl::Status end = absl::UnavailableError("the stream has ended");
    while (!reader_.empty()) {
      const std::size_t size = reader_.Byte() + 256u * reader_.Byte();
      v1::SessionRequest request;
      // gRPC ends a stream whose bytes are no message.
      if (!request.ParseFromString(reader_.Bytes(size))) break;
      if (request.has_open_session()) {
        CheckOpen(request.open_session());
        continue;
      }
      end = TakeRankRequest(request, limits_, clock_.NowNs(), rank_.get());
      reducer_.CompleteAll();
      executor_.RunAll();
      if (!end.ok()) break;
      clock_.Advance(1'000'000);
    }
    End(end);
  }

 private:
  std::shared_ptr<JobPort> Here(const std::shared_ptr<RecordingSink>& sink) {
    JobEnvironment environment;
    environment.clock = &clock_;
    environment.reducer = &reducer_;
    environment.executor = &executor_;
    environment.memory = &memory_;
    job_ =
        std::make_shared<Job>(JobIdentity{kUser, "fuzz", "", 1, {}}, 1, JobOptions{}, environment);
    FUZZ_CHECK(job_->Join(0, 1, JobOptions{}, kSession.incarnation, sink).ok());
    return job_;
  }

  std::shared_ptr<JobPort> Elsewhere(const std::shared_ptr<RecordingSink>& sink) {
    JoinRequest join;
    join.key = {kUser, "fuzz", ""};
    join.incarnation = kSession.incarnation;
    ForwardingJob::Context context;
    context.send = [this](const v1::AttachRequest& message) {
      if (!message.has_rank_request()) return;
      // The coordinator must be able to parse what it gets.
      v1::AttachRequest again;
      FUZZ_CHECK(again.ParseFromString(message.SerializeAsString()));
      ++forwarded_;
    };
    context.executor = &executor_;
    context.max_buckets = limits_.buckets;
    context.coordinator = "alpha:7417";
    const auto job = std::make_shared<ForwardingJob>(join, std::move(context), sink,
                                                     [](const absl::StatusOr<Joined>&) {});
    v1::SessionResponse opened;
    opened.mutable_session_opened();
    FUZZ_CHECK(job->Take(opened).ok());
    forwarding_ = job;
    return job;
  }

  void End(const absl::Status& why) {
    rank_->job().Lose(kSession, why.ok() ? absl::AbortedError("its stream has ended") : why);
    if (forwarding_ != nullptr) forwarding_->End(why);
    for (int i = 0; i < 100 && (executor_.pending() > 0 || !reducer_.held().empty()); ++i) {
      executor_.RunAll();
      reducer_.CompleteAll();
    }
    FUZZ_CHECK(executor_.pending() == 0 && reducer_.held().empty());
    if (job_ != nullptr) FUZZ_CHECK(job_->Empty());
    FUZZ_CHECK(rank_->Free());
    FUZZ_CHECK(!rank_->sink()->Of<SessionEndMessage>().empty());
  }

  fuzz::ByteReader reader_;
  ManualClock clock_;
  HeldReducer reducer_{&clock_};
  ArenaQuota memory_{std::uint64_t{64} << 10};  // outlives what the executor frees
  ManualExecutor executor_;
  DecodeLimits limits_;
  bool forwards_ = false;
  std::uint64_t forwarded_ = 0;
  std::shared_ptr<Job> job_;                   // or
  std::shared_ptr<ForwardingJob> forwarding_;  // this one
  std::unique_ptr<FuzzedRank> rank_;
};

}  // namespace
}  // namespace gradsync::daemon

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gradsync::daemon::World(gradsync::fuzz::ByteReader(data, size)).Run();
  return 0;
}
