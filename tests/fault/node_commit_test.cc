// A step of two nodes, with each party killed at each message: what every rank that lives sees is
// what a model allows. Above all, a step is complete on no rank if it is void on another.
//
// Rank 0 is on the coordinator's node, ranks 1 and 2 on the agent's, whose messages go through a
// proxy. The wire's points are all of one life of the job: join, layout, engine, step, leave; the
// session's are those between the calls of a rank, while the others are as far as they get.

#include <atomic>
#include <future>
#include <memory>
#include <optional>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fault/deadline.h"
#include "tests/fault/peer_proxy.h"
#include "tests/fault/trainer.h"

namespace gradsync::fault {
namespace {

constexpr std::uint32_t kWorld = 3;
// A loss is known to every rank within this, once it is known to one daemon.
constexpr std::uint64_t kKnownBoundNs = 1'000'000'000ull * kScale;

enum class Party { kCoordinator, kAgent, kRank0, kRank2 };
constexpr Party kParties[] = {Party::kCoordinator, Party::kAgent, Party::kRank0, Party::kRank2};
const char* const kPartyNames[] = {"Coordinator", "Agent", "Rank0", "Rank2"};
const char* NameOf(Party party) { return kPartyNames[static_cast<int>(party)]; }

// ---- The model

// How far the coordinator had got when the party was killed.
enum class Moment {
  kForming,    // not every rank has joined
  kAgreeing,   // every rank has joined
  kStepping,   // the verdict still needs messages of both
  kAnswering,  // of the agent alone: all that it needs may be on the wire, behind the held one
  kDecided,    // the verdict is on its way
};

using Outcomes = std::set<std::string>;  // reasons of errors; "OK": of a complete step

// What a rank that lives may see; `local`: it is on the coordinator's node.
Outcomes Allowed(Moment moment, Party killed, bool delivered, bool local) {
  const bool in_step = moment >= Moment::kStepping;
  Outcomes allowed;
  switch (killed) {
    case Party::kCoordinator:
      allowed.insert(local ? "DAEMON_LOST" : "COORDINATOR_LOST");
      if (moment == Moment::kForming) allowed.insert("COORDINATOR_UNREACHABLE");
      if (in_step) allowed.insert("STEP_IN_DOUBT");
      // The verdict may have got through. Decided, nobody takes the step for void.
      if (moment == Moment::kDecided) allowed = {"OK", "STEP_IN_DOUBT"};
      break;
    case Party::kAgent:
      if (!local) {
        allowed = {"DAEMON_LOST"};
        if (in_step) allowed.insert("STEP_IN_DOUBT");
        if (moment == Moment::kDecided) allowed = {"OK", "STEP_IN_DOUBT"};
        break;
      }
      allowed = {"RANK_LOST", "ENGINE_PEER_LOST"};
      if (moment == Moment::kAnswering && delivered) allowed.insert("OK");
      if (moment == Moment::kDecided) allowed = {"OK"};
      break;
    case Party::kRank0:  // known to the coordinator before the message goes on
      allowed = {"RANK_LOST"};
      if (moment == Moment::kDecided) allowed = {"OK"};
      break;
    case Party::kRank2:
      allowed = {"RANK_LOST"};
      // Its loss comes behind all that it said itself.
      if (in_step) allowed.insert("OK");
      if (moment == Moment::kDecided) allowed = {"OK"};
      break;
  }
  return allowed;
}

// ---- The nodes

class NodeCommitTest : public testing::Test {
 protected:
  // Started once, and again after they were killed.
  static void SetUpTestSuite() {
    a_ = new TestDaemon({"--peer_listen=127.0.0.1:0", "--node_name=alpha"});
    b_ = new TestDaemon({"--peer_listen=127.0.0.2:0", "--node_name=beta"});
  }
  static void TearDownTestSuite() {
    delete b_;
    delete a_;
    a_ = b_ = nullptr;
  }

  void TearDown() override {
    trainers_.clear();
    for (TestDaemon* daemon : {a_, b_}) {
      if (!daemon->process().running()) daemon->Start();
    }
  }

