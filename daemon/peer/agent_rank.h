// A rank of an agent, in a job that this node coordinates. Its messages become calls of the
// job, like those of a trainer on this node; the job's messages to it go back.

#ifndef DAEMON_PEER_AGENT_RANK_H_
#define DAEMON_PEER_AGENT_RANK_H_

#include <cstdint>
#include <memory>

#include "daemon/job/job.h"
#include "daemon/peer/node_link.h"
#include "daemon/rpc/rank_dispatch.h"

namespace gradsync::daemon {

// The node's stream owns it. Only the stream's read side uses it.
class AgentRank final : public RankPort {
 public:
  struct Place {
    std::uint32_t rank = 0;
    std::uint64_t incarnation = 0;         // of its session, on its node
    std::uint64_t member_incarnation = 0;  // in the job
    std::uint64_t staging_bytes = 0;
  };
  // `link` outlives it. `account` is charged for what its requests make this node keep.
  AgentRank(const Place& place, std::shared_ptr<Job> job, NodeLink* link,
            const MemoryAccount& account)
      : RankPort(account), place_(place), job_(std::move(job)), link_(link) {}

  // The node has mapped its memory on a GPU.
  absl::Status GpuArenaMapped(std::uint32_t channel, std::shared_ptr<DeviceArena> arena) {
    return job_->ArenaMapped(session(), channel, {nullptr, nullptr, nullptr, std::move(arena)});
  }
  // The node has no memory for a layout of the rank.
  void RefuseMemory(std::uint32_t channel, const absl::Status& why) {
    job_->RefuseLayout(session(), channel, why);
  }
  void Lose(const absl::Status& why) { job_->Lose(session(), why); }

  std::uint32_t rank() const { return place_.rank; }

  // ---- RankPort. The memory is on the other node, which has checked it.
  RankSession session() const override { return {place_.rank, place_.member_incarnation}; }
  JobPort& job() const override { return *job_; }
  absl::Status ArenaMapped(std::uint32_t channel) override {
    return job_->ArenaMapped(session(), channel, RankMemory{});
  }
  absl::StatusOr<StagingMemory> Staging() override {
    return StagingMemory{nullptr, nullptr, place_.staging_bytes};
  }
  absl::Status RegisterLayout(LayoutRequest request) override;
  void Respond(v1::SessionResponse response) override;

 private:
  const Place place_;
  const std::shared_ptr<Job> job_;
  NodeLink* const link_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_AGENT_RANK_H_
