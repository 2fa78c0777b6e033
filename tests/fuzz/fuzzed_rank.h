// A rank of this node whose messages a fuzzer makes, with its memory.

#ifndef TESTS_FUZZ_FUZZED_RANK_H_
#define TESTS_FUZZ_FUZZED_RANK_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/job/job_port.h"
#include "daemon/rpc/rank_dispatch.h"
#include "tests/job/recording_sink.h"
#include "tests/job/trainer_memory.h"

namespace gradsync::daemon {

// One session of a rank. Not thread-safe: for fuzzers that run everything on their own thread.
//
// The arenas and the staging memory are plain memory of exactly the size that the daemon knows. So
// sanitizers see every access beyond it.
class FuzzedRank final : public RankPort {
 public:
  static constexpr std::size_t kStagingBytes = 4096;

  FuzzedRank(RankSession session, std::shared_ptr<JobPort> job,
             std::shared_ptr<RecordingSink> sink = std::make_shared<RecordingSink>(),
             const MemoryAccount& account = {})
      : RankPort(account), session_(session), job_(std::move(job)), sink_(std::move(sink)) {}

  const std::shared_ptr<RecordingSink>& sink() const { return sink_; }
  // 0: it has no layout.
  std::uint32_t NewestChannel() const { return arenas_.empty() ? 0 : arenas_.back().channel; }
  // Nothing of the daemon refers to this session's memory.
  bool Free() const;

  // ---- RankPort
  RankSession session() const override { return session_; }
  JobPort& job() const override { return *job_; }
  absl::Status ArenaMapped(std::uint32_t channel) override;
  absl::StatusOr<StagingMemory> Staging() override {
    return StagingMemory{window_, window_.get(), kStagingBytes};
  }
  // A refusal is an answer: the session goes on.
  absl::Status RegisterLayout(LayoutRequest request) override;
  void Respond(v1::SessionResponse) override {}

 private:
  struct Arena {
    std::uint32_t channel;
    std::unique_ptr<TrainerMemory> memory;
  };

  void Registered(const absl::StatusOr<JobPort::Registration>& registration);

  const RankSession session_;
  const std::shared_ptr<JobPort> job_;
  const std::shared_ptr<RecordingSink> sink_;
  const std::shared_ptr<std::byte[]> window_{new std::byte[kStagingBytes]()};
  std::vector<Arena> arenas_;
};

}  // namespace gradsync::daemon

#endif  // TESTS_FUZZ_FUZZED_RANK_H_