  // Ranks of a job of this test's own; those of the agent's node go to `coordinator`.
  void Start(const std::string& coordinator) {
    static int jobs = 0;
    job_ = "job" + std::to_string(++jobs);
    for (std::uint32_t rank = 0; rank < kWorld; ++rank) {
      trainers_.push_back(
          std::make_unique<Trainer>(rank == 0 ? *a_ : *b_, rank, kWorld, job_,
                                    // A daemon that is gone does not come back in time.
                                    "connect_timeout_ms=" + std::to_string(600 * kScale) +
                                        " coordinator=" + (rank == 0 ? Address() : coordinator)));
    }
  }
  static std::string Address() { return a_->Status().peer_address(); }

  static bool Lives(Party killed, std::uint32_t rank) {
    return !(killed == Party::kRank0 && rank == 0) && !(killed == Party::kRank2 && rank == 2);
  }

  void Kill(Party party) {
    switch (party) {
      case Party::kCoordinator:
        a_->Kill();
        return;
      case Party::kAgent:
        b_->Kill();
        return;
      case Party::kRank0:
        trainers_[0]->Kill();
        EXPECT_TRUE(a_->AwaitStatus([this](const auto& now) {
          for (const auto& job : now.jobs()) {
            if (job.job_id() != job_ || job.state() == v1::JOB_STATE_FAILED) continue;
            for (const auto& session : job.sessions()) {
              if (session.rank() == 0) return false;
            }
          }
          return true;
        }));
        return;
      case Party::kRank2:
        trainers_[2]->Kill();
        return;
    }
  }

  // What the ranks that live have seen; `since_ns`: when the loss could be known.
  void Check(const std::vector<Reply>& replies, Moment moment, Party killed, bool delivered,
             std::uint64_t since_ns) {
    bool complete = false, is_void = false;
    for (std::uint32_t rank = 0; rank < kWorld; ++rank) {
      if (!Lives(killed, rank)) continue;
      const Reply& reply = replies[rank];
      const std::string outcome = reply.ok() ? "OK" : reply.reason;
      const Outcomes allowed = Allowed(moment, killed, delivered, rank == 0);
      EXPECT_EQ(allowed.count(outcome), 1u) << "rank " << rank << ": " << reply;
      complete = complete || reply.ok();
      is_void = is_void || (!reply.ok() && outcome != "STEP_IN_DOUBT");
      if (outcome == "RANK_LOST" && killed >= Party::kRank0) {
        EXPECT_EQ(reply.Field("rank"), killed == Party::kRank0 ? "0" : "2") << reply;
      }
      if (reply.end_ns > since_ns) {
        EXPECT_LE(reply.end_ns - since_ns, kKnownBoundNs) << "rank " << rank << ": " << reply;
      }
    }
    EXPECT_FALSE(complete && is_void) << "complete on one rank and void on another";
  }

