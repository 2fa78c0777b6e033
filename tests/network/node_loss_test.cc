// A node is lost: its daemon is killed or stopped, or its cable is pulled. Every survivor learns
// which node it is.

#include <signal.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "tests/kit/deadline.h"
#include "tests/kit/wake_up_delay.h"
#include "tests/network/networked_nodes.h"

namespace gradsync::fault {
namespace {

enum class Loss { kKilled, kStopped, kUnplugged };
enum class State { kWaiting, kExchanging };

// Every node learns of a killed daemon within this time. For a stopped daemon or a pulled cable it
// takes up to ten times as long.
constexpr std::uint64_t kDeathBoundNs = 1'000'000'000ull * kScale;
constexpr std::uint64_t kSilenceBoundNs = 10'000'000'000ull * kScale;

class NodeLossTest : public testing::TestWithParam<std::tuple<int, Loss, State>> {
 protected:
  static constexpr int kCoordinator = 0;

  int lost() const { return std::get<0>(GetParam()); }
  Loss loss() const { return std::get<1>(GetParam()); }
  State state() const { return std::get<2>(GetParam()); }

  // Returns the time just before the loss.
  std::uint64_t Lose() {
    const std::uint64_t now_ns = NowNs();
    switch (loss()) {
      case Loss::kKilled:
        return nodes_.daemon(lost()).Kill();
      case Loss::kStopped:
        nodes_.daemon(lost()).process().Signal(SIGSTOP);
        break;
      case Loss::kUnplugged:
        EXPECT_TRUE(nodes_.network().SetLink(lost(), false).ok());
        break;
    }
    return now_ns;
  }

  void Restore() {
    switch (loss()) {
      case Loss::kKilled:
        return nodes_.daemon(lost()).Start();
      case Loss::kStopped:
        return nodes_.daemon(lost()).process().Signal(SIGCONT);
      case Loss::kUnplugged:
        EXPECT_TRUE(nodes_.network().SetLink(lost(), true).ok());
        return;
    }
  }

  // Expects that a rank's error arrived in time, and names one of the nodes `lost` as lost.
  void ExpectNamed(const Reply& reply, const std::vector<int>& lost, std::uint64_t since_ns) const {
    if (lost.front() == kCoordinator) {
      EXPECT_TRUE(reply.reason == "COORDINATOR_LOST" || reply.reason == "STEP_IN_DOUBT") << reply;
    } else {
      // The daemon reports what it sees first: the stream's end, its silence or the engine's error.
      EXPECT_TRUE(reply.reason == "RANK_LOST" || reply.reason == "ENGINE_PEER_LOST" ||
                  (reply.reason == "ENGINE_TIMEOUT" && loss() != Loss::kKilled))
          << reply;
    }
    EXPECT_TRUE(std::any_of(lost.begin(), lost.end(), [&reply](int node) {
      return absl::StrContains(reply.message, "node " + NetworkedNodes::Name(node));
    })) << reply;
    const std::uint64_t bound_ns = loss() == Loss::kKilled ? kDeathBoundNs : kSilenceBoundNs;
    EXPECT_LE(reply.end_ns - since_ns, FairBoundNs(bound_ns, since_ns)) << reply;
  }

  NetworkedNodes nodes_{3};
};

TEST_P(NodeLossTest, EverySurvivorLearnsWhichNodeIsLost) {
  // Loopback addresses have no cable to pull.
  if (loss() == Loss::kUnplugged && !nodes_.real()) {
    GTEST_SKIP() << nodes_.network().description();
  }
  {
    const Trainers trainers = nodes_.Join();
    ExpectAll(trainers, "register buckets=4 count=100000");
    ExpectAll(trainers, "step times=2");
    if (state() == State::kExchanging) {
      for (const auto& trainer : trainers) trainer->Begin("step times=1000000");
      ASSERT_TRUE(nodes_.daemon(kCoordinator).AwaitStatus([](const auto& status) {
        return status.jobs(0).layouts(0).step() > 5;
      }));
    } else {
      for (const auto& trainer : trainers) trainer->Begin("wait 3");
    }
    const std::uint64_t since_ns = Lose();
    for (std::uint32_t rank = 0; rank < trainers.size(); ++rank) {
      SCOPED_TRACE(testing::Message() << "rank " << rank);
      if (NetworkedNodes::NodeOf(rank) != lost()) {
        ExpectNamed(trainers[rank]->Result(), {lost()}, since_ns);
      } else if (loss() == Loss::kUnplugged) {
        // Seen from behind the pulled cable, the other nodes are lost.
        const bool of_coordinator = lost() == kCoordinator;
        ExpectNamed(trainers[rank]->Result(),
                    of_coordinator ? std::vector<int>{1, 2} : std::vector<int>{kCoordinator},
                    since_ns);
      }
    }
  }
  Restore();
  const Trainers again = nodes_.Join();
  ExpectAll(again, "register buckets=2 count=1000");
  ExpectAll(again, "step times=3");
}

std::string NameOf(const testing::TestParamInfo<NodeLossTest::ParamType>& info) {
  const auto [lost, loss, state] = info.param;
  const std::string how = loss == Loss::kKilled    ? "Killed"
                          : loss == Loss::kStopped ? "Stopped"
                                                   : "Unplugged";
  return (lost == 0 ? "Coordinator" : "Agent") + how +
         (state == State::kWaiting ? "WhileRanksWait" : "AmidExchanges");
}

INSTANTIATE_TEST_SUITE_P(Nodes, NodeLossTest,
                         testing::Combine(testing::Values(0, 1),
                                          testing::Values(Loss::kKilled, Loss::kStopped,
                                                          Loss::kUnplugged),
                                          testing::Values(State::kWaiting, State::kExchanging)),
                         NameOf);

}  // namespace
}  // namespace gradsync::fault
