// Kills each party of a job on two nodes at each message between the daemons, and checks that every
// surviving rank sees an outcome that a model allows. Above all, a step is never complete on one
// rank and void on another.
//
// Rank 0 is on the coordinator's node. Ranks 1 and 2 are on the agent's node, whose messages go
// through a proxy. Two kinds of tests choose when a party is killed:
// - EveryMessageTest: at each message of two lives of a job. Together the lives contain every kind
//   of message that two daemons exchange about host memory.
// - EveryCallTest: between the calls of one rank, while the other ranks are as far as they can get.

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <optional>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include "gradsync/v1/peer.pb.h"
#include "gtest/gtest.h"
#include "tests/fault/peer_proxy.h"
#include "tests/fault/trainer.h"
#include "tests/kit/deadline.h"
#include "tests/kit/wake_up_delay.h"

namespace gradsync::fault {
namespace {

constexpr std::uint32_t kWorld = 3;
// Every rank learns of a loss within this time after the first daemon has learned of it. The
// bound includes the time for which a client tries to reconnect (see Start()).
constexpr std::uint64_t kKnownBoundNs = 1'000'000'000ull * kScale;
// The time-out of a join during which a daemon is killed. The daemon is not started again within
// it.
constexpr int kJoinTimeoutMs = 3'000 * kScale;

enum class Party { kCoordinator, kAgent, kRank0, kRank2 };
constexpr Party kParties[] = {Party::kCoordinator, Party::kAgent, Party::kRank0, Party::kRank2};
const char* const kPartyNames[] = {"Coordinator", "Agent", "Rank0", "Rank2"};
const char* NameOf(Party party) { return kPartyNames[static_cast<int>(party)]; }

// ---- The model

// The outcome of a call: "OK" for a complete step or an operation with the right result; the reason
// of an error; otherwise the trainer's own code ("WRONG" for a wrong result).
std::string OutcomeOf(const Reply& reply) {
  return reply.reason.empty() ? reply.code : reply.reason;
}
using Outcomes = std::set<std::string>;

// The part whose loss decides the answer to the ranks' calls.
enum class Answer {
  kJoined,   // each rank gets its own answer, while the job forms
  kOwn,      // each rank gets its own answer, from its own node alone
  kAgreed,   // a layout: a loss may be reported instead, because the layout is then useless
  kCommon,   // the coordinator decides once for all ranks
  kVerdict,  // as kCommon; a rank that has ended the step and gets no answer is in doubt
};

// What the coordinator still needs for that answer when the party is killed.
enum class Moment {
  kOpen,       // messages from every rank
  kSaid,       // messages from both daemons; every rank may have sent all of its own
  kAnswering,  // messages from the agent only; all may be on the wire, behind the held one
  kDecided,    // nothing: the answer is on its way
};

// The outcomes that a surviving rank may see. `outcome` is what the call returns if no party is
// killed. `local`: the rank is on the coordinator's node.
Outcomes Allowed(Answer answer, const std::string& outcome, Moment moment, Party killed,
                 bool delivered, bool local) {
  const bool decided = moment == Moment::kDecided;
  const bool own_daemon = killed == (local ? Party::kCoordinator : Party::kAgent);
  bool answered = decided || answer == Answer::kJoined || answer == Answer::kOwn;
  Outcomes allowed;
  if (own_daemon || killed == Party::kCoordinator) {
    // The answer may have arrived. After a verdict no rank may take the step for void.
    if (answer != Answer::kVerdict || !decided) {
      allowed.insert(own_daemon ? "DAEMON_LOST" : "COORDINATOR_LOST");
    }
    if (answer == Answer::kVerdict) allowed.insert("STEP_IN_DOUBT");
    if (answer == Answer::kJoined && !own_daemon) allowed.insert("COORDINATOR_UNREACHABLE");
  } else if (!decided || answer == Answer::kAgreed || (answer == Answer::kOwn && local)) {
    // kOwn: the agent's rank has its answer. The call of rank 0 may not have reached its daemon.
    allowed.insert("RANK_LOST");
    if (killed == Party::kAgent) allowed.insert("ENGINE_PEER_LOST");
    // The coordinator knows of rank 0's loss before the message is released. It learns of the other
    // losses only after all messages of the lost party.
    if (killed == Party::kAgent && moment == Moment::kAnswering && delivered) answered = true;
    if (killed == Party::kRank2 && moment != Moment::kOpen) answered = true;
  }
  if (answered) allowed.insert(outcome);
  return allowed;
}

// ---- The lives of a job

struct Message {
  std::string kind;
  int count = 1;
  Moment moment = Moment::kOpen;
};
using Commands = std::array<std::string, kWorld>;  // one per rank, run at the same time; "": none

// A part of a life. No message is on the wire at its start and at its end.
struct Phase {
  std::string name;
  Commands commands;
  // All messages of the daemons, except for Ping and Pong, ordered by the first of each kind.
  std::vector<Message> messages;
  Answer answer = Answer::kCommon;
  std::string outcome = "OK";  // the same for every command
  // The next call of ranks that do not know of the loss. It cannot complete without the lost ranks.
  std::string next = "step";
  // The agent has no ranks left after this phase, so a later loss there has no effect.
  bool agent_leaves = false;
};
using Life = std::vector<Phase>;

// The rank takes part in nothing after this command.
bool Departs(const std::string& command) { return command == "leave" || command == "finish"; }
Commands All(const std::string& command) { return {command, command, command}; }
const char* const kRegister = "register buckets=2 count=64";
const char* const kTooLarge = "register layout=large buckets=1 count=400000";  // for kQuota

Life Beginning() {
  return {
      {"coordinator_joins", {"join", "", ""}, {}, Answer::kJoined},
      {"join",
       {"", "join", "join"},
       {{"hello"},
        {"welcome"},
        {"rank_request.open_session", 2},
        {"rank_response.session_opened", 2}},
       Answer::kJoined,
       "OK",
       ""},  // nothing: a job that has not formed waits
      {"nodes_meet",
       All(""),
       {{"connect_engine"}, {"rendezvous_set"}, {"rendezvous_get"}, {"rendezvous_value"}},
       Answer::kCommon,
       "OK",
       kRegister},
      {"register",
       All(kRegister),
       {{"rank_request.register_layout", 2, Moment::kSaid},
        {"rank_response.layout_assigned", 2, Moment::kSaid},
        {"rank_request.arena_mapped", 2, Moment::kAnswering},
        {"rank_response.layout_ready", 2, Moment::kDecided}},
       Answer::kAgreed},
  };
}

Phase Step(const std::string& name, int buckets) {
  return {name,
          All("step"),
          {{"rank_request.bucket_ready", 2, Moment::kSaid},  // up to 4 with two buckets
           {"launch", buckets, Moment::kSaid},
           {"launch_done", buckets, Moment::kAnswering},
           {"rank_request.end_step", 2, Moment::kAnswering},
           {"rank_response.step_done", 2, Moment::kDecided}},
          Answer::kVerdict};
}

Life End() {
  const std::vector<Message> leaving = {{"rank_request.leave", 1, Moment::kAnswering},
                                        {"rank_response.session_ending", 1, Moment::kDecided},
                                        {"rank_ended", 1, Moment::kDecided}};
  return {
      {"leave", {"", "leave", ""}, leaving},
      {"agent_leaves", {"", "", "leave"}, leaving, Answer::kCommon, "OK", "step ranks=0", true},
      {"step_alone", {"step ranks=0", "", ""}, {}},
      {"coordinator_leaves", {"leave", "", ""}, {}},
  };
}

// No step can follow a rank's finish.
Life GoodEnd() {
  const std::vector<Message> finishing = {{"rank_request.finish", 1, Moment::kAnswering},
                                          {"rank_response.session_ending", 1, Moment::kDecided},
                                          {"rank_ended", 1, Moment::kDecided}};
  return {
      {"finish", {"", "finish", ""}, finishing, Answer::kCommon, "OK", ""},
      {"agent_finishes", {"", "", "finish"}, finishing, Answer::kCommon, "OK", "", true},
      {"coordinator_finishes", {"finish", "", ""}, {}},
  };
}

Life Joined(const std::vector<Life>& parts) {
  Life life;
  for (const Life& part : parts) life.insert(life.end(), part.begin(), part.end());
  return life;
}

const std::vector<Life>& AllLives() {
  static const auto* const lives = new std::vector<Life>{
      Joined({Beginning(),
              {Step("step", 2),
               {"abandon",
                {"wait 2", "wait 2", "give_up_step"},
                {{"rank_request.abandon_step", 1, Moment::kAnswering},
                 {"rank_response.step_done", 2, Moment::kDecided}},
                Answer::kCommon,
                "STEP_ABANDONED"}},
              End()}),
      Joined({Beginning(),
              {{"barrier",
                All("barrier"),
                {{"rank_request.barrier", 2, Moment::kAnswering},
                 {"rank_response.operation_done", 2, Moment::kDecided}}},
               {"collective",
                All("collective sum"),
                {{"rank_request.begin_collective", 2, Moment::kAnswering}},
                Answer::kOwn,
                "OK",
                "barrier"},
               {"query_collectives",
                {"", "query_collectives", ""},
                {{"rank_request.query_collectives", 1, Moment::kAnswering}},
                Answer::kOwn,
                "OK",
                "barrier"},
               {"all_reduce",
                All("allreduce 100"),
                {{"rank_request.all_reduce", 2, Moment::kSaid},
                 {"launch", 1, Moment::kSaid},
                 {"launch_done", 1, Moment::kAnswering},
                 {"rank_response.operation_done", 2, Moment::kDecided}}},
               {"broadcast",  // two chunks, from rank 1
                All("broadcast 6000 1"),
                {{"rank_request.broadcast", 2},
                 {"rank_response.chunk_ready", 4},  // alternately to write and to read
                 {"rank_request.chunk_written", 2},
                 {"launch", 2},
                 {"launch_done", 2},
                 {"rank_request.chunk_read", 1},
                 {"rank_request.chunk_read", 1, Moment::kAnswering},
                 {"rank_response.operation_done", 2, Moment::kDecided}}},
               {"refuse",  // exceeds the agent's quota per user
                {"", kTooLarge, ""},
                {{"rank_request.register_layout"},
                 {"rank_response.layout_assigned"},
                 {"refuse_layout"}},
                Answer::kOwn,
                "QUOTA"},
               {"refused_elsewhere",
                {kTooLarge, "", kTooLarge},
                {{"rank_request.register_layout", 1, Moment::kAnswering},
                 {"rank_response.operation_failed", 1, Moment::kDecided}},
                Answer::kOwn,
                "LAYOUT_REFUSED"},
               {"replace",
                All("replace buckets=1 count=70"),
                {{"rank_request.register_layout", 2, Moment::kSaid},
                 {"rank_response.layout_assigned", 2, Moment::kSaid},
                 {"rank_request.arena_mapped", 2, Moment::kAnswering},
                 {"rank_response.layout_ready", 2, Moment::kDecided}},
                Answer::kAgreed},
               {"leave_and_stay",
                All("leave_stay"),
                {{"rank_request.leave", 2, Moment::kAnswering},
                 {"rank_response.leave_done", 2, Moment::kDecided}}},
               {"query",
                {"", "wait 1 timeout_ms=1", ""},
                {{"rank_request.query_step"}, {"rank_response.step_state"}},
                Answer::kOwn,
                "WAIT_TIMEOUT"},
               Step("step_of_the_new_layout", 1),
               {"release",
                All("release"),
                {{"rank_request.release_layout", 2, Moment::kAnswering}},
                Answer::kOwn,
                "OK",
                "barrier"}},
              GoodEnd()})};
  return *lives;
}

// Messages that no life contains.
const char* const kElsewhere[] = {
    "ping", "pong",  // the proxy does not count them
    // Sent only between a rank and the daemon of its own node.
    "rank_request.lease_answer", "rank_response.lease_question", "rank_response.bucket_done",
    // Only for a layout that is longer than a message: see nodes_test.cc.
    "rank_request.layout_part",
    // Only if a rank is more than 5 s late; nothing follows from it.
    "rank_response.still_waiting",
    // Only with on_rank_loss=hold, which jobs that span nodes cannot have.
    "rank_request.fetch_state", "rank_request.state_offer", "rank_request.state_written",
    "rank_request.state_read", "rank_request.state_digests", "rank_request.state_refused",
    "rank_response.healed", "rank_response.state_question", "rank_response.state_begin",
    "rank_response.state_chunk", "rank_response.state_admitted", "rank_response.state_cancelled",
    "rank_response.state_failed",
    // After a loss, or when other nodes connect.
    "engine_end",
    // When a daemon stops: see tests/network/nodes_test.cc.
    "detach",
    // GPUs: see tests/cuda/cuda_nodes_test.cc.
    "gpu_arena_mapped", "worker_reply", "worker_ended", "worker_call", "worker_release"};

// ---- The nodes

// The staging memory holds one chunk of a broadcast.
const char* const kStaging = "--staging_bytes=4096";
const char* const kQuota = "--quota_arena_bytes_per_user=1MiB";

class NodeCommitTest : public testing::Test {
 protected:
  // The daemons serve all tests. A killed one is started again after its test.
  static void SetUpTestSuite() {
    a_ = new TestDaemon({"--peer_listen=127.0.0.1:0", "--node_name=alpha", kStaging});
    b_ = new TestDaemon({"--peer_listen=127.0.0.2:0", "--node_name=beta", kStaging, kQuota});
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

  // Starts the ranks of a new job. The ranks on the agent's node use the address `coordinator`.
  void Start(const std::string& coordinator, int connect_timeout_ms = kPatienceMs) {
    static int jobs = 0;
    job_ = "job" + std::to_string(++jobs);
    for (std::uint32_t rank = 0; rank < kWorld; ++rank) {
      trainers_.push_back(
          std::make_unique<Trainer>(rank == 0 ? *a_ : *b_, rank, kWorld, job_,
                                    "connect_timeout_ms=" + std::to_string(connect_timeout_ms) +
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

  static TestDaemon* a_;
  static TestDaemon* b_;
  std::string job_;
  Trainers trainers_;
};

TestDaemon* NodeCommitTest::a_ = nullptr;
TestDaemon* NodeCommitTest::b_ = nullptr;

// ---- Every message between the daemons

using Replies = std::map<std::uint32_t, Reply>;

class LifeTest : public NodeCommitTest {
 protected:
  // Starts a job. The message at `point` between its nodes is held.
  void StartLife(const std::optional<WirePoint>& point, int connect_timeout_ms = kPatienceMs) {
    proxy_ = std::make_unique<PeerProxy>(Address(), point);
    Start(proxy_->address(), connect_timeout_ms);
  }
  void TearDown() override {
    proxy_.reset();
    NodeCommitTest::TearDown();
  }

  void Begin(const Commands& commands) {
    for (std::uint32_t rank = 0; rank < kWorld; ++rank) {
      if (commands[rank].empty()) continue;
      trainers_[rank]->Begin(commands[rank] == "join" ? trainers_[rank]->join() : commands[rank]);
    }
  }
  // The replies of the surviving ranks.
  Replies Results(const Commands& commands) {
    Replies replies;
    for (std::uint32_t rank = 0; rank < kWorld; ++rank) {
      if (commands[rank].empty() || !trainers_[rank]->running()) continue;
      replies[rank] = trainers_[rank]->Result();
    }
    return replies;
  }

  // Runs a whole phase without a loss. Returns the number of messages of each kind since the life
  // began.
  std::map<std::string, int> Walk(const Phase& phase) {
    Begin(phase.commands);
    for (const auto& [rank, reply] : Results(phase.commands)) {
      EXPECT_EQ(OutcomeOf(reply), phase.outcome)
          << phase.name << ", rank " << rank << ": " << reply;
      if (Departs(phase.commands[rank])) left_.insert(rank);
    }
    // The last messages may arrive after the trainers' replies.
    for (const Message& message : phase.messages) said_[message.kind] += message.count;
    return proxy_->AwaitPassed(said_);
  }

  std::unique_ptr<PeerProxy> proxy_;
  std::set<std::uint32_t> left_;
  std::map<std::string, int> said_;  // expected messages of each kind so far
};

struct WireCase {
  std::size_t life = 0;
  std::size_t phase = 0;
  WirePoint point;  // counted from the start of the life
  Moment moment = Moment::kOpen;
  Party killed = Party::kCoordinator;
  // True: messages that the killed daemon has sent still arrive. False: they are lost with it.
  bool deliver = true;

  const Phase& at() const { return AllLives()[life][phase]; }
};
std::ostream& operator<<(std::ostream& out, const WireCase& one) {
  return out << NameOf(one.killed) << " killed in " << one.at().name << " at " << one.point.kind
             << " " << one.point.ordinal << (one.deliver ? "" : ", which is lost");
}

// Every party at every message. A phase that several lives contain is tested in the first one.
std::vector<WireCase> WireCases() {
  std::vector<WireCase> cases;
  std::set<std::string> had;
  for (WireCase one; one.life < AllLives().size(); ++one.life) {
    std::map<std::string, int> said;
    for (one.phase = 0; one.phase < AllLives()[one.life].size(); ++one.phase) {
      const bool first = had.insert(one.at().name).second;
      for (const Message& message : one.at().messages) {
        one.moment = message.moment;
        for (int i = 0; i < message.count; ++i) {
          one.point = {message.kind, ++said[message.kind]};
          if (!first) continue;
          const Party sender = one.point.FromAgent() ? Party::kAgent : Party::kCoordinator;
          for (const Party killed : kParties) {
            one.killed = killed;
            for (const bool deliver : {true, false}) {
              one.deliver = deliver;
              if (deliver || killed == sender) cases.push_back(one);
            }
          }
        }
      }
    }
  }
  return cases;
}

class EveryMessageTest : public LifeTest, public testing::WithParamInterface<WireCase> {
 protected:
  // `since_ns`: the earliest time at which the rank could know of the loss.
  void CheckOne(std::uint32_t rank, const Reply& reply, const Outcomes& allowed,
                std::uint64_t since_ns) const {
    const Party killed = GetParam().killed;
    const std::string outcome = OutcomeOf(reply);
    EXPECT_EQ(allowed.count(outcome), 1u) << "rank " << rank << ": " << reply;
    if (outcome == "RANK_LOST" && killed >= Party::kRank0) {
      EXPECT_EQ(reply.Field("rank"), killed == Party::kRank0 ? "0" : "2") << reply;
    }
    // A rank that joins tries again, until its time-out, to reach a daemon that was killed.
    const std::uint64_t retried_ns =
        outcome == "DAEMON_LOST" && JoinsKilledDaemon() ? kJoinTimeoutMs * 1'000'000ull : 0;
    if (reply.end_ns > since_ns) {
      EXPECT_LE(reply.end_ns - since_ns, FairBoundNs(kKnownBoundNs + retried_ns, since_ns))
          << "rank " << rank << ": " << reply;
    }
  }
  static bool JoinsKilledDaemon() {
    const WireCase& one = GetParam();
    return one.at().answer == Answer::kJoined && one.killed <= Party::kAgent;
  }

  void CheckPhase(const Replies& replies, std::uint64_t released_ns) const {
    const WireCase& one = GetParam();
    const Phase& phase = one.at();
    std::set<std::string> heard;  // the different answers
    bool lost = false;
    for (const auto& [rank, reply] : replies) {
      CheckOne(rank, reply,
               Allowed(phase.answer, phase.outcome, one.moment, one.killed, one.deliver, rank == 0),
               released_ns);
      if (OutcomeOf(reply) == phase.outcome) {
        heard.insert(reply.Field("last_to_leave"));
      } else if (OutcomeOf(reply) != "STEP_IN_DOUBT") {
        lost = true;
      }
    }
    EXPECT_LE(heard.size(), 1u) << "the ranks got different answers";
    // While both daemons live, either all ranks get the answer or none. A verdict reaches all or
    // none in any case.
    const bool all = phase.answer == Answer::kCommon && one.killed >= Party::kRank0;
    if (all || phase.answer == Answer::kVerdict) {
      EXPECT_FALSE(!heard.empty() && lost) << "complete on one rank and void on another";
    }
  }

  // Checks the calls after the loss.
  void CheckNext(const Replies& replies) {
    const WireCase& one = GetParam();
    const Phase& phase = one.at();
    Commands next;
    for (std::uint32_t rank = 0; rank < kWorld; ++rank) {
      const auto reply = replies.find(rank);
      const bool told = reply != replies.end() && OutcomeOf(reply->second) != phase.outcome;
      const bool leaves = left_.count(rank) > 0 || Departs(phase.commands[rank]);
      if (Lives(one.killed, rank) && !told && !leaves) next[rank] = phase.next;
    }
    const bool known = one.deliver || one.moment == Moment::kDecided;
    const bool missed = !phase.agent_leaves ||
                        !(one.killed == Party::kRank2 || (one.killed == Party::kAgent && known));
    Begin(next);
    for (const auto& [rank, reply] : Results(next)) {
      CheckOne(
          rank, reply,
          missed ? Allowed(Answer::kVerdict, "", Moment::kOpen, one.killed, one.deliver, rank == 0)
                 : Outcomes{"OK"},
          reply.start_ns);
    }
  }
};

TEST_P(EveryMessageTest, LeavesTheStepCompleteOrVoidOnEveryRank) {
  const WireCase& one = GetParam();
  StartLife(one.point, JoinsKilledDaemon() ? kJoinTimeoutMs : kPatienceMs);
  for (std::size_t phase = 0; phase < one.phase; ++phase) {
    Walk(AllLives()[one.life][phase]);
    ASSERT_FALSE(HasFailure());
  }
  Begin(one.at().commands);
  ASSERT_TRUE(proxy_->AwaitHeld([] { return false; })) << "the message was never sent";
  Kill(one.killed);
  const std::uint64_t released_ns = NowNs();
  proxy_->Release(one.deliver);
  const Replies replies = Results(one.at().commands);
  CheckPhase(replies, released_ns);
  CheckNext(replies);
}

std::string CaseName(const testing::TestParamInfo<WireCase>& info) {
  std::string name = std::string(NameOf(info.param.killed)) + "_" + info.param.at().name + "_" +
                     info.param.point.kind + "_" + std::to_string(info.param.point.ordinal) +
                     (info.param.deliver ? "" : "_lost");
  for (char& c : name) {
    if (c == '.') c = '_';
  }
  return name;
}

INSTANTIATE_TEST_SUITE_P(Wire, EveryMessageTest, testing::ValuesIn(WireCases()), CaseName);

class WholeLifeTest : public LifeTest, public testing::WithParamInterface<std::size_t> {};

TEST_P(WholeLifeTest, SendsExactlyTheListedMessages) {
  StartLife(std::nullopt);
  std::map<std::string, int> said;
  for (const Phase& phase : AllLives()[GetParam()]) {
    said = Walk(phase);
    ASSERT_FALSE(HasFailure()) << phase.name;
  }
  // A client may report two buckets in one message.
  auto& marks = said["rank_request.bucket_ready"];
  EXPECT_LE(marks, 4);
  marks = std::min(marks, 2);
  EXPECT_EQ(said, said_);
}

INSTANTIATE_TEST_SUITE_P(Lives, WholeLifeTest, testing::Range<std::size_t>(0, AllLives().size()));

TEST(LivesTest, ContainEveryKindOfMessage) {
  std::set<std::string> kinds;
  const auto add = [&kinds](const google::protobuf::Descriptor* side, const std::string& of_rank,
                            const google::protobuf::Descriptor* session) {
    for (int i = 0; i < side->field_count(); ++i) {
      const std::string kind = side->field(i)->name();
      if (kind != of_rank) kinds.insert(kind);
    }
    for (int i = 0; i < session->field_count(); ++i) {
      kinds.insert(of_rank + "." + session->field(i)->name());
    }
  };
  add(v1::AttachRequest::descriptor(), "rank_request", v1::SessionRequest::descriptor());
  add(v1::AttachResponse::descriptor(), "rank_response", v1::SessionResponse::descriptor());
  std::set<std::string> had(std::begin(kElsewhere), std::end(kElsewhere));
  for (const Life& life : AllLives()) {
    for (const Phase& phase : life) {
      for (const Message& message : phase.messages) had.insert(message.kind);
    }
  }
  EXPECT_EQ(had, kinds);
}

// ---- Every call of a rank

// The rank's last call before the kill.
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
  // Waits until the nodes are connected. No call of a rank waits for that, so without this the
  // connecting could overlap with any call. EveryMessageTest covers a kill while nodes connect.
  void AwaitNodesMet() const {
    EXPECT_TRUE(a_->AwaitStatus([this](const auto& now) {
      return std::any_of(now.jobs().begin(), now.jobs().end(), [this](const auto& job) {
        return job.job_id() == job_ && job.engine().connected();
      });
    }));
  }
  // Runs a step of a ready layout up to `stage`. Returns when the coordinator knows of it.
  void Step(std::uint32_t rank, Stage stage) {
    if (stage >= Stage::kMarkOne) Do(rank, "mark 1 0");
    if (stage >= Stage::kMarkAll) Do(rank, "mark 1 1");
    if (stage >= Stage::kEnd) Do(rank, "end 1");
    EXPECT_EQ(trainers_[rank]->Do("wait 1 timeout_ms=1").reason, "WAIT_TIMEOUT");
  }
};

// Rank 1 never begins its step, `one.rank` stops at `one.stage`, and the third rank has ended its
// step. So no step is complete, and only ranks whose EndStep gets no answer are in doubt.
TEST_P(EveryCallTest, OnlyRanksWithAnUnansweredEndStepAreInDoubt) {
  const CallCase& one = GetParam();
  const std::uint32_t third = 2 - one.rank;
  Start(Address());
  for (const auto& trainer : trainers_) trainer->Send(trainer->join());
  for (const auto& trainer : trainers_) ASSERT_TRUE(trainer->Receive().ok());
  AwaitNodesMet();
  const std::string layout = kRegister;
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
    Reply reply = begun ? trainers_[rank]->Result() : trainers_[rank]->Do(layout);
    // The killed one may have agreed before it died, so that the layout became ready.
    if (one.stage == Stage::kJoin && reply.ok()) reply = trainers_[rank]->Do("wait 1");
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
    EXPECT_LE(reply.end_ns - killed_ns, FairBoundNs(kKnownBoundNs, killed_ns))
        << "rank " << rank << ": " << reply;
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