  static TestDaemon* a_;
  static TestDaemon* b_;
  std::string job_;
  std::vector<std::unique_ptr<Trainer>> trainers_;
};

TestDaemon* NodeCommitTest::a_ = nullptr;
TestDaemon* NodeCommitTest::b_ = nullptr;

// ---- Every message between the daemons

struct Kind {
  const char* name;
  int count;
  bool from_agent;
};

// All that is said in one undisturbed life, besides Ping and Pong.
constexpr Kind kKinds[] = {
    {"hello", 1, true},
    {"welcome", 1, false},
    {"rank_request.open_session", 2, true},
    {"rank_response.session_opened", 2, false},
    {"rank_request.register_layout", 2, true},
    {"rank_response.layout_assigned", 2, false},
    {"rank_request.arena_mapped", 2, true},
    {"rank_response.layout_ready", 2, false},
    {"connect_engine", 1, false},
    {"rendezvous_set", 5, true},
    {"rendezvous_get", 5, true},
    {"rendezvous_value", 5, false},
    {"rank_request.bucket_ready", 2, true},  // at least: a client may say two in one
    {"launch", 2, false},
    {"launch_done", 2, true},
    {"rank_request.end_step", 2, true},
    {"rank_response.step_done", 4, false},  // the first step, and the one that is given up
    {"rank_request.abandon_step", 1, true},
    {"rank_request.leave", 2, true},
    {"rank_response.session_ending", 2, false},
    {"rank_gone", 2, true},
};

struct WireCase {
  WirePoint point;
  bool from_agent = false;
  Party killed = Party::kCoordinator;
  // What the killed daemon had said is on the wire still, or is lost with it.
  bool deliver = true;
};
std::ostream& operator<<(std::ostream& out, const WireCase& one) {
  return out << NameOf(one.killed) << " killed at " << one.point.kind << " " << one.point.ordinal
             << (one.deliver ? "" : ", which is lost");
}

std::vector<WireCase> WireCases() {
  std::vector<WireCase> cases;
  for (const Kind& kind : kKinds) {
    for (int ordinal = 1; ordinal <= kind.count; ++ordinal) {
      for (const Party killed : kParties) {
        const WirePoint point{kind.name, ordinal};
        const bool sender = killed == (kind.from_agent ? Party::kAgent : Party::kCoordinator);
        cases.push_back({point, kind.from_agent, killed, true});
        if (sender) cases.push_back({point, kind.from_agent, killed, false});
      }
    }
  }
  return cases;
}

class EveryMessageTest : public NodeCommitTest, public testing::WithParamInterface<WireCase> {
 protected:
  // One call of every rank (that lives), begun at once. Kills and releases if the message is held
  // meanwhile; true then.
  bool Call(const std::vector<std::string>& commands, PeerProxy* proxy) {
    for (std::uint32_t rank = 0; rank < kWorld; ++rank) {
      if (!commands[rank].empty()) trainers_[rank]->Begin(commands[rank]);
    }
    std::atomic<bool> over{false};
    auto results = std::async(std::launch::async, [&] {
      std::vector<Reply> replies(kWorld);
      for (std::uint32_t rank = 0; rank < kWorld; ++rank) {
        if (commands[rank].empty()) continue;
        // A trainer that is killed takes no more commands.
        if (trainers_[rank]->running()) trainers_[rank]->Send("result");
      }
      for (std::uint32_t rank = 0; rank < kWorld; ++rank) {
        if (!commands[rank].empty()) replies[rank] = trainers_[rank]->Receive();
      }
      over = true;
      proxy->Wake();
      return replies;
    });
    const bool held = proxy->AwaitHeld([&] { return over.load(); });
    if (held) KillAndRelease(proxy);
    replies_ = results.get();
    return held;
  }
  void KillAndRelease(PeerProxy* proxy) {
    Kill(GetParam().killed);
    released_ns_ = NowNs();
    proxy->Release(GetParam().deliver);
  }

  static std::vector<std::string> All(const std::string& command) {
    return std::vector<std::string>(kWorld, command);
  }
  std::vector<std::string> Joins() const {
    std::vector<std::string> joins;
    for (const auto& trainer : trainers_) joins.push_back(trainer->join());
    return joins;
  }

  Moment MomentInStep() {
    const std::string& kind = GetParam().point.kind;
    if (kind == "rank_response.step_done") return Moment::kDecided;
    const bool last = kind == "launch_done" || kind == "rank_request.end_step";
    return last ? Moment::kAnswering : Moment::kStepping;
  }

  // Of a step that rank 2 gives up: void everywhere, by whatever is known first.
  void CheckVoid() {
    const WireCase& one = GetParam();
    for (std::uint32_t rank = 0; rank < kWorld; ++rank) {
      if (!Lives(one.killed, rank)) continue;
      Outcomes allowed = Allowed(Moment::kStepping, one.killed, one.deliver, rank == 0);
      allowed.erase("OK");
      allowed.insert("STEP_ABANDONED");
      const Reply& reply = replies_[rank];
      EXPECT_EQ(allowed.count(reply.reason), 1u) << "rank " << rank << ": " << reply;
      if (reply.end_ns > released_ns_) {
        EXPECT_LE(reply.end_ns - released_ns_, kKnownBoundNs) << "rank " << rank << ": " << reply;
      }
    }
  }

