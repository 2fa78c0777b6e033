// A trainer names a coordinator of its own, which plays a node of a job, meets this node's engine,
// and sends it garbage. That engine fails, and nothing else: neither the daemon nor another job.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <future>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gradsync/v1/peer.pb.h"
#include "gtest/gtest.h"
#include "tests/fault/fake_coordinator.h"
#include "tests/fault/fake_engine.h"
#include "tests/fault/trainer.h"
#include "tests/fault/two_nodes.h"
#include "tests/kit/test_daemon.h"

namespace gradsync::attack {
namespace {

using fault::ExpectAll;
using fault::FakeCoordinator;
using fault::FakeEngine;
using fault::Trainer;
using fault::Trainers;

constexpr std::uint32_t kLanes = 2;

// The node that the attacker plays, and the connection on which it sends garbage.
struct Attack {
  std::uint32_t node = 0;
  bool lane = false;  // a lane's; otherwise the watch's
};

// The coordinator's stream to the daemon. A thread sends a Ping every second, so that the
// coordinator counts as alive. Messages are read on the caller's thread.
class Talk {
 public:
  explicit Talk(FakeCoordinator::Stream* stream) : stream_(stream) {
    pings_ = std::thread([this] {
      std::unique_lock<std::mutex> lock(mutex_);
      while (!changed_.wait_for(lock, std::chrono::seconds(1), [this] { return ended_; })) {
        v1::AttachResponse ping;
        ping.mutable_ping()->set_number(1);
        stream_->Write(ping);
      }
    });
  }
  ~Talk() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    pings_.join();
  }

  void Say(const v1::AttachResponse& message) {
    const std::lock_guard<std::mutex> lock(mutex_);
    stream_->Write(message);
  }
  v1::AttachRequest Hear(v1::AttachRequest::KindCase kind) {
    return FakeCoordinator::Await(stream_, kind);
  }

 private:
  FakeCoordinator::Stream* const stream_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
  std::thread pings_;
};

std::vector<std::string> Garbage() {
  std::mt19937 random;
  std::string bytes(4096, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return {bytes, std::string(4096, '\0'), std::string(4096, '\xff')};
}

v1::AttachResponse LaunchOn(std::uint64_t epoch) {
  v1::AttachResponse message;
  v1::Launch* const launch = message.mutable_launch();
  launch->set_epoch(epoch);
  launch->set_sequence(1);
  launch->set_dtype(v1::DATA_TYPE_FLOAT32);
  launch->set_count(100'000);
  launch->set_scale(1.0);
  launch->set_op(v1::REDUCE_OP_SUM);
  return message;
}

// Meets the daemon's engine of this epoch and sends it garbage. Returns why that engine fails, or
// what goes wrong before.
std::string SendGarbage(Talk* talk, const Attack& attack, std::uint64_t epoch,
                        const std::string& garbage) {
  FakeEngine engine(attack.node, kLanes);
  v1::AttachResponse connect = FakeCoordinator::ConnectEngine(epoch);
  connect.mutable_connect_engine()->set_lanes(kLanes);
  connect.mutable_connect_engine()->set_node(1 - attack.node);
  if (attack.node == 1) connect.mutable_connect_engine()->mutable_node_names()->SwapElements(0, 1);
  talk->Say(connect);
  v1::AttachRequest heard;
  while (heard.rendezvous_set().epoch() != epoch) {
    heard = talk->Hear(v1::AttachRequest::kRendezvousSet);
    if (!heard.has_rendezvous_set()) return "the stream has ended";
  }
  const std::string other = heard.rendezvous_set().value();
  v1::AttachResponse value;
  value.mutable_rendezvous_value()->set_epoch(epoch);
  value.mutable_rendezvous_value()->set_key("watch/" + std::to_string(attack.node));
  value.mutable_rendezvous_value()->set_value(engine.Stored(other));
  talk->Say(value);
  if (!engine.Meet(other)) return "the engines have not met";
  if (attack.lane) talk->Say(LaunchOn(epoch));  // it reads what its lanes expect, and nothing else
  engine.Send(attack.lane ? 1 : 0, garbage);
  while (heard.launch_done().epoch() != epoch || heard.launch_done().status().code() == 0) {
    heard = talk->Hear(v1::AttachRequest::kLaunchDone);
    if (!heard.has_launch_done()) return "the stream has ended";
  }
  return heard.launch_done().status().message();
}

class EngineGarbage : public testing::TestWithParam<Attack> {};

INSTANTIATE_TEST_SUITE_P(Of, EngineGarbage,
                         testing::Values(Attack{0, false}, Attack{0, true}, Attack{1, false},
                                         Attack{1, true}),
                         [](const auto& tested) {
                           return std::string(tested.param.node == 0 ? "TheCoordinatorsNode"
                                                                     : "AnotherNode") +
                                  (tested.param.lane ? "OnALane" : "OnTheWatch");
                         });

TEST_P(EngineGarbage, FailsItsOwnEngineAndNothingElse) {
  const fault::TwoNodes nodes;
  const Trainers innocent = nodes.Join();
  ExpectAll(innocent, "register buckets=2 count=100000");
  ExpectAll(innocent, "step");
  const std::size_t before = nodes.alpha().Processes().size();

  std::promise<std::vector<std::string>> failures;
  std::atomic<bool> begun{false};
  FakeCoordinator fake([&](FakeCoordinator::Stream* stream) {
    if (begun.exchange(true)) return;  // the daemon may look again whether it is there
    v1::AttachRequest hello;
    stream->Read(&hello);
    stream->Write(FakeCoordinator::Welcome());
    std::vector<std::string> said;
    {
      Talk talk(stream);
      std::uint64_t epoch = 0;
      for (const std::string& garbage : Garbage()) {
        said.push_back(SendGarbage(&talk, GetParam(), ++epoch, garbage));
      }
    }
    failures.set_value(std::move(said));
  });
  Trainer attacker(nodes.alpha(), 1, 2, "attack", "coordinator=" + fake.address());
  attacker.Begin(attacker.join());
  std::future<std::vector<std::string>> said = failures.get_future();
  do {
    ExpectAll(innocent, "step times=10");
  } while (!HasFailure() && said.wait_for(std::chrono::seconds(0)) != std::future_status::ready);
  for (const std::string& failure : said.get()) {
    EXPECT_NE(failure.find("node fake"), std::string::npos) << failure;
  }
  attacker.Kill();
  EXPECT_TRUE(nodes.alpha().AwaitStatus([&](const auto&) {
    return nodes.alpha().Processes().size() <= before;
  })) << "its engines have ended";
  ExpectAll(innocent, "step times=10");
  ExpectAll(innocent, "leave");
}

}  // namespace
}  // namespace gradsync::attack