  std::uint64_t released_ns_ = 0;
  std::vector<Reply> replies_;
};

TEST_P(EveryMessageTest, CompleteOrVoidOnEveryRank) {
  const WireCase& one = GetParam();
  PeerProxy proxy(Address(), one.point);
  Start(proxy.address());
  const auto check = [&](Moment moment) {
    Check(replies_, moment, one.killed, one.deliver, released_ns_);
  };
  const auto expect_ok = [&] {
    for (const Reply& reply : replies_) EXPECT_TRUE(reply.ok()) << reply;
  };

  ASSERT_FALSE(Call({trainers_[0]->join(), "", ""}, &proxy));
  auto joins = Joins();
  joins[0] = "";
  if (Call(joins, &proxy)) {
    // The others may have joined before, and are told by their next call, if they ever are: a job
    // that has not formed waits.
    for (const std::uint32_t rank : {1, 2}) {
      if (!Lives(one.killed, rank) || replies_[rank].ok()) continue;
      const Outcomes allowed = Allowed(Moment::kForming, one.killed, one.deliver, /*local=*/false);
      EXPECT_EQ(allowed.count(replies_[rank].reason), 1u) << rank << ": " << replies_[rank];
    }
    return;
  }
  for (const std::uint32_t rank : {1, 2}) ASSERT_TRUE(replies_[rank].ok()) << replies_[rank];

  const bool held = Call(All("register buckets=2 count=64"), &proxy);
  if (held) {
    for (std::uint32_t rank = 0; rank < kWorld; ++rank) {
      // It may have been agreed before the loss was known; the step will tell.
      if (Lives(one.killed, rank) && !replies_[rank].ok()) {
        const Outcomes allowed = Allowed(Moment::kAgreeing, one.killed, one.deliver, rank == 0);
        EXPECT_EQ(allowed.count(replies_[rank].reason), 1u) << rank << ": " << replies_[rank];
      }
    }
    std::vector<std::string> steps(kWorld);
    for (std::uint32_t rank = 0; rank < kWorld; ++rank) {
      if (Lives(one.killed, rank) && replies_[rank].ok()) steps[rank] = "step";
    }
    Call(steps, &proxy);
    for (const Reply& reply : replies_) EXPECT_FALSE(reply.ok()) << "a step without every rank";
    return;
  }
  expect_ok();

  if (Call(All("step"), &proxy)) return check(MomentInStep());
  expect_ok();
  if (Call({"wait 2", "wait 2", "give_up_step"}, &proxy)) return CheckVoid();
  for (const Reply& reply : replies_) EXPECT_EQ(reply.reason, "STEP_ABANDONED") << reply;
  // Whatever happens to the others, the step was complete.
  if (Call(All("leave"), &proxy)) return;
  // The last words come after the trainers' own.
  ASSERT_TRUE(proxy.AwaitHeld([] { return false; }));
  KillAndRelease(&proxy);
}

std::string CaseName(const testing::TestParamInfo<WireCase>& info) {
  std::string name = std::string(NameOf(info.param.killed)) + "_" + info.param.point.kind + "_" +
                     std::to_string(info.param.point.ordinal) + (info.param.deliver ? "" : "_lost");
  for (char& c : name) {
    if (c == '.') c = '_';
  }
  return name;
}

INSTANTIATE_TEST_SUITE_P(Wire, EveryMessageTest, testing::ValuesIn(WireCases()), CaseName);

TEST_F(NodeCommitTest, TheListOfMessagesIsComplete) {
  std::map<std::string, int> expected;
  for (const Kind& kind : kKinds) expected[kind.name] = kind.count;
  PeerProxy proxy(Address(), std::nullopt);
  Start(proxy.address());
  for (const auto& trainer : trainers_) trainer->Send(trainer->join());
  for (const auto& trainer : trainers_) ASSERT_TRUE(trainer->Receive().ok());
  ExpectAll(trainers_, "register buckets=2 count=64");
  ExpectAll(trainers_, "step");
  for (const std::uint32_t rank : {0, 1}) trainers_[rank]->Begin("wait 2");
  EXPECT_EQ(trainers_[2]->Do("give_up_step").reason, "STEP_ABANDONED");
  for (const std::uint32_t rank : {0, 1}) {
    EXPECT_EQ(trainers_[rank]->Result().reason, "STEP_ABANDONED");
  }
  ExpectAll(trainers_, "leave");
  // The last words come after the trainers' own.
  auto passed = proxy.AwaitPassed("rank_gone", 2);
  EXPECT_LE(passed["rank_request.bucket_ready"], 4);
  passed["rank_request.bucket_ready"] = 2;
  EXPECT_EQ(passed, expected);
}

// ---- Every call of a rank

// What the rank did last.
enum class Stage { kJoin, kRegister, kMarkOne, kMarkAll, kEnd };
const char* const kStageNames[] = {"Join", "Register", "MarkOne", "MarkAll", "End"};

struct CallCase {
  std::uint32_t rank = 0;
  Stage stage = Stage::kJoin;
  Party killed = Party::kCoordinator;
};
std::ostream& operator<<(std::ostream& out, const CallCase& one) {
  return out << NameOf(one.killed) << " killed after rank " << one.rank << "'s "
             << kStageNames[static_cast<int>(one.stage)];
}

std::vector<CallCase> CallCases() {
  std::vector<CallCase> cases;
  for (const std::uint32_t rank : {0u, 2u}) {
    for (int stage = 0; stage <= static_cast<int>(Stage::kEnd); ++stage) {
      for (const Party killed : kParties) cases.push_back({rank, Stage(stage), killed});
    }
  }
  return cases;
}

class EveryCallTest : public NodeCommitTest, public testing::WithParamInterface<CallCase> {
 protected:
  void Do(std::uint32_t rank, const std::string& command) {
    const Reply reply = trainers_[rank]->Do(command);
    ASSERT_TRUE(reply.ok()) << "rank " << rank << ", " << command << ": " << reply;
  }
  // Of a layout that is ready, up to `stage`; returns when the coordinator has heard it.
  void Step(std::uint32_t rank, Stage stage) {
    if (stage >= Stage::kMarkOne) Do(rank, "mark 1 0");
    if (stage >= Stage::kMarkAll) Do(rank, "mark 1 1");
    if (stage >= Stage::kEnd) Do(rank, "end 1");
    EXPECT_EQ(trainers_[rank]->Do("wait 1 timeout_ms=1").reason, "WAIT_TIMEOUT");
  }
};

// Rank 1 never begins its step, the rank in question has come as far as said, the third has ended
// its own: so nothing is complete, and exactly those whose EndStep nobody answers are in doubt.
TEST_P(EveryCallTest, ExactlyThoseAreInDoubtWhoseEndIsNotAnswered) {
  const CallCase& one = GetParam();
  const std::uint32_t third = 2 - one.rank;
  Start(Address());
  for (const auto& trainer : trainers_) trainer->Send(trainer->join());
  for (const auto& trainer : trainers_) ASSERT_TRUE(trainer->Receive().ok());
  const std::string layout = "register buckets=2 count=64";
  if (one.stage == Stage::kJoin) {
    for (const std::uint32_t rank : {1u, third}) trainers_[rank]->Begin(layout);
  } else {
    ExpectAll(trainers_, layout);
    Step(third, Stage::kEnd);
    if (one.stage > Stage::kRegister) Step(one.rank, one.stage);
    for (const auto& trainer : trainers_) trainer->Begin("wait 1");
  }
  const std::uint64_t killed_ns = NowNs();
  Kill(one.killed);
  for (std::uint32_t rank = 0; rank < kWorld; ++rank) {
    if (!Lives(one.killed, rank)) continue;
    const bool begun = one.stage != Stage::kJoin || rank != one.rank;
    const Reply reply = begun ? trainers_[rank]->Result() : trainers_[rank]->Do(layout);
    const bool ended = (one.stage != Stage::kJoin && rank == third) ||
                       (one.stage == Stage::kEnd && rank == one.rank);
    const bool local = rank == 0;
    std::string expected = "RANK_LOST";
    if (one.killed == Party::kCoordinator) {
      expected = ended ? "STEP_IN_DOUBT" : local ? "DAEMON_LOST" : "COORDINATOR_LOST";
    } else if (one.killed == Party::kAgent && !local) {
      expected = ended ? "STEP_IN_DOUBT" : "DAEMON_LOST";
    }
    EXPECT_EQ(reply.reason, expected) << "rank " << rank << ": " << reply;
    EXPECT_LE(reply.end_ns - killed_ns, kKnownBoundNs) << "rank " << rank << ": " << reply;
  }
}

INSTANTIATE_TEST_SUITE_P(Calls, EveryCallTest, testing::ValuesIn(CallCases()),
                         [](const testing::TestParamInfo<CallCase>& info) {
                           return std::string(NameOf(info.param.killed)) + "_rank" +
                                  std::to_string(info.param.rank) + "_" +
                                  kStageNames[static_cast<int>(info.param.stage)];
                         });

}  // namespace
}  // namespace gradsync::fault
